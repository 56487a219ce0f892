"""Finds values that differ between ranks that should have the same state, by their digests.

Numbers, texts, arrays, and containers of them count. Other objects do not: whether two of them are equal only their
class knows, and equal ones need not have the same bytes when pickled.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

#: The most names that a warning lists.
MOST_NAMED = 5


def digests(values: Mapping[str, Any], as_array: Callable[[Any], np.ndarray[Any, Any] | None]) -> dict[str, bytes]:
    """Return by name a digest, of 8 bytes, of each leaf of *values*: of ``{"model": {"weight": x}}`` "model.weight".

    *as_array* returns an array of a framework's tensor as NumPy's, and None of anything else.
    """
    return {name: _digest(*leaf) for name, leaf in _leaves(values, "", as_array)}


def total(found: Mapping[str, bytes]) -> int:
    """Return one number of 63 bits for all that `digests` has found."""
    parts = b"".join(name.encode() + b"\0" + digest for name, digest in sorted(found.items()))
    return int.from_bytes(_digest(parts), "little") >> 1


def different(mine: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    """Return the names of values that differ between *mine* and *other*, or that only one of them has."""
    return sorted(name for name in {*mine, *other} if mine.get(name) != other.get(name))


def _leaves(value: Any, name: str, as_array: Callable[[Any], np.ndarray[Any, Any] | None]
            ) -> Iterator[tuple[str, tuple[Any, ...]]]:
    array = value if isinstance(value, np.ndarray) else as_array(value)
    if array is not None:
        if not array.dtype.hasobject:
            yield name, (str(array.dtype).encode(), str(array.shape).encode(), array.tobytes())
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(key, str | int):
                yield from _leaves(each, f"{name}.{key}" if name else str(key), as_array)
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield from _leaves(each, f"{name}.{i}", as_array)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        yield name, (type(value).__name__.encode(), repr(value).encode())


def _digest(*parts: Any) -> bytes:
    made = hashlib.blake2b(digest_size=8)
    for part in parts:
        made.update(part)
    return made.digest()
