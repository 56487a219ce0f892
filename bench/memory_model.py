"""The memory-stream model: how long a push_pull on one machine takes if nothing but memory bandwidth limits it.

Every byte of the gradient is read or written a known number of times (streams); with B the bandwidth that the same
number of processes reach when they stream through shared segments, the time is streams x bytes / B. Stores past the
caches do not read what they overwrite, so a store is one stream. B is that of copies which go through as much memory
as the push_pull does: what fits into a cache is faster, and where that ends is not a matter of a gradient's size alone.
"""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bpsfast.orchestration.placement.partition import CACHED_NBYTES
from bpsfast.trainer.sliding_window import n_slots

#: The `memory` operation of `ranks.Ranks` reads and writes each byte once.
COPY_STREAMS = 2


def streams(variant: str, n_local: int, nbytes: int) -> int:
    """Return how often each byte of one rank's gradient goes through memory, in all *n_local* ranks together."""
    if variant == "numpy":
        return n_local + 1  # every input read, the result written
    if variant == "in place":  # the least an all-reduce of private memory can do: every buffer read, and written
        return 2 * n_local
    if _slides(n_local, nbytes):  # through the caches but for what is private, and the sum: read, and written
        return 2 * n_local + 2
    return 3 * n_local + 1 + 2 * n_local


def touched_nbytes(variant: str, n_local: int, nbytes: int) -> int:
    """Return how many different bytes of memory push_pulls go through, in all *n_local* ranks together.

    One after another: their results are in two places by turns.
    """
    if variant == "numpy":
        return (n_local + 2) * nbytes
    if variant == "in place":
        return n_local * nbytes
    staged = n_slots(n_local) * CACHED_NBYTES if _slides(n_local, nbytes) else nbytes
    return (n_local + 2) * nbytes + n_local * staged


def _slides(n_local: int, nbytes: int) -> bool:
    """Tell whether private tensors go in and out through a window that stays in the caches (`SlidingWindow`)."""
    return -(-nbytes // CACHED_NBYTES) >= 2 * n_slots(n_local)


def bandwidth(copies_s: Mapping[int, float], nbytes: int) -> float:
    """Return bytes per second of memory where *nbytes* are gone through.

    *copies_s* are times of the ``memory`` operation by its bytes. Between two of these, the bandwidth is that of the
    line between them, both axes being logarithms; before the first and beyond the last, that of the nearest.
    """
    sizes = sorted(copies_s)
    known = [COPY_STREAMS * size / copies_s[size] for size in sizes]
    return float(np.exp(np.interp(np.log(nbytes), np.log([COPY_STREAMS * size for size in sizes]), np.log(known))))


def predicted_s(variant: str, n_local: int, nbytes: int, copies_s: Mapping[int, float]) -> float:
    """Return the modelled time of one push_pull; *copies_s* as in `bandwidth`."""
    return streams(variant, n_local, nbytes) * nbytes / bandwidth(copies_s, touched_nbytes(variant, n_local, nbytes))
