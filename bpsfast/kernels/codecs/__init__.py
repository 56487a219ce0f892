"""Numba kernels of the codecs, and their plain reading in NumPy (`codec_reference`)."""
