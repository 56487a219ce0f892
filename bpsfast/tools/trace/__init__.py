"""For ``bpsfast trace``: merges a job's trace files into one with arrows, summarizes it, finds priority inversions.

Design: ``bpsfast/docs/design/observability.md``.
"""
