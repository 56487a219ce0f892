"""The memory-stream model: how long a push_pull on one machine takes if nothing but memory bandwidth limits it.

Every byte of the gradient is read or written a known number of times (streams); with B the bandwidth that the same
number of processes reach when they stream through shared segments, the time is streams x bytes / B. Stores past the
caches do not read what they overwrite, so a store is one stream.
"""
from __future__ import annotations

from bpsfast.settings import Settings
from bpsfast.trainer.unit import window_parts

#: The `memory` operation of `ranks.Ranks` reads and writes each byte once.
COPY_STREAMS = 2


def streams(variant: str, n_local: int, nbytes: int) -> int:
    """Return how often each byte of one rank's gradient goes through memory, in all *n_local* ranks together."""
    if variant == "numpy":
        return n_local + 1  # every input read, the result written
    if variant == "in place":  # the least an all-reduce of private memory can do: every buffer read, and written
        return 2 * n_local
    n_parts = -(-nbytes // Settings().partition_bytes)
    streamed = n_parts >= 2 * window_parts(n_local)  # through a window that stays in the cache
    copied_in, copied_out = n_local if streamed else 3 * n_local, 2 * n_local
    return copied_in + 1 + copied_out


def bandwidth(nbytes: int, copy_s: float) -> float:
    """Return bytes per second of memory from the time of the ``memory`` operation on *nbytes*."""
    return COPY_STREAMS * nbytes / copy_s


def predicted_s(variant: str, n_local: int, nbytes: int, bandwidth_bytes: float) -> float:
    """Return the modelled time of one push_pull."""
    return streams(variant, n_local, nbytes) * nbytes / bandwidth_bytes
