"""Readers of trace files: one trace for the whole job, arrows, summaries and priority inversions.

Design: ``bpsfast/docs/design/observability.md``.
"""
