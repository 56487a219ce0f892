"""Horovod's reductions (Average, Sum, Min, Max, Product), with its names and numbers for them."""
from __future__ import annotations

import enum
import reprlib
import warnings
from typing import Any

import numpy as np

from ..orchestration.errors import ConfigError
from ..trainer.arguments import flag
from .errors import AdasumError


class ReduceOp(enum.IntEnum):
    """How the tensors of all ranks are combined. Average divides by the number of ranks, integers towards zero."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOp


def chosen(op: int | None, average: bool | None = None) -> ReduceOp:
    """Return the reduction that *op*, or Horovod's older *average*, selects; by default Average.

    Raises ConfigError if both are given, *average* is not a bool, or *op* is not a reduction; AdasumError for Adasum.
    """
    if average is not None:
        if op is not None:
            raise ConfigError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` has been replaced with `op` and will be removed in v1.0",
                      DeprecationWarning, stacklevel=4)
        return ReduceOp.Average if flag(average) else ReduceOp.Sum
    if op is None:
        return ReduceOp.Average
    numbers = isinstance(op, int | np.integer) and not isinstance(op, bool)
    found = next((each for each in ReduceOp if numbers and each == op), None)
    if found is None:
        raise ConfigError(f"op={op!r} is no reduction: use Average, Sum, Min, Max or Product")
    if found is ReduceOp.Adasum:
        raise AdasumError
    return found


def factor(what: str, value: Any) -> float:
    """Return the factor *value*; raises `ConfigError`, which names it as *what*, if it is not a number."""
    try:
        found = float("nan" if isinstance(value, str | bytes) else value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a torch tensor of several elements
        found = float("nan")
    if found != found:
        raise ConfigError(f"{what}={reprlib.repr(value)}: expected a number")
    return found


def check_predivision(by: Any, averages: bool) -> None:
    """Raise `ConfigError` unless the gradient_predivide_factor *by* is positive, and 1 if the reduction is not Average.
    """
    if factor("gradient_predivide_factor", by) <= 0:
        raise ConfigError(f"gradient_predivide_factor={by!r}: expected a positive number")
    if by != 1.0 and not averages:
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
