"""What a call raises, as a rank can send it to the test: frameworks' errors cannot all be pickled."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raised(function: Callable[..., object], *arguments: Any, **keywords: Any) -> tuple[str, str]:
    """Return the name of the class and the text of what *function* raises; two empty strings if it does not."""
    try:
        function(*arguments, **keywords)
    except Exception as exc:
        return type(exc).__name__, str(exc)
    return "", ""
