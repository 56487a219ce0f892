"""Checks arguments of API calls: reductions by Horovod's names (Average, Sum), learning rates."""
from __future__ import annotations

import enum
import math
import reprlib
from typing import Any

import numpy as np

from ..orchestration.errors import ConfigError


class ReduceOp(enum.IntEnum):
    """How the tensors of all ranks are combined. Average divides by their number, integers downwards."""

    Average = 0
    Sum = 1


Average, Sum = ReduceOp


def flag(average: Any) -> bool:
    """Return *average*; raises `ConfigError` if it is no bool, which is usually an argument in the wrong place."""
    if isinstance(average, bool | np.bool_):
        return bool(average)
    raise ConfigError(f"average={reprlib.repr(average)} is a {type(average).__name__}, expected True or False: give a "
                      "name as name=..., a reduction as op=...")


def averages(average: bool, op: int | None) -> bool:
    """Return whether *op* averages; without it, *average*.

    Raises `ConfigError` if *average* is no bool, *op* is no reduction, or the two contradict each other.
    """
    average = flag(average)
    if op is None:
        return average
    try:
        found = ReduceOp(op)
    except ValueError:
        raise ConfigError(f"op={op!r} is no reduction: use Average or Sum") from None
    if not average and found is ReduceOp.Average:
        raise ConfigError("average=False and op=Average contradict each other: leave one of them out")
    return found is ReduceOp.Average


def takes_mean(average: bool | None, op: int | None) -> bool:
    """Return whether *average* or *op*, of which a caller gives at most one, asks for a mean (the default).

    Raises ConfigError if both are given, or *op* is neither Average nor Sum.
    """
    if average is not None and op is not None:
        raise ConfigError("The op parameter supersedes average. Please provide only one of them.")
    return averages(True if average is None else average, op)


def check_passes(passes: Any) -> None:
    """Raise `ConfigError` unless *passes*, the number of backward passes per step, is at least 1."""
    if not isinstance(passes, int) or passes < 1:
        raise ConfigError(f"backward_passes_per_step must be > 0, got {passes!r}")


def checked_learning_rate(rate: float | None) -> float | None:
    """Return *rate* for the nodes' error feedback; None: the rate of the push before stays.

    A node scales the error that a step left by the ratio of the two rates. A rate of 0 counts as None: that step
    changes nothing. Raises `ConfigError` if it is no number, infinite or negative.
    """
    if rate is None:
        return None
    try:
        value = float(rate)
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"learning_rate={rate!r}: expected a number that is not negative")
    return value or None
