"""Learning rates on their way to the nodes, for error feedback: what was not sent was a part of an older step's update.

An error that a step of rate 0.1 left behind counts twice in one of rate 0.05: nodes scale it by the ratio of the two.
BytePS read a file for it, on each machine; here the rate comes with the push.
"""
from __future__ import annotations

import math

from ..orchestration.errors import ConfigError


def checked(rate: float | None) -> float | None:
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
