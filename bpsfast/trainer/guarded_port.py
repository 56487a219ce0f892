"""The native port for Python code: it stays open while a call is inside, and its errors name the rank that is missing.

Waits run in slices. Between two slices a wait notices that another thread has closed the session, and starts deferred
pushes, for which another rank may be waiting.
"""
from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from ..base.end_reports import report
from ..orchestration.errors import BpsError, StallError, error_of
from ..orchestration.messages import StallAnswer
from ..pyx.direct import DIFFERENT as OTHER_CALL, Channel
from ..pyx.port import ABORTED, DIFFERENT, DONE, NODE_DIED, TIMED_OUT, LaneFull, Port
from .stall_inspector import StallInspector, StallQuery, StallTimer, Subject

#: A wait sleeps at most this long before it checks whether another thread has closed the session.
_SLICE_S = 0.5
#: The same while pushes are deferred: commits arrive by socket, which does not wake a futex.
_DEFERRED_SLICE_S = 0.002
#: A direct call gives up so much later than its deadline, which is looked at before.
_LATER_S = 0.01


class WaitedUnit(Protocol):
    """What errors of a wait tell of its unit."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def members(self) -> Mapping[str, object]:
        """Its tensors by name."""

    @property
    def first_part(self) -> int:
        """The job's number of its first partition."""

    @property
    def n_parts(self) -> int:
        """How many it has."""

    @property
    def nbytes(self) -> int:
        """Bytes of all."""

    @property
    def stride(self) -> int:
        """Bytes from one to the next."""


