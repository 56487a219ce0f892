"""Stalls of one rank: long waits are logged, logged again at doubling intervals, and kept for `bpsfast.stalls`.

The model is Horovod's stall check, in which only rank 0 knows the missing ranks, and tensor and stage are not logged.
"""
from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import msgspec

from ..base.end_reports import report
from ..orchestration.errors import StallError
from ..orchestration.messages import Stage, StallAnswer, StallQuestion
from .node_connection import NodeRequests

log = logging.getLogger("bpsfast.trainer")

#: Stalls that are over and still returned by `StallInspector.stalls`.
_KEPT = 32
#: Members of a fused unit that are named in logs.
_N_MEMBERS = 3

_WORDS: dict[Stage, str] = {
    "declare": "not all ranks have declared it",
    "barrier": "not all ranks have entered it",
    "push": "not all ranks have pushed",
    "partial": "the sum of a machine has not reached the owner",
    "sum": "the owner has everything, and has not summed it",
    "result": "the owner has the sum, it has not come back",
    "done": "it has just completed",
    "unknown": "it is not known how far it is",
}
#: Once a rank has left, how often a wait asks whether it can still end.
DOUBT_S = 0.5
#: How long to wait for the reply to a stall question.
_ANSWER_S = 2.5
#: The partition of a question about a declaration or a barrier.
_NO_PART = -1


