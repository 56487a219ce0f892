"""Decides which write a NIC sends next, and the order of operations on all ranks. See docs/design/scheduling.md."""
