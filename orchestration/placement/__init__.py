"""Who sums what: tensors become partitions, and each has an owner. Pure."""
