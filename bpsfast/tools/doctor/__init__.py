"""Examines a machine for problems with RDMA and says how to fix them."""
