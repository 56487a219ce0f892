"""Tensors become partitions, and each gets a node that owns and sums it. Pure. See docs/design/placement.md."""
