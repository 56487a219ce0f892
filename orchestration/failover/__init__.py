"""The scheduler process, and how another scheduler continues the job of a lost one. See docs/design/failover.md."""
