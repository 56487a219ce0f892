"""Fits the simulator's constants that the BytePS paper does not print, each to as few measured figures as possible.

Three constants of the network come from figure 12 alone, then one overhead for each framework from figures 15 and 16 at
256 GPUs. Nothing is fitted to a single cell, to figure 13, to smaller scales or to other claims: those are predictions.
The result is deterministic.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from bpsfast.tools.simulator.workload import one_bulk

from . import osdi20
from .figures import BULK_NBYTES, OVERHEADS, Constants, Row, run, workload_of

#: A search ends when its interval is this fraction of the first one.
_TOLERANCE = 1 / 256


class Fit(NamedTuple):
    """One calibrated number: its name and value, the data it was fitted to, and the mean error there."""

    name: str
    value: float
    unit: str
    figure: str
    n_cells: int
    residual: float


def least(loss: Callable[[float], float], low: float, high: float) -> float:
    """Return the approximate minimum of *loss* in [low, high], by ever finer grids around the best point so far.

    It uses grids, not bisection, because losses of simulations have small local minima.
    """
    loss = functools.cache(loss)
    width = high - low
    while (high - low) > width * _TOLERANCE:
        step = (high - low) / 8
        best = min((low + i * step for i in range(9)), key=loss)
        low, high = max(low, best - step), min(high, best + step)
    return min((low, (low + high) / 2, high), key=loss)


def calibrate() -> tuple[Constants, list[Fit]]:
    """Return the constants, and how well each describes the data it was fitted to."""
    constants, fits = Constants(), []
    job = one_bulk(BULK_NBYTES)
    for field, system, low, high, unit in (
        ("ring_overhead_s", "all-reduce", 0.0, 1e-4, "s/slice"),
        ("message_overhead_s", "BytePS", 0.0, 1e-4, "s/message"),
        ("server_rate", "PS", 1e9, 25e9, "bytes/s"),
    ):
        measured = osdi20.FIGURE_12[system]
        ks = [8] if system == "all-reduce" else list(range(system == "PS", 9))

        def loss(value: float, field: str = field, system: str = system, ks: list[int] = ks,
                 measured: tuple[float, ...] = measured, so_far: Constants = constants) -> float:
            tried = _with(so_far, field, value)
            found = [BULK_NBYTES * 8e-9 / run(system, job, 8, k, tried, gpus=1, n_steps=1).step_s for k in ks]
            return sum(abs(f / measured[k] - 1) for f, k in zip(found, ks)) / len(ks)

        value = least(loss, low, high)
        constants = _with(constants, field, value)
        fits.append(Fit(field, value, unit, "12", len(ks), loss(value)))
    for framework, unit in OVERHEADS.items():
        value, residual, n_cells = _framework(framework, constants)
        constants = constants._replace(framework=(*constants.framework, (framework, value)))
        fits.append(Fit(framework, value, unit, "15/16 at 256 GPUs", n_cells, residual))
    return constants, fits


def _with(constants: Constants, field: str, value: float) -> Constants:
    changed: dict[str, Any] = {field: value}
    return constants._replace(**changed)


def _framework(framework: str, constants: Constants) -> tuple[float, float, int]:
    """Return the overhead of *framework*, the mean error with it, and the number of cells.

    An overhead is time after a step's last sum, so it is added to simulated steps without simulating them again.
    """
    cells = []
    n = osdi20.SCALES[-1]
    for job in osdi20.JOBS:
        if job.framework != framework:
            continue
        model = workload_of(job.model)
        for system, measured in job.efficiency.items():
            if framework != "PyTorch" and system != "PS":
                continue  # no other figure has its overhead
            found = run(system.split()[0], model, n, n if system in ("PS", "BytePS k=n") else 0, constants,
                        cross_barrier=framework == "MXNet")
            times = n if system == "PS" else model.nbytes
            cells.append((found, times, measured[-1]))

    def loss(value: float) -> float:
        return sum(abs(found.compute_s / (found.step_s + value * times) - goal) for found, times, goal in cells
                   ) / len(cells)

    high = 0.05 if framework != "PyTorch" else 1e-9
    value = least(loss, 0.0, high)
    return value, loss(value), len(cells)


def mean_error(rows: list[Row]) -> float:
    """Return the mean absolute error of *rows*."""
    return sum(abs(row.error) for row in rows) / len(rows)
