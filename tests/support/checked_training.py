"""What ranks run while a test breaks their network: steps whose every sum is compared with NumPy's, until told to stop.

Imported by the ranks themselves: no pytest, nothing of `tests`.
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
    """Return what *rank* pushes: magnitudes differ, so that another order of sums shows in the bits."""
    source = np.random.default_rng([rank, step, number])
    values = source.standard_normal(SIZES[number], dtype="f4")
    return values * np.float32(10.0) ** source.integers(-3, 4, SIZES[number]).astype("f4")


def train(folder: str) -> dict[str, Any]:
    """Train until there is a file ``stop`` in *folder*; the file ``rank N`` there counts the steps of each rank.

    Returns the steps whose sums were not those of the reference to the bit, how many there were, and the counters
    before and after.
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
            # each rank is the only one of its machine
            expected = reference_sum.reduce([[gradient(other, step, number)] for other in range(size)], True)
            if np.asarray(bpsfast.synchronize(handle)).tobytes() != expected.tobytes():
                wrong.append((step, number))
        step += 1
        temporary = path.with_suffix(".new")
        temporary.write_text(str(step))
        os.replace(temporary, path)
    return {"wrong": wrong, "steps": step, "before": before, "after": bpsfast.counters()}
