"""What kernels write of a value: NaN as the quiet one, and a state that is always finite."""
from __future__ import annotations

import math

from bpsfast.kernels.codecs.helper import helper


@helper
def quiet(value):  # type: ignore[no-untyped-def]
    """Return *value*, the quiet NaN for any NaN."""
    return value if value == value else math.nan


@helper
def finite(value):  # type: ignore[no-untyped-def]
    """Return *value*, 0 if it is NaN or infinite."""
    return value if abs(value) < math.inf else 0.0
