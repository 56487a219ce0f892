"""What comes next: the writes of one NIC, and operations that all ranks must begin alike. See docs/design/scheduling.md."""