class GuardedPort:
    """Wraps *port*. Any thread.

    Parameters
    ----------
    me, node
        Names of this rank and its node in errors: "rank 3", "node 1 (pid 77 on this machine)".
    require_open
        Raises `ClosedError` when the session is closed, or is another process's.
    inquiry
        Asks which ranks are missing, and whether they can still come.
    inspector
        Records long waits.
    start_deferred
        Starts deferred pushes that can be; returns whether some are left.
    node_lost
        Returns what to raise when the node has ended and no abort says why.
    make_channel
        Opens the channel in some memory, for so many ranks, as one of them, for so many bytes.
    """

    def __init__(self, port: Port, me: str, node: str, require_open: Callable[[], None], inquiry: StallQuery,
                 inspector: StallInspector, start_deferred: Callable[[], bool],
                 node_lost: Callable[[], BpsError], make_channel: Callable[[mmap.mmap, int, int, int], Channel]) -> None:
        self._port = port
        self._make_channel = make_channel
        self._channels: list[Channel] = []
        self._me = me
        self._node = node
        self._require_open = require_open
        self._inquiry = inquiry
        self._inspector = inspector
        self._start_deferred = start_deferred
        self._node_lost = node_lost
        self._is_closing = False
        self._inside: list[None] = []  # an item for each call inside: appending and popping need no lock
        self._entrance = _Entrance(self)
        _open.add(self)

    def submit(self, part: int, n_parts: int, round: int, segment: int, offset: int, nbytes: int = 0) -> None:
        """Announce inputs (`Port.submit`)."""
        inside = self._inside
        inside.append(None)
        try:
            if self._is_closing:
                self._require_open()
            self._port.submit(part, n_parts, round, segment, offset, nbytes=nbytes)
        except (ConnectionError, LaneFull) as exc:
            raise self._blamed(exc) from exc
        finally:
            inside.pop()

    def submit_empty(self, part: int, n_parts: int, round: int) -> None:
        """Take part in a round without contributing."""
        with self._entrance as port:
            port.submit(part, n_parts, round, 0, 0, empty=True)

    def set_rate(self, part: int, n_parts: int, round: int, rate: float) -> None:
        """Set the learning rate of inputs from *round* on (`Port.set_rate`)."""
        with self._entrance as port:
            port.set_rate(part, n_parts, round, rate)

    def copy_in(self, destination: int, source: int, nbytes: int, part: int, stride: int, round: int, segment: int,
                offset: int) -> None:
        """Copy into the segment and announce, partition by partition (`Port.copy_in`)."""
        inside = self._inside
        inside.append(None)
        try:
            if self._is_closing:
                self._require_open()
            self._port.copy_in(destination, source, nbytes, part, stride, round, segment, offset)
        except (ConnectionError, LaneFull) as exc:
            raise self._blamed(exc) from exc
        finally:
            inside.pop()

    def land(self, part: int, round: int, segment: int, offset: int, nbytes: int, begin_ns: int) -> None:
        """Announce a partition that was copied from a device (`Port.land`)."""
        with self._entrance as port:
            port.land(part, round, segment, offset, nbytes, begin_ns)

    def look(self, part: int, round: int, timeout_s: float) -> bool:
        """Wait up to *timeout_s* and return whether *round* of a partition is complete. Raises if the job is over."""
        with self._entrance as port:
            if timeout_s <= 0 or port.done(part, 1, round):
                return port.done(part, 1, round)
            outcome = port.look(part, round, timeout_s)
        if outcome in (ABORTED, NODE_DIED):
            raise self._over()
        return outcome == DONE

    def note_arrival(self, part: int, round: int, nbytes: int, begin_ns: int) -> None:
        """Note that a result is on a device (`Port.note_arrival`)."""
        with self._entrance as port:
            port.note_arrival(part, round, nbytes, begin_ns)

    def done(self, part: int, n_parts: int, round: int) -> bool:
        """Return whether *round* of all these partitions is complete."""
        with self._entrance as port:
            return port.done(part, n_parts, round)

    def wait(self, unit: WaitedUnit, part: int, n_parts: int, round: int, timeout_s: float) -> None:
        """Wait until *round* of these partitions of *unit* is complete.

        Raises
        ------
        StallError
            After *timeout_s* seconds, naming the missing ranks; earlier if a missing rank has left the job.
        PeerLostError
            Or whatever the job was aborted with.
        """
        self._in_slices(lambda port, wait_s: port.wait(part, n_parts, round, wait_s),
                        unit, part, n_parts, round, timeout_s)

    def exchange(self, unit: WaitedUnit, round: int, place: tuple[int, int], timeout_s: float) -> None:
        """Announce *unit*'s inputs at *place* (segment, offset) and wait: cheaper than two calls."""
        part, n_parts = unit.first_part, unit.n_parts
        slice_s = min(timeout_s, _DEFERRED_SLICE_S if self._start_deferred() else _SLICE_S)
        with self._entrance as port:
            port.submit(part, n_parts, round, *place, nbytes=unit.nbytes)
            outcome = port.wait(part, n_parts, round, slice_s)
        if outcome != DONE:
            self._in_slices(lambda port, wait_s: port.wait(part, n_parts, round, wait_s),
                            unit, part, n_parts, round, timeout_s, spent_s=slice_s)

    def deliver(self, unit: WaitedUnit, address: int, source: int, nbytes: int, part: int, round: int,
                timeout_s: float) -> None:
        """Copy *nbytes* at *source*, results from partition *part* on, to *address* as they complete.

        Raises as `wait`; the destination is then partly written.
        """
        n_parts = -(-nbytes // unit.stride)
        # A slice that times out copies complete partitions again, which is rare and cheap beside the wait.
        self._in_slices(
            lambda port, wait_s: port.deliver(address, source, nbytes, part, unit.stride, round, wait_s),
            unit, part, n_parts, round, timeout_s)

    def pipelined_transfer(self, chunks: np.ndarray[Any, Any], ahead: int,
                           subject_of: Callable[[int], tuple[WaitedUnit, int, int]], timeout_s: float) -> bool:
        """Send and receive *chunks* (`Port.pipelined_transfer`); return whether the fingerprints among them agree.

        ``subject_of(i)`` is (unit, partition of the job, round) of chunk i.

        Raises as `wait`.
        """
        n_in = n_out = 0
        raw = chunks.view(np.uint8)
        deferred = self._start_deferred()
        with StallTimer(self._me, timeout_s, self._inquiry, self._inspector) as patience:
            while True:
                with self._entrance as port:
                    outcome, n_in, n_out = port.pipelined_transfer(
                        raw, ahead, n_in, n_out, min(_DEFERRED_SLICE_S if deferred else _SLICE_S, patience.rest_s))
                if outcome in (DONE, DIFFERENT):
                    return outcome == DONE
                if outcome in (ABORTED, NODE_DIED):
                    raise self._over()
                unit, part, round = subject_of(n_out)
                patience.look(lambda: self._ask(unit, part, 1, round),  # noqa: B023 - called before it changes
                              lambda: self.done(part, 1, round))  # noqa: B023
                deferred = self._start_deferred()

    def open_channel(self, memory: mmap.mmap, n_ranks: int, me: int, most_nbytes: int) -> Channel:
        """Return the channel in *memory* as rank *me* of the *n_ranks* that use it (`pyx.direct.Channel`). It is closed
        with the port.
        """
        with self._entrance:
            channel = self._make_channel(memory, n_ranks, me, most_nbytes)
            self._channels.append(channel)
        return channel

    def close_channel(self, channel: Channel) -> None:
        """Close what `open_channel` returned; no thread is in a call of it."""
        if channel in self._channels:
            self._channels.remove(channel)
        channel.close()

    def call_directly(self, channel: Channel, call: Callable[[float, Callable[[], None]], int], unit: WaitedUnit,
                      ranks: Sequence[int], number: int, timeout_s: float, check: Callable[[], None]) -> bool:
        """Do *call*, number *number* of *channel*, whose memory is *unit*; return whether all ranks make the same call.

        It is called with the seconds that it may take, and with what it has to look at meanwhile. *ranks*: those of the
        job that use the channel, in its order. *check* is called while it waits, and may raise. Raises as `wait`.
        """
        begin_ns = time.monotonic_ns()
        self._start_deferred()

        def ask() -> tuple[Subject, StallAnswer]:
            missing = tuple(ranks[index] for index in channel.missing())
            subject = Subject.of(unit.name, list(unit.members), 0, 1, number)
            return subject, self._inquiry.ask(unit.first_part, number, unit.name, missing)

        def look() -> None:
            if self._is_closing:
                self._require_open()
            check()
            self._start_deferred()
            patience.look(ask, lambda: not channel.missing())

        with StallTimer(self._me, timeout_s, self._inquiry, self._inspector) as patience:
            with self._entrance as port:
                outcome = call(timeout_s + _LATER_S, look)
                port.note_direct(unit.first_part, number & 0xffffffff, unit.nbytes, begin_ns)
            if outcome in (DONE, OTHER_CALL):
                return outcome == DONE
            if outcome in (ABORTED, NODE_DIED):
                raise self._over()
            patience.look(ask, lambda: False)
        raise AssertionError("the time was not up")

    def check(self) -> None:
        """Raise the error that the job was aborted with, if it was."""
        with self._entrance as port:
            if port.state()[0]:
                raise self._abort_error()

    def trace(self) -> bytes:
        """Return the native records so far."""
        return self._port.trace()

    def refuse_calls(self) -> None:
        """Let every call ask first whether the session is open: it is being closed, or this is a forked child."""
        self._is_closing = True

    def close(self, timeout_s: float) -> bool:
        """Close the port once no thread is inside; return False, and leave it open, if one still is at the end.

        The session must be closed before, so that no thread comes in.
        """
        deadline = time.monotonic() + timeout_s
        self.refuse_calls()
        while self._inside:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        for channel in self._channels:
            channel.close()
        self._port.close()
        return True

    # -- innards ---------------------------------------------------------------------------------------------------

    def _in_slices(self, wait: Callable[[Port, float], int], unit: WaitedUnit, part: int, n_parts: int, round: int,
                   timeout_s: float, spent_s: float = 0.0) -> None:
        deferred = self._start_deferred()
        with StallTimer(self._me, timeout_s, self._inquiry, self._inspector, spent_s=spent_s) as patience:
            while True:
                with self._entrance as port:
                    outcome = wait(port, min(_DEFERRED_SLICE_S if deferred else _SLICE_S, patience.rest_s))
                if outcome == DONE:
                    break
                if outcome in (ABORTED, NODE_DIED):
                    raise self._over()
                assert outcome == TIMED_OUT, f"the port returned {outcome}"
                patience.look(lambda: self._ask(unit, part, n_parts, round), lambda: self.done(part, n_parts, round))
                deferred = self._start_deferred()

    def _ask(self, unit: WaitedUnit, part: int, n_parts: int, round: int) -> tuple[Subject, StallAnswer]:
        """Ask which ranks are missing from the first of these partitions that is not complete."""
        first = next((i for i in range(part, part + n_parts) if not self.done(i, 1, round)), part)
        subject = Subject.of(unit.name, list(unit.members), first - unit.first_part, unit.n_parts, round)
        return subject, self._inquiry.ask(first, round, unit.name)

    def _over(self) -> BpsError:
        """Return why the job is over: the error it was aborted with, or that the node is lost."""
        if self._port.state()[0]:
            return self._abort_error()
        return self._node_lost()

    def _blamed(self, error: ConnectionError | LaneFull) -> BpsError:
        """Return what an *error* of the native port means, which may be one of `require_open`."""
        if isinstance(error, BpsError):
            return error
        return StallError(f"{self._node} {error}") if isinstance(error, LaneFull) else self._over()

    def _abort_error(self) -> BpsError:
        report("told")
        name, _, reason = self._port.state()[1].partition(": ")
        return error_of(name, reason)


class _Entrance:
    """Lets a thread into the port; as many at once as like."""

    __slots__ = ("_guarded",)

    def __init__(self, guarded: GuardedPort) -> None:
        self._guarded = guarded

    def __enter__(self) -> Port:
        guarded = self._guarded
        guarded._inside.append(None)  # before the look: `close` waits for who is inside
        if guarded._is_closing:
            try:
                guarded._require_open()
            except BaseException:
                guarded._inside.pop()
                raise
        return guarded._port

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._guarded._inside.pop()
        if isinstance(exc, ConnectionError | LaneFull) and not isinstance(exc, BpsError):
            raise self._guarded._blamed(exc) from exc


_open: weakref.WeakSet[GuardedPort] = weakref.WeakSet()


def _forked() -> None:
    for port in list(_open):
        port.refuse_calls()


os.register_at_fork(after_in_child=_forked)
