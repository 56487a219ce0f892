"""Examines a machine for what keeps RDMA from working, and says what to type."""
