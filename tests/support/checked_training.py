"""Training for ranks whose network a test breaks: it compares every sum with NumPy's until it is told to stop.

Ranks import it, so it imports neither pytest nor other files of `tests`.
"""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import bpsfast
from bpsfast.base import reference_sum

SIZES = [300_000, 70_000, 1_000, 150_000]


def gradient(rank: int, step: int, number: int) -> np.ndarray:
    """Return the gradient of *rank*, whose magnitudes differ so that the bits depend on the order of sums."""
    source = np.random.default_rng([rank, step, number])
    values = source.standard_normal(SIZES[number], dtype="f4")
    return values * np.float32(10.0) ** source.integers(-3, 4, SIZES[number]).astype("f4")


def train(folder: str) -> dict[str, Any]:
    """Train until *folder* has a file ``stop``; its files ``rank N`` have the number of steps of each rank.

    Returns the steps whose sums differ from the reference in any bit, the number of steps, and the counters before and
    after.
    """
    before = bpsfast.counters()
    rank, size, step, wrong = bpsfast.rank(), bpsfast.size(), 0, []
    path, stop = Path(folder, f"rank {rank}"), Path(folder, "stop")
    stops = 0.0
    while stops == 0:
        mine = [gradient(rank, step, number) for number in range(len(SIZES))]
        handles = [bpsfast.push_pull_async(values, True, f"tensor {number}") for number, values in enumerate(mine)]
        stops = float(bpsfast.push_pull(np.full(1, stop.exists(), "f4"), False, "stop")[0])
        for number, handle in enumerate(handles):
            # each rank is alone on its machine
            expected = reference_sum.reduce([[gradient(other, step, number)] for other in range(size)], True)
            if np.asarray(bpsfast.synchronize(handle)).tobytes() != expected.tobytes():
                wrong.append((step, number))
        step += 1
        temporary = path.with_suffix(".new")
        temporary.write_text(str(step))
        os.replace(temporary, path)
    return {"wrong": wrong, "steps": step, "before": before, "after": bpsfast.counters()}
