"""The decisions of the scheduler for one job, from joining to leaving. Pure. See docs/design/recovery.md."""
