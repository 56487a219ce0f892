"""Parses lists of names, numbers and sizes in the options of benchmarks."""
from __future__ import annotations

from collections.abc import Collection

from bpsfast.base.value_formats import parse_size
from bpsfast.orchestration.errors import ConfigError


def parse_names(option: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the names in "a,b", the value of *option*; raises `ConfigError` if it is empty or one is not *known*."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(f"{option} {text}: {(unknown or [text])[0]!r} is none of {', '.join(known)}")
    return names


def parse_counts(what: str, text: str, most: int) -> list[int]:
    """Return the numbers of *what* in "2,4", each from 2 to *most*; raises `ConfigError` for others."""
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(2 <= n <= most for n in counts):
        raise ConfigError(f"{what} {text!r}: expected counts from 2 to {most} such as 2,4")
    return counts


def parse_numbers(option: str, text: str, most: float, expected: str) -> list[float]:
    """Return the numbers in "0.5,1", the value of *option*, above 0 and up to *most*; *expected* describes them."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [0.0]
    if not all(0 < number <= most for number in numbers):
        raise ConfigError(f"{option} {text!r}: expected {expected}")
    return numbers


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return bytes: ``4K:256M`` means every power of two in this range, ``4K,1M`` is a list."""
    if ":" not in text:
        return tuple(_size(part) for part in text.split(","))
    low, _, high = text.partition(":")
    found, at, end = [], _size(low), _size(high)
    while at <= end:
        found.append(at)
        at *= 2
    if not found:
        raise ConfigError(f"sizes {text}: the first is larger than the last")
    return tuple(found)


def _size(text: str) -> int:
    nbytes = parse_size(text)
    if not nbytes or nbytes % 4:
        raise ConfigError(f"{text!r} is no size: expected bytes (a multiple of 4) with K, M or G, such as 64M")
    return nbytes
