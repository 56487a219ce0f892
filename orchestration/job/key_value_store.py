"""A key-value store at the scheduler, by which ranks exchange small values such as addresses. Pure.

A lookup waits until the value is there, its own time is up, or the rank that should store it has called shutdown.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import CapacityError, ConfigError, MismatchError
from ..messages import KeyValueReply, Lookup, Publish
from ..roster import Roster, number_of

#: The longest key and value, and the most bytes that one rank may store at a time.
KEY_MAX_NBYTES = 256
VALUE_MAX_NBYTES = 64 << 10
RANK_MAX_NBYTES = 1 << 20
#: The most lookups of one rank that wait at a time.
RANK_MAX_QUESTIONS = 4096


def check(key: str, value: bytes = b"") -> None:
    """Raise `ConfigError` or `CapacityError` if there can be no such key or value."""
    nbytes = len(key.encode())
    if not 0 < nbytes <= KEY_MAX_NBYTES:
        raise ConfigError(f"a notice's key has 1 to {KEY_MAX_NBYTES} bytes, {key[:40]!r} has {nbytes}")
    if len(value) > VALUE_MAX_NBYTES:
        raise CapacityError(f"notice {key!r} has {len(value)} bytes, at most {VALUE_MAX_NBYTES} are kept: send more by "
                            "a broadcast")


@dataclass(frozen=True)
class _Notice:
    rank: int
    value: bytes


@dataclass(frozen=True)
class _Question:
    deadline: float
    asked: Lookup


class KeyValueStore:
    """What was stored, by key, and the lookups that wait. `left(rank)`: whether a rank has called shutdown, or is
    lost.
    """

    def __init__(self, roster: Roster, left: Callable[[int], bool]) -> None:
        self._roster = roster
        self._left = left
        self._values: dict[str, _Notice] = {}
        self._waiting: dict[str, list[_Question]] = {}

    def publish(self, message: Publish) -> list[KeyValueReply]:
        """Store a value, in place of the same rank's earlier one; return the replies, also to lookups that waited.

        A key belongs to the rank that published it first, until that rank withdraws it.
        """
        held = self._values.get(message.key)
        if held is not None and held.rank != message.rank:
            return [_refused(message, MismatchError(
                f"notice {message.key!r}: rank {message.rank} publishes what {self._roster.describe_rank(held.rank)} "
                "has published"))]
        total = _nbytes(message.key, message.value) + sum(
            _nbytes(key, notice.value) for key, notice in self._values.items()
            if notice.rank == message.rank and key != message.key)
        try:
            check(message.key, message.value)
            if total > RANK_MAX_NBYTES:
                raise CapacityError(f"rank {message.rank} publishes {message.key!r}: its notices would have {total} "
                                    f"bytes, at most {RANK_MAX_NBYTES} are kept of a rank; withdraw some")
        except (CapacityError, ConfigError) as exc:
            return [_refused(message, exc)]
        self._values[message.key] = _Notice(message.rank, message.value)
        answers = [_found(question.asked, message.value) for question in self._waiting.pop(message.key, ())]
        return [KeyValueReply(rank=message.rank, question=message.question), *answers]

    def withdraw(self, rank: int, prefix: str) -> None:
        """Remove the values of *rank* whose keys begin with *prefix*."""
        self._values = {key: notice for key, notice in self._values.items()
                         if notice.rank != rank or not key.startswith(prefix)}

    def lookup(self, now: float, message: Lookup) -> list[KeyValueReply]:
        """Return the reply to a lookup if there is one already."""
        held = self._values.get(message.key)
        if held is not None:
            return [_found(message, held.value)]
        if self._is_vain(message):
            return [self._in_vain(message)]
        n_asked = sum(each.asked.rank == message.rank for questions in self._waiting.values() for each in questions)
        try:
            check(message.key)
            if n_asked >= RANK_MAX_QUESTIONS:
                raise CapacityError(f"rank {message.rank} looks for notice {message.key!r}: {n_asked} of its questions "
                                    "wait already, as many as may")
        except (CapacityError, ConfigError) as exc:
            return [_refused(message, exc)]
        self._waiting.setdefault(message.key, []).append(_Question(now + message.timeout_s, message))
        return []

    def rank_left(self, rank: int) -> list[KeyValueReply]:
        """Forget *rank*'s lookups; return replies to those that wait for what only it would have published.

        Its values stay: others may still need them.
        """
        self._take(lambda question: question.asked.rank == rank)
        return [self._in_vain(question.asked) for question in self._take(lambda each: self._is_vain(each.asked))]

    def expire(self, now: float) -> list[KeyValueReply]:
        """Return the replies to lookups whose time is up."""
        return [KeyValueReply(rank=asked.rank, question=asked.question, error="StallError", reason=(
            f"rank {asked.rank} waited {asked.timeout_s:g} s for notice {asked.key!r}: "
            f"{self._roster.describe(asked.who) or 'nobody'} has not published it"))
                for asked in (question.asked for question in self._take(lambda each: now >= each.deadline))]

    def _is_vain(self, asked: Lookup) -> bool:
        return (rank := number_of("rank", asked.who)) >= 0 and self._left(rank)

    def _in_vain(self, asked: Lookup) -> KeyValueReply:
        return KeyValueReply(rank=asked.rank, question=asked.question, error="StallError", reason=(
            f"rank {asked.rank} looks for notice {asked.key!r} in vain: {self._roster.describe(asked.who)} is lost or "
            "has called shutdown, and has not published it, or has withdrawn it"))

    def _take(self, chosen: Callable[[_Question], bool]) -> list[_Question]:
        """Remove the *chosen* lookups and return them."""
        taken = []
        for key, questions in list(self._waiting.items()):
            kept = [question for question in questions if not chosen(question)]
            taken += [question for question in questions if chosen(question)]
            if kept:
                self._waiting[key] = kept
            else:
                del self._waiting[key]
        return taken


def _nbytes(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value)


def _found(asked: Lookup, value: bytes) -> KeyValueReply:
    return KeyValueReply(rank=asked.rank, question=asked.question, value=value)


def _refused(message: Publish | Lookup, error: CapacityError | ConfigError | MismatchError) -> KeyValueReply:
    return KeyValueReply(rank=message.rank, question=message.question, error=type(error).__name__, reason=str(error))
