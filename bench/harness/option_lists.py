"""Lists of names as a user gives them."""
from __future__ import annotations

from collections.abc import Collection

from bpsfast.orchestration.errors import ConfigError


def parse_names(option: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the names of "a,b", the value of *option*.

    Raises
    ------
    ConfigError
        If there is none, or one that is not *known*.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(f"{option} {text}: {(unknown or [text])[0]!r} is none of {', '.join(known)}")
    return names
