"""Where a rank's time goes: copies to and from shared memory, waiting for sums, and (the rest) its own computing."""
from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

import bpsfast
from bpsfast.trace import KINDS
from bpsfast.trainer.process import current

_RECORD = np.dtype([("begin_ns", "<u8"), ("end_ns", "<u8"), ("part", "<u4"), ("round", "<u4"), ("kind", "<u2"),
                    ("thread", "<u2"), ("nbytes", "<u4")])


class Spent(NamedTuple):
    """One epoch of one rank; the bytes are those of its machine, up to the moment the epoch ended."""

    compute_s: float
    copy_s: float
    wait_s: float
    summed_bytes: int
    wire_bytes: int

    def __str__(self) -> str:
        return (f"compute {self.compute_s:.2f} s  copy {self.copy_s:.2f} s  wait {self.wait_s:.2f} s  |  this machine: "
                f"summed {self.summed_bytes / 1e6:.0f} MB, on the wire {self.wire_bytes / 1e6:.0f} MB")


class Clock:
    """Divides time, call by call of `epoch`. Copies and waits are those that were traced (setting trace_dir)."""

    def __init__(self) -> None:
        self._seen = len(_records())
        self._at = time.monotonic()
        self._counts = _counts()

    def epoch(self) -> Spent:
        """Return what was spent since the last call."""
        records, now, counts = _records(), time.monotonic(), _counts()
        fresh = records[self._seen :]
        seconds = {name: 0.0 for name, _ in KINDS.values()}
        for kind, (name, _) in KINDS.items():
            mine = fresh[fresh["kind"] == kind]
            seconds[name] = float((mine["end_ns"] - mine["begin_ns"]).sum()) * 1e-9
        copy_s, wait_s = seconds["copy"] + seconds["deliver"], seconds["wait"]
        spent = Spent(now - self._at - copy_s - wait_s, copy_s, wait_s, *(b - a for a, b in zip(self._counts, counts)))
        self._seen, self._at, self._counts = len(records), now, counts
        return spent


def _records() -> np.ndarray:
    """Return the trace records of this rank so far."""
    return np.frombuffer(current().port.trace(), _RECORD)


def _counts() -> tuple[int, int]:
    """Return the bytes that this machine's node has summed, and moved over its tcp streams in both directions."""
    stats = bpsfast.counters()
    moved = sum(nbytes for name, nbytes in stats.items() if name.startswith("wire_") and "_bytes_" in name)
    return stats["engine_bytes_summed"], moved
