"""Barriers by sequence number: a rank's i-th barrier meets every other rank's i-th. Pure."""
from __future__ import annotations


class Barriers:
    """Who of *size* ranks has entered which barrier."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entered: dict[int, set[int]] = {}
        self._done = set[int]()

    def resume(self, done: int) -> None:
        """Know that barriers up to *done* are done."""
        self._done = {done - 1, done}

    def enter(self, rank: int, sequence: int) -> bool:
        """Note that *rank* is at barrier *sequence*; tell, once, that it was the last."""
        if sequence in self._done:
            return False
        entered = self._entered.setdefault(sequence, set())
        entered.add(rank)
        if len(entered) < self._size:
            return False
        del self._entered[sequence]
        self._done.add(sequence)
        self._done.discard(sequence - 2)  # nobody enters i + 1 before all left i - 1
        return True

    def missing(self, sequence: int) -> list[int]:
        """Return the ranks that have not entered barrier *sequence*."""
        if sequence in self._done:
            return []
        entered = self._entered.get(sequence, set())
        return [rank for rank in range(self._size) if rank not in entered]
