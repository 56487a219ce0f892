"""The reductions, by Horovod's names: Average, Sum."""
from __future__ import annotations

import enum
import math
import reprlib
from typing import Any

import numpy as np

from ..orchestration.errors import ConfigError


class ReduceOp(enum.IntEnum):
    """How tensors of different ranks become one. Average divides by their number, integers downwards."""

    Average = 0
    Sum = 1


Average, Sum = ReduceOp


def flag(average: Any) -> bool:
    """Return *average*; raises `ConfigError` if it is no bool: an argument in the wrong place, usually."""
    if isinstance(average, bool | np.bool_):
        return bool(average)
    raise ConfigError(f"average={reprlib.repr(average)} is a {type(average).__name__}, expected True or False: give a "
                      "name as name=..., a reduction as op=...")


def averages(average: bool, op: int | None) -> bool:
    """Return whether *op* averages; without it, *average*.

    Raises
    ------
    ConfigError
        If *average* is no bool, *op* is no reduction, or says something else than *average*.
    """
    average = flag(average)
    if op is None:
        return average
    try:
        found = ReduceOp(op)
    except ValueError:
        raise ConfigError(f"op={op!r} is no reduction: use Average or Sum") from None
    if not average and found is ReduceOp.Average:
        raise ConfigError("average=False and op=Average say two things about one: leave one of them out")
    return found is ReduceOp.Average


def checked_learning_rate(rate: float | None) -> float | None:
    """Return *rate* as the nodes want it; None: that of the push before counts on.

    So it does with a rate of 0, whose step changes nothing.

    Raises
    ------
    ConfigError
        If it is no number, infinite or negative.
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
