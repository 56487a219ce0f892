"""The exception of a call in a form that a rank can send to the test; not all exceptions can be pickled."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raised(function: Callable[..., object], *arguments: Any, **keywords: Any) -> tuple[str, str]:
    """Return the class name and the message of the exception of *function*, or two empty strings."""
    try:
        function(*arguments, **keywords)
    except Exception as exc:
        return type(exc).__name__, str(exc)
    return "", ""
