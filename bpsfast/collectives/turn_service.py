"""Begins operations in one order on all ranks of a group. Any thread submits them; one thread on each rank begins them.

`orchestration.priority.turns` decides the order, `orchestration.priority.group_channel` carries it. An operation is the
caller's, for example an all-reduce of gloo or NCCL: a function begins it, and it reports its own end.
"""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from ..orchestration.errors import BpsError, ClosedError, PeerLostError, StallError, UnsupportedError
from ..orchestration.priority import group_channel as says
from ..orchestration.priority.group_channel import FollowerChannel, LeaderChannel
from ..orchestration.priority.turns import Entry, Follower, Leader
from .group_service import GroupService, open_channel

#: Tells that an operation is done, or why not; once, from any thread.
Finish = Callable[[BaseException | None], None]

#: Grace for ranks that cannot diagnose the stall: rank 0, then the others.
_GRACE_S = 2.0, 4.0


class _Operation(NamedTuple):
    """An operation that was submitted. `on_done` is called with None or an error, in the service's thread."""

    entry: Entry
    begin: Callable[[Finish], None]
    on_done: Finish


class TurnService(GroupService[_Operation]):
    """One rank's part of a group. Making and closing it are collective; `submit` is for any thread.

    *agree* returns rank 0's argument on all ranks (a broadcast of bytes; None elsewhere). *host* returns the address at
    which the others reach this process; it is called on rank 0 only, and may raise OSError. At most *credit_nbytes* are
    under way at a time; rank 0's counts. The group fails when nothing happens for *timeout_s* while something is to be
    done. *together*: nothing has its turn before all ranks have submitted it (`turns.Leader`). *secret* is the job's
    key, on all ranks or on none; the channel's key is made of it. *ports*: as for `LeaderChannel`, *advertise*:
    as for `open_channel`.

    Raises `ConfigError` on all ranks if rank 0 cannot listen, or if only one of this rank and rank 0 has a secret.
    """

    def __init__(self, rank: int, size: int, agree: Callable[[bytes | None], bytes], *, host: Callable[[], str],
                 credit_nbytes: int, timeout_s: float, together: bool = False, secret: bytes = b"",
                 ports: tuple[int, int] = (0, 0), advertise: str = "") -> None:
        channel = open_channel(rank == 0, agree, host, partial(LeaderChannel, ports=ports, n_followers=size),
                               FollowerChannel, secret=secret, rank=rank, advertise=advertise)
        super().__init__(range(size), rank, channel, "bpsfast-turns")
        self.size = size
        self._channel: LeaderChannel | FollowerChannel = channel
        self._timeout_s = timeout_s
        self._tick_s = min(self._tick_s, timeout_s)
        self._role: Leader | Follower = Follower()
        if rank == 0:
            self._role = Leader(credit_nbytes, range(1, size) if together else ())
        self._untold: list[tuple[str, int]] | None = [] if together and rank != 0 else None  # given, rank 0 not told
        self._abandoned: BpsError | None = None
        self._abandoned_at = 0.0
        self._seen: set[int] = set()
        self._ended: deque[tuple[_Operation, BaseException | None]] = deque()
        self._unreported: BpsError | None = None  # the error that no operation has ended with
        self._begun = [0] * size
        self._left: set[int] = set()
        self._progress = time.monotonic()
        self._start()

    def submit(self, entry: Entry, begin: Callable[[Finish], None], on_done: Finish, priority: int = 0) -> None:
        """Call *begin* when it is *entry*'s turn on all ranks, and *on_done* at its end, with None or an error.

        The service's thread calls both; they must not block, as it checks all deadlines. Raises `BusyError` if the same
        entry was submitted before and is not done, and `ClosedError`, `PeerLostError`, `StallError` or `MismatchError`
        if nothing more can be begun, because this is closed or the group has failed.
        """
        with self._lock:
            if self._error is not None:
                raise type(self._error)(str(self._error))
            if self._closing:
                raise ClosedError(f"{entry} was given after close()")
            self._role.give(entry, priority)
            self._operations[entry.key] = _Operation(entry, begin, on_done)
            if self._untold is not None:
                self._untold.append(entry.key)
            self._progress = time.monotonic()
        self._wake.ring()

    def close(self) -> None:
        """Wait until all operations that were submitted here are done, on rank 0 until all ranks have closed; end the
        thread.

        Idempotent. Raises what the group has failed with (`PeerLostError`, `StallError`, `MismatchError`), if no
        operation has ended with it.
        """
        with self._lock:
            if not self._closing:
                self._closing = True
                self._progress = time.monotonic()
        self._wake.ring()
        self._thread.join()
        if self._unreported is not None:
            unreported, self._unreported = self._unreported, None
            raise unreported

    def abandon(self, why: BpsError) -> None:
        """Leave at once: open and later operations fail with *why* on all ranks."""
        with self._lock:
            self._abandoned, self._abandoned_at = why, time.monotonic()
        self._wake.ring()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------

    def _finished(self, operation: _Operation, error: BaseException | None) -> None:
        self._ended.append((operation, error))
        self._wake.ring()

    def _is_over(self) -> bool:
        """Return whether this rank is done; if so, tell the other ranks. Rank 0 repeats that until all have told it."""
        if not self._closing or self._operations or not self._all_are_here:
            return False
        if self.rank not in self._left:
            self._progress = time.monotonic()
        self._left.add(self.rank)
        self._send(says.Left(self.rank))
        return self.rank != 0 or len(self._left) == self.size

    @property
    def _all_are_here(self) -> bool:
        return not isinstance(self._channel, LeaderChannel) or len(self._channel.present) == self.size - 1

    @property
    def _has_seen_all(self) -> bool:
        """Whether every other end has been connected: one that is gone since then need not be told of the end."""
        if isinstance(self._channel, LeaderChannel):
            self._seen |= self._channel.present
        elif self._channel.is_connected:
            self._seen.add(0)
        return len(self._seen) == (self.size - 1 if self.rank == 0 else 1)

    def _send(self, message: msgspec.Struct) -> None:
        """Send *message*: rank 0 to all ranks that have not left, the others to rank 0."""
        if isinstance(self._channel, FollowerChannel):
            self._channel.tell(message)
            return
        gone = self._channel.tell(message, but=self._left)
        if gone:
            for last in self._received():
                self._handle(last)
            lost = sorted(set(gone) - self._left)
            if lost:
                raise PeerLostError(f"the processes of ranks {lost} are gone: their connections broke without a last "
                                    "word")

    def _turn(self, now: float) -> None:
        has_seen_all = self._has_seen_all
        if self._abandoned is not None and (has_seen_all or now >= self._abandoned_at + self._LATE_NOTICE_S):
            raise self._abandoned
        while self._ended:
            self._conclude(*self._ended.popleft())
            self._progress = now
        for message in self._received():
            self._handle(message)
            if message != says.Left(0):  # which comes again and again
                self._progress = now
        self._announce_given()
        turns = self._turns()
        if turns:
            self._begin(turns)
            self._progress = now
        self._check_deadline(now)

    def _conclude(self, operation: _Operation, error: BaseException | None) -> None:
        if error is not None:
            raise PeerLostError(f"{operation.entry} failed on rank {self.rank}: {error}") from error
        with self._lock:
            self._role.done(operation.entry)
            del self._operations[operation.entry.key]
        operation.on_done(None)

    def _handle(self, message: says.Message) -> None:
        if isinstance(message, says.Turns):
            assert isinstance(self._role, Follower), "only rank 0 says turns"
            self._role.tell(message.entries)
        elif isinstance(message, says.Begun):
            self._begun[message.rank] = message.count
        elif isinstance(message, says.Given):
            assert isinstance(self._role, Leader), "only rank 0 is told"
            with self._lock:
                self._role.given_to(message.rank, message.keys)
        elif isinstance(message, says.Left):
            self._left.add(message.rank)
            if self._begun[message.rank] < self._begun[0]:
                raise PeerLostError(f"rank {message.rank} has closed, and will not give what is under way: "
                                    f"{self._under_way()}")

    def _announce_given(self) -> None:
        with self._lock:
            given, waits = self._untold, self._role.waits_for(self._left) if isinstance(self._role, Leader) else None
            if given:
                self._untold = []
        if given:
            self._send(says.Given(self.rank, tuple(given)))
        if waits is not None:
            raise PeerLostError(f"ranks {sorted(self._left)} have closed, and will not all give {waits}")

    def _turns(self) -> list[Entry]:
        """Return the entries that begin here now; rank 0 sends them to the others."""
        if not self._all_are_here:
            return []
        with self._lock:
            turns = self._role.turns()
            untold = self._role.untold if isinstance(self._role, Follower) and 0 in self._left else []
        if untold:
            raise PeerLostError(f"rank 0 has closed, and has never given {untold[0]}")
        if turns and self.rank == 0:
            if self._left:
                raise PeerLostError(f"rank {min(self._left)} has closed, and will not give {turns[0]}")
            self._begun[0] += len(turns)
            self._send(says.Turns(tuple(turns)))
        return turns

    def _begin(self, turns: list[Entry]) -> None:
        for entry in turns:
            operation = self._operations[entry.key]
            try:
                operation.begin(partial(self._finished, operation))
            except Exception as exc:
                raise UnsupportedError(f"{entry} could not be begun on rank {self.rank}: {type(exc).__name__}: "
                                       f"{exc}") from exc
        if self.rank != 0:
            self._begun[self.rank] += len(turns)
            self._send(says.Begun(self.rank, self._begun[self.rank]))

    def _check_deadline(self, now: float) -> None:
        with self._lock:
            knows = isinstance(self._role, Follower) and self._role.awaited is not None
        if not knows and not self._operations and not self._closing:
            return
        idle_s = now - self._progress
        if idle_s > self._timeout_s + (0 if knows else _GRACE_S[self.rank != 0]):
            with self._lock:
                missing = self._describe_missing()
            raise StallError(f"nothing has happened on rank {self.rank} for {idle_s:.1f} s (timeout_s = "
                             f"{self._timeout_s:g}): {missing}")

    def _describe_missing(self) -> str:
        if isinstance(self._role, Follower):
            if isinstance(self._channel, FollowerChannel) and not self._channel.is_connected:
                return f"there is no connection to rank 0 at {self._channel.address}"
            if self._role.awaited is not None:
                return f"{self._role.awaited} has not been given here, rank 0 has given it"
            if self._role.untold:
                return f"rank 0 has not given {self._role.untold[0]}"
        elif isinstance(self._channel, LeaderChannel):
            absent = sorted(set(range(1, self.size)) - self._channel.present)
            if absent:
                return f"ranks {absent} have not connected"
            behind = [rank for rank, count in enumerate(self._begun) if count < self._begun[0]]
            if behind:
                return f"ranks {behind} have not begun what is under way: {self._under_way()}"
            if self._closing and not self._operations:
                return f"ranks {sorted(set(range(self.size)) - self._left)} have not closed"
        return f"all have begun, and it does not end: {self._under_way()}"

    def _under_way(self) -> str:
        return ", ".join(str(operation.entry) for operation in list(self._operations.values())[:3]) or "nothing"

    def _fail(self, operation: _Operation, error: BpsError) -> None:
        self._unreported = None
        operation.on_done(error)

    def _end(self, error: BpsError, last: msgspec.Struct | None = None) -> None:
        self._unreported = error
        super()._end(error, last)

    def _late_deadline(self) -> float:
        return (self._abandoned_at if self._abandoned is not None else time.monotonic()) + self._LATE_NOTICE_S
