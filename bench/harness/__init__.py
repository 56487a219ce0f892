"""Shared by all benchmarks: runs the compared libraries as processes, takes samples in turns, writes result files."""
