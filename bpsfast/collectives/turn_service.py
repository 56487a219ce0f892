"""Operations that all ranks of a group must begin in one order: given by anybody, begun by one thread on each rank.

`orchestration.order.turns` decides the order, `orchestration.order.turn_line` carries it. What an operation is (an
all-reduce of gloo or NCCL) is the caller's: it is begun by a call, and says when it is done.
"""
from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from ..orchestration import errors
from ..orchestration.errors import BpsError, ClosedError, ConfigError, PeerLostError, StallError, UnsupportedError
from ..orchestration.priority import group_channel as says
from ..orchestration.priority.group_channel import FollowerChannel, LeaderChannel
from ..orchestration.priority.turns import Entry, Follower, Leader
from ..orchestration.security import prove
from ..orchestration.wake_up import WakeUp

log = logging.getLogger("bpsfast")

#: Tells that an operation is done, or why not; once, from any thread.
Finish = Callable[[BaseException | None], None]

_KEY_NBYTES = 32
_TICK_S = 0.5
#: How long one waits for a connection, to say over it that one leaves at once.
_FAREWELL_S = 5.0
#: How much longer one waits who does not know what is missing: somebody else does. Rank 0, then the others.
_GRACE_S = 2.0, 4.0


class _Operation:
    """One operation on its way. `on_done` hears None or an error, in the service's thread."""

    def __init__(self, entry: Entry, begin: Callable[[Finish], None], on_done: Finish) -> None:
        self.entry = entry
        self.begin = begin
        self.on_done = on_done


class _Meeting(msgspec.Struct, frozen=True):
    """Where rank 0 listens, and of what the line's key is made; or why it does not.

    The group may carry it in the clear. So it is no key, if there is a secret that all ranks know: that one and `salt`
    make the key. Without one `salt` is the key, and whoever reads it can join the line.
    """

    host: str = ""
    port: int = 0
    salt: bytes = b""
    has_secret: bool = False
    error: str = ""


def _line_key(secret: bytes, salt: bytes) -> bytes:
    return prove(secret, "turns", salt) if secret else salt


