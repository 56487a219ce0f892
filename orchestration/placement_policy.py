"""The placement policies that a job may choose, and BytePS's key hashes, which are there for comparison.

Hashes spread *keys*, not bytes: they leave the worst machine 24-131 % above the optimum where the greedy placement
stays within 10 %. BytePS hashes the text of a destroyed temporary in C++; here the text is defined: the decimal digits
of the key, ASCII. `built_in` was ``std::hash``, which differs by C++ library: here it is FNV-1a.

Source: BytePS ``byteps/common/global.cc``, ``Hash_Naive`` ... ``Hash_Mixed_Mode``.
"""
from __future__ import annotations

from collections.abc import Callable

from .errors import ConfigError

_MASK = (1 << 64) - 1

#: Buckets of the mixed rule (BYTEPS_MIXED_MODE_BOUND).
MIXED_BOUND = 101


def naive(key: int) -> int:
    """Mix the tensor's and the partition's number linearly."""
    return (((key >> 16) + (key % 65536)) * 9973) & _MASK


def built_in(key: int) -> int:
    """Hash the decimal digits by 64-bit FNV-1a."""
    value = 0xCBF29CE484222325
    for digit in str(key).encode("ascii"):
        value = ((value ^ digit) * 0x100000001B3) & _MASK
    return value


def djb2(key: int) -> int:
    """Hash the decimal digits by Bernstein's 33h + c; BytePS's default."""
    value = 5381
    for digit in str(key).encode("ascii"):
        value = (33 * value + digit) & _MASK
    return value


def sdbm(key: int) -> int:
    """Hash the decimal digits by sdbm's 65599h + c."""
    value = 0
    for digit in str(key).encode("ascii"):
        value = (65599 * value + digit) & _MASK
    return value


HASHES: dict[str, Callable[[int], int]] = {"naive": naive, "built_in": built_in, "djb2": djb2, "sdbm": sdbm}

#: All names that `server` knows.
NAMES = (*HASHES, "mixed")


def mixed(key: int, n_workers: int, n_helpers: int, bound: int = MIXED_BOUND) -> int:
    """Return the server number of *key* by the mixed rule: helpers are 0..k-1, colocated servers k..k+n-1.

    The optimal share of the *buckets* goes to helpers: ratio 2k(n-1) / (n(n+k) - 2k), defined for k <= n only. Raises
    `ConfigError` if there are more helpers than workers, or fewer buckets than servers.
    """
    if n_helpers > n_workers:
        raise ConfigError(f"placement hash:mixed is defined for at most as many helpers as machines with ranks, "
                          f"got {n_helpers} helpers and {n_workers} machines; use placement optimal")
    if bound < n_workers + n_helpers:
        raise ConfigError(f"placement hash:mixed has only {bound} buckets for {n_workers + n_helpers} servers; "
                          "use placement optimal")
    denominator = n_workers * (n_workers + n_helpers) - 2 * n_helpers
    bucket = djb2(key) % bound
    # bucket < ratio * bound, in integers: exact, equal on every machine. n = 1, k = 1 has the ratio 0/0.
    on_helper = denominator > 0 and bucket * denominator < 2 * n_helpers * (n_workers - 1) * bound
    if on_helper:
        return djb2(bucket) % n_helpers
    return n_helpers + djb2(bucket) % n_workers


def server(name: str, key: int, n_workers: int, n_helpers: int, bound: int = MIXED_BOUND) -> int:
    """Return the node index that hash *name* gives to *key* (tensor number << 16 | partition number).

    BytePS numbers servers with helpers first; node indexes here have the machines with ranks first.
    """
    if name == "mixed":
        number = mixed(key, n_workers, n_helpers, bound)
    elif name in HASHES:
        number = HASHES[name](key) % (n_workers + n_helpers)
    else:
        raise ConfigError(f"placement hash:{name} is unknown; known hashes: {', '.join(NAMES)}")
    return n_workers + number if number < n_helpers else number - n_helpers


def check_policy(policy: str) -> None:
    """Raise ConfigError unless *policy* is one of "optimal", "colocated", "ps", "hash:NAME" with a known name."""
    if policy not in ("optimal", "colocated", "ps", *(f"hash:{name}" for name in NAMES)):
        raise ConfigError(f"placement {policy!r} is unknown; use optimal, colocated, ps or hash:NAME with NAME one of "
                          f"{', '.join(NAMES)}")