@dataclass(frozen=True)
class Subject:
    """What is waited for: round `round` of partition `partition` of a unit, or a declaration or barrier (-1, -1).

    `members` are the names of the tensors in it; `n_members` of them, the first ones are enough.
    """

    name: str
    members: tuple[str, ...] = ()
    n_members: int = 0
    partition: int = -1
    n_partitions: int = 0
    round: int = -1

    @classmethod
    def of(cls, name: str, members: list[str], partition: int, n_partitions: int, round: int) -> Subject:
        """Return the subject of a unit with all its *members*."""
        return cls(name, tuple(members[:_N_MEMBERS]), len(members), partition, n_partitions, round)

    def describe(self) -> str:
        """Return its name for errors and warnings."""
        if self.round < 0:
            return repr(self.name)
        fused = ""
        if self.n_members > 1:
            more = f" and {self.n_members - len(self.members)} more" if self.n_members > len(self.members) else ""
            fused = f", which is {', '.join(map(repr, self.members))}{more} fused"
        return f"round {self.round} of {self.name!r} (partition {self.partition} of {self.n_partitions}{fused})"


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A wait of this rank that took, or takes, longer than `stall_warn_s`. Fields are those of the last warning.

    `tensor` is the unit's name ("barrier:N" for a barrier), `members` the first tensors of a fused one; `partition` and
    `round` are -1 where there is none; `missing_ranks` are global ranks, `missing_nodes` nodes that are to blame
    themselves; `missing` says it in words. `waited_s` until now, or until it was `over`; `went_on`: without an error.
    """

    tensor: str
    members: tuple[str, ...]
    partition: int
    round: int
    stage: Stage
    missing_ranks: tuple[int, ...]
    missing_nodes: tuple[int, ...]
    missing: str
    waited_s: float
    over: bool = False
    went_on: bool = False


@dataclass
class _Open:
    begin: float
    due: float
    stall: Stall


class StallInspector:
    """The stalls of the rank whose name is *me* ("rank 3"). Any thread; times are of the monotonic clock, in seconds.

    *warn_s*: how long a wait may take before it is a stall; 0: there are none. *count* is called once for each stall.
    """

    def __init__(self, me: str, warn_s: float, count: Callable[[], None]) -> None:
        self._me = me
        self._warn_s = warn_s
        self._count = count
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], _Open] = {}
        self._over: deque[Stall] = deque(maxlen=_KEPT)

    def due(self, begin: float) -> float:
        """Return when a wait that began at *begin* becomes a stall."""
        return begin + self._warn_s if self._warn_s else math.inf

    def tell(self, subject: Subject, answer: StallAnswer, begin: float) -> float:
        """Log that a wait for *subject* goes on since *begin*; return when to log it again.

        Of several threads that wait for the same subject only one logs it.
        """
        now = time.monotonic()
        key = subject.name, subject.round
        with self._lock:
            known = self._open.get(key)
            if known is not None and now < known.due:
                return known.due
            if known is None:
                self._count()
                known = self._open[key] = _Open(begin, self.due(begin), Stall(
                    tensor=subject.name, members=subject.members, partition=subject.partition, round=subject.round,
                    stage="unknown", missing_ranks=(), missing_nodes=(), missing="", waited_s=0.0))
            waited_s = now - known.begin
            while known.due <= now:
                known.due = known.begin + 2 * (known.due - known.begin)
            known.stall = msgspec.structs.replace(
                known.stall, partition=subject.partition, stage=answer.stage, missing_ranks=answer.ranks,
                missing_nodes=answer.nodes, missing=answer.missing, waited_s=waited_s)
        log.warning("%s has waited %.3g s for %s. Stage %s: %s; %s", self._me, waited_s, subject.describe(),
                    answer.stage, _WORDS[answer.stage], answer.missing)
        return known.due

    def end(self, subject: Subject, went_on: bool) -> None:
        """Note that the wait for *subject* is over; if it was logged and *went_on*, log that."""
        with self._lock:
            known = self._open.pop((subject.name, subject.round), None)
            if known is None:
                return  # another thread has logged it
            waited_s = time.monotonic() - known.begin
            self._over.append(msgspec.structs.replace(known.stall, waited_s=waited_s, over=True, went_on=went_on))
        if went_on:
            log.warning("%s goes on: it has waited %.3g s for %s", self._me, waited_s, subject.describe())

    def stalls(self) -> tuple[Stall, ...]:
        """Return the stalls that go on, then those that are over, the latest first."""
        now = time.monotonic()
        with self._lock:
            return (*(msgspec.structs.replace(each.stall, waited_s=now - each.begin) for each in self._open.values()),
                    *reversed(self._over))


class StallQuery:
    """Asks node and scheduler which ranks a wait of *rank* is waiting for. Any thread."""

    def __init__(self, rank: int, requests: NodeRequests) -> None:
        self._rank = rank
        self._requests = requests
        self._departed = False

    def departed(self) -> None:
        """Note that a rank has left the job."""
        self._departed = True

    def has_departures(self) -> bool:
        """Return whether a rank has left, as far as the node has told: only then can a wait be hopeless."""
        if not self._departed:
            self._requests.mailbox.pump()
        return self._departed

    def ask(self, part: int, round: int, name: str, missing: tuple[int, ...] = ()) -> StallAnswer:
        """Ask which ranks are missing in *round* of *part* of tensor *name*, and whether they can still come.

        *missing*: which ones, if this rank knows.
        """
        try:
            return self._requests.ask(StallAnswer, lambda question: StallQuestion(
                rank=self._rank, question=question, part=part, round=round, name=name, missing=missing),
                "neither node nor scheduler told which rank is missing", _ANSWER_S)
        except StallError as exc:  # the caller decides whether to wait on
            return StallAnswer(rank=self._rank, question=0, stage="unknown", missing=str(exc))

    def ask_about(self, name: str) -> StallAnswer:
        """Ask which ranks have not declared tensor *name*, or entered ``barrier:<n>``. Returns as `ask`."""
        return self.ask(_NO_PART, 0, name)


class StallTimer:
    """The deadlines of one wait of rank *me*: when to ask who is missing, to warn, to give up. A context manager.

    *what*: what the wait is for, in errors ("for all ranks to declare 'x'"); "": the subject of the last answer.
    *spent_s*: how long the wait has lasted already.
    """

    __slots__ = ("_begin", "_deadline", "_doubt", "_inspector", "_me", "_stall_query", "_stalled", "_timeout_s",
                 "_warn", "_what", "succeeded")

    def __init__(self, me: str, timeout_s: float, stall_query: StallQuery, inspector: StallInspector, what: str = "",
                 spent_s: float = 0.0) -> None:
        self._begin = time.monotonic() - spent_s
        self._me, self._what, self._timeout_s = me, what, timeout_s
        self._deadline, self._doubt = self._begin + timeout_s, self._begin + DOUBT_S
        self._warn = inspector.due(self._begin)
        self._stall_query = stall_query
        self._inspector = inspector
        self._stalled: Subject | None = None
        #: Whether the wait has succeeded; else, as after an exception, no "goes on" is logged.
        self.succeeded = True

    @property
    def rest_s(self) -> float:
        """Seconds until `look` has something to do."""
        return max(0.0, min(self._doubt, self._deadline, self._warn) - time.monotonic())

    def look(self, ask: Callable[[], tuple[Subject, StallAnswer]], is_there: Callable[[], bool]) -> None:
        """If it is time, ask who is missing, then warn or give up; do neither if it *is_there* by then.

        Raises `StallError` if time is up, or a missing rank has left the job.
        """
        now = time.monotonic()
        late = now >= self._deadline
        if late or now >= self._warn or (now >= self._doubt and self._stall_query.has_departures()):
            subject, answer = ask()
            if is_there():
                return
            if late or answer.hopeless:
                if not late:  # a rank that has left too early is the cause
                    report("told")
                waited_s = self._timeout_s if late else now - self._begin
                raise StallError(f"{self._me} waited {waited_s:.3g} s {self._what or f'for {subject.describe()}'}: "
                                 f"{answer.missing}")
            if now >= self._warn:
                self._stalled, self._warn = subject, self._inspector.tell(subject, answer, self._begin)
        if now >= self._doubt:  # else who looks more often would put it off for ever
            self._doubt = now + DOUBT_S

    def __enter__(self) -> StallTimer:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._stalled is not None:
            self._inspector.end(self._stalled, went_on=kind is None and self.succeeded)