class TurnService:
    """One rank's part of a group. Making and closing it are collective; `submit` is for any thread.

    Parameters
    ----------
    agree
        Returns rank 0's argument on all ranks (a broadcast of bytes; None elsewhere).
    host
        Returns where the others reach this process; only asked on rank 0. May raise OSError.
    credit_nbytes
        Bytes that may be under way at a time; only rank 0's counts.
    timeout_s
        How long nothing may happen while something is to be done.
    together
        Nothing has its turn before all ranks have been given it (`turns.Leader`).
    secret
        The job's key, on all ranks or on none; of it the line's key is made.

    Raises
    ------
    ConfigError
        On all ranks, if rank 0 cannot listen; if this rank has a secret, and rank 0 has none, or the other way round.
    """

    def __init__(self, rank: int, size: int, agree: Callable[[bytes | None], bytes], *, host: Callable[[], str],
                 credit_nbytes: int, timeout_s: float, together: bool = False, secret: bytes = b"") -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._role: Leader | Follower = Follower()
        if rank == 0:
            self._role = Leader(credit_nbytes, range(1, size) if together else ())
        self._untold: list[tuple[str, int]] | None = [] if together and rank != 0 else None  # given, rank 0 not told
        self._abandoned: BpsError | None = None
        self._abandoned_at = 0.0
        self._met: set[int] = set()
        self._line = self._meet(agree, host, secret)
        try:
            self._wake = WakeUp()
        except OSError:
            self._line.close()
            raise
        self._lock = threading.Lock()  # of what both threads write: role, open operations, error, closing
        self._open: dict[tuple[str, int], _Operation] = {}
        self._ended: deque[tuple[_Operation, BaseException | None]] = deque()
        self._error: BpsError | None = None
        self._unheard: BpsError | None = None
        self._closing = False
        self._begun = [0] * size
        self._left: set[int] = set()
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="bpsfast-turns", daemon=True)
        try:
            if rank != 0:
                self._line.tell(says.Hello(rank))
            self._thread.start()
        except BaseException:
            self._free()
            raise

    def _meet(self, agree: Callable[[bytes | None], bytes], host: Callable[[], str],
              secret: bytes) -> LeaderChannel | FollowerChannel:
        if self.rank != 0:
            meeting = msgspec.msgpack.decode(agree(None), type=_Meeting)
            if meeting.error:
                raise ConfigError(f"rank 0 cannot be reached by the other ranks: {meeting.error}")
            if meeting.has_secret != bool(secret):
                who = 0 if meeting.has_secret else self.rank
                raise ConfigError(f"of rank 0 and rank {self.rank} only one has a job key (rank {who} has): set "
                                  "BPSFAST_JOB_KEY to the same random hex on all ranks, or on none")
            return FollowerChannel(meeting.host, meeting.port, _line_key(secret, meeting.salt))
        salt = os.urandom(_KEY_NBYTES)
        try:
            own_host = host()
            line = LeaderChannel(_line_key(secret, salt), own_host)
        except (OSError, ConfigError) as exc:
            agree(msgspec.msgpack.encode(_Meeting(error=str(exc))))
            raise ConfigError(f"rank 0 cannot be reached by the other ranks: {exc}") from exc
        try:
            agree(msgspec.msgpack.encode(_Meeting(own_host, line.port, salt, bool(secret))))
        except BaseException:
            line.close()
            raise
        return line

    def _free(self) -> None:
        self._line.close()
        self._wake.close()

    def submit(self, entry: Entry, begin: Callable[[Finish], None], on_done: Finish, priority: int = 0) -> None:
        """Let *begin* be called when it is *entry*'s turn on all ranks; *on_done* hears of its end.

        Both are called by the service's thread, which must not wait in them: it keeps all deadlines.

        Raises
        ------
        BusyError
            If the same was given before and is not done.
        ClosedError, PeerLostError, StallError, MismatchError
            If nothing more can be begun: this is closed, or what happened to the group.
        """
        with self._lock:
            if self._error is not None:
                raise type(self._error)(str(self._error))
            if self._closing:
                raise ClosedError(f"{entry} was given after close()")
            self._role.give(entry, priority)
            self._open[entry.key] = _Operation(entry, begin, on_done)
            if self._untold is not None:
                self._untold.append(entry.key)
            self._progress = time.monotonic()
        self._wake.ring()

    def close(self) -> None:
        """Wait for what was given here, on rank 0 for all ranks to close, and end the thread. Again: does nothing.

        Raises
        ------
        PeerLostError, StallError, MismatchError
            What kept the group from going on, where no operation was left to hear of it.
        """
        with self._lock:
            if not self._closing:
                self._closing = True
                self._progress = time.monotonic()
        self._wake.ring()
        self._thread.join()
        if self._unheard is not None:
            unheard, self._unheard = self._unheard, None
            raise unheard

    def abandon(self, why: BpsError) -> None:
        """Leave at once: what is under way fails with *why* on all ranks, and whatever comes after."""
        with self._lock:
            self._abandoned, self._abandoned_at = why, time.monotonic()
        self._wake.ring()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------

    def _finished(self, operation: _Operation, error: BaseException | None) -> None:
        """Note an operation's end. Any thread."""
        self._ended.append((operation, error))
        self._wake.ring()

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._line.wait(self._wake.fileno(), min(_TICK_S, self._timeout_s))
                self._turn(time.monotonic())
        except BpsError as exc:
            self._end(exc)
        except Exception as exc:
            self._end(PeerLostError(f"an operation of rank {self.rank} failed: {type(exc).__name__}: {exc}"))
        finally:
            self._free()

    def _is_over(self) -> bool:
        """Whether all is done that was given; says so to the others, rank 0 until all have said so."""
        if not self._closing or self._open or not self._all_are_here:
            return False
        if self.rank not in self._left:
            self._progress = time.monotonic()
        self._left.add(self.rank)
        self._say(says.Left(self.rank))
        return self.rank != 0 or len(self._left) == self.size

    @property
    def _all_are_here(self) -> bool:
        return not isinstance(self._line, LeaderChannel) or len(self._line.present) == self.size - 1

    @property
    def _has_met_all(self) -> bool:
        """Whether everybody has been there: who is gone since needs no last word."""
        if isinstance(self._line, LeaderChannel):
            self._met |= self._line.present
        elif self._line.is_connected:
            self._met.add(0)
        return len(self._met) == (self.size - 1 if self.rank == 0 else 1)

    def _say(self, message: says.Message) -> None:
        """Tell the other end: rank 0 all who have not left, the others rank 0."""
        if isinstance(self._line, FollowerChannel):
            self._line.tell(message)
            return
        gone = self._line.tell(message, but=self._left)
        if gone:
            for last in self._line.recv_nowait():
                self._hear(last)
            lost = sorted(set(gone) - self._left)
            if lost:
                raise PeerLostError(f"the processes of ranks {lost} are gone: their connections broke without a last "
                                    "word")

    def _turn(self, now: float) -> None:
        self._wake.clear()
        has_met_all = self._has_met_all
        if self._abandoned is not None and (has_met_all or now >= self._abandoned_at + _FAREWELL_S):
            raise self._abandoned
        while self._ended:
            self._conclude(*self._ended.popleft())
            self._progress = now
        for message in self._line.recv_nowait():
            self._hear(message)
            if message != says.Left(0):  # which comes again and again
                self._progress = now
        self._tell_given()
        turns = self._turns()
        if turns:
            self._begin(turns)
            self._progress = now
        self._look_at_the_clock(now)

    def _conclude(self, operation: _Operation, error: BaseException | None) -> None:
        if error is not None:
            raise PeerLostError(f"{operation.entry} failed on rank {self.rank}: {error}") from error
        with self._lock:
            self._role.done(operation.entry)
            del self._open[operation.entry.key]
        operation.on_done(None)

    def _hear(self, message: says.Message) -> None:
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
        elif isinstance(message, says.Failed):
            raise getattr(errors, message.error, PeerLostError)(message.reason)

    def _tell_given(self) -> None:
        with self._lock:
            given, waits = self._untold, self._role.waits_for(self._left) if isinstance(self._role, Leader) else None
            if given:
                self._untold = []
        if given:
            self._say(says.Given(self.rank, tuple(given)))
        if waits is not None:
            raise PeerLostError(f"ranks {sorted(self._left)} have closed, and will not all give {waits}")

    def _turns(self) -> list[Entry]:
        """Take what begins here now; rank 0 tells the others."""
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
            self._say(says.Turns(tuple(turns)))
        return turns

    def _begin(self, turns: list[Entry]) -> None:
        for entry in turns:
            operation = self._open[entry.key]
            try:
                operation.begin(partial(self._finished, operation))
            except Exception as exc:
                raise UnsupportedError(f"{entry} could not be begun on rank {self.rank}: {type(exc).__name__}: "
                                       f"{exc}") from exc
        if self.rank != 0:
            self._begun[self.rank] += len(turns)
            self._say(says.Begun(self.rank, self._begun[self.rank]))

    def _look_at_the_clock(self, now: float) -> None:
        with self._lock:
            knows = isinstance(self._role, Follower) and self._role.awaited is not None
        if not knows and not self._open and not self._closing:
            return
        idle_s = now - self._progress
        if idle_s > self._timeout_s + (0 if knows else _GRACE_S[self.rank != 0]):
            with self._lock:
                missing = self._what_is_missing()
            raise StallError(f"nothing has happened on rank {self.rank} for {idle_s:.1f} s (timeout_s = "
                             f"{self._timeout_s:g}): {missing}")

    def _what_is_missing(self) -> str:
        if isinstance(self._role, Follower):
            if isinstance(self._line, FollowerChannel) and not self._line.is_connected:
                return f"there is no connection to rank 0 at {self._line.address}"
            if self._role.awaited is not None:
                return f"{self._role.awaited} has not been given here, rank 0 has given it"
            if self._role.untold:
                return f"rank 0 has not given {self._role.untold[0]}"
        elif isinstance(self._line, LeaderChannel):
            absent = sorted(set(range(1, self.size)) - self._line.present)
            if absent:
                return f"ranks {absent} have not connected"
            behind = [rank for rank, count in enumerate(self._begun) if count < self._begun[0]]
            if behind:
                return f"ranks {behind} have not begun what is under way: {self._under_way()}"
            if self._closing and not self._open:
                return f"ranks {sorted(set(range(self.size)) - self._left)} have not closed"
        return f"all have begun, and it does not end: {self._under_way()}"

    def _under_way(self) -> str:
        return ", ".join(str(operation.entry) for operation in list(self._open.values())[:3]) or "nothing"

    def _end(self, error: BpsError) -> None:
        with self._lock:
            self._error = error
            abandoned = list(self._open.values())
            self._unheard = None if abandoned else error
            self._open.clear()
        failed = says.Failed(type(error).__name__, str(error))
        told: set[int] = self._line.present if isinstance(self._line, LeaderChannel) else set()
        try:
            self._say(failed)
        except BpsError:
            pass  # others are gone: who is there has heard it
        finally:
            for operation in abandoned:
                try:
                    operation.on_done(error)
                except Exception:  # one caller's fault must not leave another one waiting
                    log.exception("rank %d: what was to hear that %s has failed has failed itself", self.rank,
                                  operation.entry)
        if isinstance(self._line, LeaderChannel) and not isinstance(error, StallError):
            # who has not come in all the time of a stall comes no more
            begun = self._abandoned_at if self._abandoned is not None else time.monotonic()
            self._line.send_to_late_joiners(failed, told, self.size - 1, begun + _FAREWELL_S)
