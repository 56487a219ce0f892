"""The scheduler, and how another one continues the job of a lost one. See docs/design/failover.md."""
