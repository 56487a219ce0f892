"""Benchmarks that reproduce figures of the papers."""
