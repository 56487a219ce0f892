"""Makes all ranks begin operations in one order: rank 0 decides, the others follow. Pure.

An all-reduce mixes up tensors, or hangs, if two ranks begin in different orders, and gradients become ready in
different orders. So rank 0 takes what it was given by urgency, as far as there is credit, and announces it; the others
begin in that order, each when it was given the same. Source: ByteScheduler (SOSP'19), where for all-reduce one master
decides and all follow.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from ..errors import BusyError, MismatchError
from .send_queue import CreditQueue


class Entry(msgspec.Struct, frozen=True):
    """One operation: a piece of a tensor. All ranks must give it with the same `nbytes` and `kind` (words)."""

    name: str
    part: int
    nbytes: int
    kind: str

    @property
    def key(self) -> tuple[str, int]:
        """What identifies it on all ranks."""
        return self.name, self.part

    def __str__(self) -> str:
        return f"{self.name!r} part {self.part} ({self.nbytes} bytes, {self.kind})"


class Leader:
    """What rank 0 was given, and what all ranks begin next. One thread at a time.

    *others*: ranks that must also be given an entry before it is queued. Then a rank that waits for one entry before it
    gives another one cannot block the others. Without, the others follow as soon as they are given what is next.
    """

    def __init__(self, credit_nbytes: int, others: Iterable[int] = ()) -> None:
        self._others = frozenset(others)
        self._given_to: dict[tuple[str, int], set[int]] = {}
        self._waiting: dict[tuple[str, int], tuple[Entry, int]] = {}  # with its priority, until all others have it
        self._queue: CreditQueue[Entry] = CreditQueue(credit_nbytes)
        self._pending: set[tuple[str, int]] = set()
        self._n_given = 0

    def give(self, entry: Entry, priority: int) -> None:
        """Queue *entry*; higher *priority* first, then by arrival.

        Raises BusyError if it has been given before and is not done.
        """
        if entry.key in self._pending:
            raise _busy(entry)
        self._pending.add(entry.key)
        self._waiting[entry.key] = entry, priority
        self._queue_if_given(entry.key)

    def given_to(self, rank: int, keys: Iterable[tuple[str, int]]) -> None:
        """Note that another *rank* has been given *keys*."""
        for key in keys:
            self._given_to.setdefault(key, set()).add(rank)
            self._queue_if_given(key)

    def waits_for(self, ranks: Iterable[int]) -> Entry | None:
        """Return an entry that was not given to one of *ranks*, of the *others*; None if there is none."""
        among = self._others.intersection(ranks)
        waiting = (entry for key, (entry, _) in self._waiting.items() if among - self._given_to.get(key, set()))
        return next(waiting, None)

    def _queue_if_given(self, key: tuple[str, int]) -> None:
        if key not in self._waiting or self._others - self._given_to.get(key, set()):
            return
        entry, priority = self._waiting.pop(key)
        self._given_to.pop(key, None)
        self._queue.put(entry, order=-priority, key=self._n_given, nbytes=entry.nbytes)
        self._n_given += 1

    def turns(self) -> list[Entry]:
        """Take all that credit admits: what all ranks begin next, in this order."""
        taken = []
        while (entry := self._queue.pop()) is not None:
            taken.append(entry)
        return taken

    def done(self, entry: Entry) -> None:
        """Give back the credit of *entry*, which is complete here."""
        self._queue.release(entry.nbytes)
        self._pending.discard(entry.key)


class Follower:
    """What another rank was given, and what it was told to begin. One thread at a time."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, int], Entry] = {}
        self._told: deque[Entry] = deque()
        self._under_way: set[tuple[str, int]] = set()

    @property
    def awaited(self) -> Entry | None:
        """The entry that rank 0 has announced next, and that was not given here."""
        return self._told[0] if self._told and self._told[0].key not in self._given else None

    @property
    def untold(self) -> list[Entry]:
        """The entries that were given here, and that rank 0 has not announced yet."""
        told = {entry.key for entry in self._told}
        return [entry for entry in self._given.values() if entry.key not in told]

    def give(self, entry: Entry, priority: int = 0) -> None:
        """Note that *entry* can begin here; rank 0's priority counts. Raises BusyError as `Leader.give`."""
        if entry.key in self._given or entry.key in self._under_way:
            raise _busy(entry)
        self._given[entry.key] = entry

    def tell(self, entries: Iterable[Entry]) -> None:
        """Note what rank 0 begins, in its order."""
        self._told.extend(entries)

    def turns(self) -> list[Entry]:
        """Take what begins here now, in rank 0's order.

        Raises `MismatchError` if this rank was given something else under the same name.
        """
        taken: list[Entry] = []
        while self._told and self._told[0].key in self._given:
            theirs = self._told.popleft()
            ours = self._given.pop(theirs.key)
            if ours != theirs:
                raise MismatchError(f"{theirs.name!r} part {theirs.part} differs: {theirs.nbytes} bytes, {theirs.kind} "
                                    f"on rank 0, {ours.nbytes} bytes, {ours.kind} here")
            self._under_way.add(ours.key)
            taken.append(ours)
        return taken

    def done(self, entry: Entry) -> None:
        """Note that *entry* is complete here."""
        self._under_way.discard(entry.key)


def _busy(entry: Entry) -> BusyError:
    return BusyError(f"{entry} was given twice before its first sum was there: wait for it, or take another name")
