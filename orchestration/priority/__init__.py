"""What comes next: writes of one NIC, and operations that all ranks begin alike. See docs/design/scheduling.md."""
