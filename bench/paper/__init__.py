"""Benchmarks that reproduce figures of the BytePS paper (OSDI'20)."""
