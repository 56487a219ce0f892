"""What was measured, in numbers: bandwidth with its peak, latency with its percentiles. Base units: bytes, seconds."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_IMPROVEMENTS = 50


def peak_seconds(posted_ns: bytes | Sequence[int], completed_ns: bytes | Sequence[int]) -> float | None:
    """Return the shortest time per message of any stretch of the run, as perftest's peak is defined.

    A stretch i..j takes from the post of its first message to the completion of its last one: the smallest
    (completed[j] - posted[i]) / (j - i + 1) over all i <= j. None if no times were recorded.

    perftest compares all pairs. Here: for a guess of the answer, one pass finds the stretch that undercuts it most,
    which is the next guess (Dinkelbach's method); a few passes end where none does.
    """
    posted, completed = _nanoseconds(posted_ns), _nanoseconds(completed_ns)
    n = min(len(posted), len(completed))
    if n == 0:
        return None
    posted, completed = posted[:n] - posted[0], completed[:n] - posted[0]
    index = np.arange(n)
    guess = float(completed[-1]) / n
    for _ in range(_IMPROVEMENTS):
        starts = posted - guess * index
        ends = completed - guess * (index + 1)
        most = np.maximum.accumulate(starts)
        j = int(np.argmin(ends - most))
        i = int(np.argmax(starts[:j + 1]))
        better = float(completed[j] - posted[i]) / (j - i + 1)
        if not 0 < better < guess:
            break
        guess = better
    return guess / 1e9 if guess > 0 else None


def bandwidth(nbytes: int, sent: int, seconds: float, peak_s: float | None) -> dict[str, Any]:
    """Return the numbers of one direction; a peak is never below the average."""
    average = nbytes * sent / seconds if seconds > 0 else 0.0
    return {"messages": sent, "seconds": seconds, "average_bytes_per_s": average,
            "peak_bytes_per_s": max(average, nbytes / peak_s) if peak_s else None,
            "messages_per_s": sent / seconds if seconds > 0 else 0.0}


def both(own: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of two directions, as perftest's -b prints it."""
    peaks = [each["peak_bytes_per_s"] for each in (own, peer)]
    return {"messages": own["messages"] + peer["messages"], "seconds": max(own["seconds"], peer["seconds"]),
            "average_bytes_per_s": own["average_bytes_per_s"] + peer["average_bytes_per_s"],
            "peak_bytes_per_s": None if None in peaks else sum(peaks),
            "messages_per_s": own["messages_per_s"] + peer["messages_per_s"]}


def latency(samples_ns: bytes | Sequence[int], n_warmup: int, halves: bool) -> dict[str, Any]:
    """Return perftest's numbers of the samples after *n_warmup*; *halves*: a sample is there and back, we want one way.

    The percentiles are samples: the smallest that so many per cent do not exceed.
    """
    values = np.sort(_nanoseconds(samples_ns)[n_warmup:] / (2e9 if halves else 1e9))
    if not len(values):
        raise ValueError(f"no samples after {n_warmup} of warm-up")

    def percentile(percent: float) -> float:
        return float(values[max(0, math.ceil(len(values) * percent / 100) - 1)])

    return {"min_s": float(values[0]), "max_s": float(values[-1]), "typical_s": float(np.median(values)),
            "average_s": float(values.mean()), "stdev_s": float(values.std()), "p99_s": percentile(99),
            "p999_s": percentile(99.9)}


def _nanoseconds(values: bytes | Sequence[int]) -> np.ndarray:
    return np.frombuffer(values, np.int64) if isinstance(values, bytes) else np.asarray(values, np.int64)
