"""Which node sums which partition: tensors become partitions, and each gets an owner. Pure. See docs/design/placement.md."""
