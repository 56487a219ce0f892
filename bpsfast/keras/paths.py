"""Paths of Keras's variables, and names made of them that are the same on all ranks.

Keras numbers what it names by itself (``dense_2``) by what the process has made before: a rank that has loaded one more
model would have other numbers.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NUMBER = re.compile(r"_\d+(?=[/_]|$)")


def path_of(variable: Any) -> str:
    """Return the path of *variable*; `tf.Variable`s have a name instead."""
    return str(getattr(variable, "path", None) or variable.name)


def without_numbers(path: str) -> str:
    """Return *path* without the numbers at the ends of its words."""
    return _NUMBER.sub("", path)


def common_names(paths: Sequence[str]) -> list[str]:
    """Return names for *paths*, all different: without numbers, those that were there before with a count."""
    return different([without_numbers(path) for path in paths])


def different(names: Sequence[str]) -> list[str]:
    """Return *names*; those that were there before with a count behind them."""
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        found.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return found
