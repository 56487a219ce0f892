"""Readers of trace files: clocks, one trace for the whole job, arrows, summaries and priority inversions."""
