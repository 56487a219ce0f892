"""Rounds of a unit are counted modulo 2^32: a job may make more of them, and goes on. Pure."""
from __future__ import annotations

N_ROUNDS = 1 << 32


def after(round_: int, n: int = 1) -> int:
    """Return the *n*-th round that follows."""
    return (round_ + n) % N_ROUNDS


def ahead(round_: int, than: int) -> int:
    """Return by how much a round is ahead of another one, negative if it is behind; both are less than 2^31 apart."""
    return (round_ - than + N_ROUNDS // 2) % N_ROUNDS - N_ROUNDS // 2
