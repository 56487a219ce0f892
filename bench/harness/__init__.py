"""Shared by all benchmarks: starts contestants, takes samples in turns, writes tables and result files."""
