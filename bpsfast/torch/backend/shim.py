"""What differs between versions of torch, in one place: what options look like."""
from __future__ import annotations

from datetime import timedelta
from typing import Any

from ...orchestration.errors import UnsupportedError
from .operands import Reduction

NAME = "bpsfast"

_OPS = {"SUM": "sum", "AVG": "avg", "PRODUCT": "product", "MIN": "min", "MAX": "max", "BAND": "band", "BOR": "bor",
        "BXOR": "bxor"}


def reduction(options: Any) -> Reduction:
    """Return what the ``reduceOp`` of *options* says."""
    op = options.reduceOp
    kind = getattr(op, "op", op)
    name = getattr(kind, "name", str(kind).rpartition(".")[2])
    if name == "PREMUL_SUM":
        return Reduction("sum", op.__getstate__()[1])
    if name not in _OPS:
        raise UnsupportedError(f"ReduceOp.{name} is unknown; bpsfast combines by {', '.join(_OPS)} and PREMUL_SUM")
    return Reduction(_OPS[name])


def is_waited_for(options: Any) -> bool:
    """Whether the caller will wait at once; false where this version of torch does not say."""
    return not getattr(options, "asyncOp", True)


def timeout_of(options: Any, default_s: float) -> float:
    """Return the deadline that *options* give, else *default_s*; seconds."""
    timeout = getattr(options, "timeout", None)
    if isinstance(timeout, timedelta) and timeout.total_seconds() > 0:
        return timeout.total_seconds()
    return default_s
