"""The native port as the rank's Python code uses it: open while a call is inside, and errors that say who is to blame.

Waits run in slices: between two of them a session that another thread has closed is noticed, and pushes that were
deferred go out (another rank may wait for one of them before it does what we wait for).
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.end_reports import report
from ..orchestration.errors import BpsError, StallError
from ..orchestration.messages import StallAnswer
from ..pyx.port import ABORTED, DIFFERENT, DONE, NODE_DIED, TIMED_OUT, LaneFull, Port
from .node_connection import error_of
from .stall_inspector import StallInspector, StallQuery, StallTimer, Subject

if TYPE_CHECKING:
    from .unit import Unit

#: A wait sleeps at most this long before it looks whether the session was closed by another thread.
_SLICE_S = 0.5
#: The same while pushes are deferred: their commits arrive by socket, which no futex announces.
_DEFERRED_SLICE_S = 0.002


class GuardedPort:
    """Wraps *port*. Any thread.

    Parameters
    ----------
    me, node
        How errors call this rank and its node: "rank 3", "node 1 (pid 77 on this machine)".
    require_open
        Raises `ClosedError` when the session is closed, or is another process's.
    inquiry
        Knows who is missing, and whether it is hopeless to wait on.
    inspector
        Told of waits that take long.
    start_deferred
        Starts deferred pushes that can be; returns whether some are left.
    node_lost
        Returns what to raise when the node has ended and no abort says why.
    """

    def __init__(self, port: Port, me: str, node: str, require_open: Callable[[], None], inquiry: StallQuery,
                 inspector: StallInspector, start_deferred: Callable[[], bool],
                 node_lost: Callable[[], BpsError]) -> None:
        self._port = port
        self._me = me
        self._node = node
        self._require_open = require_open
        self._inquiry = inquiry
        self._inspector = inspector
        self._start_deferred = start_deferred
        self._node_lost = node_lost
        self._lock = threading.Lock()
        self._n_inside = 0
        self._closing = False
        self._inside = _Inside(self)

    def submit(self, part: int, n_parts: int, round: int, segment: int, offset: int, nbytes: int = 0) -> None:
        """Announce inputs (`Port.submit`)."""
        with self._inside as port:
            port.submit(part, n_parts, round, segment, offset, nbytes=nbytes)

    def submit_empty(self, part: int, n_parts: int, round: int) -> None:
        """Take part in a round without contributing."""
        with self._inside as port:
            port.submit(part, n_parts, round, 0, 0, empty=True)

    def set_rate(self, part: int, n_parts: int, round: int, rate: float) -> None:
        """Say which learning rate inputs are computed for from *round* on (`Port.set_rate`)."""
        with self._inside as port:
            port.set_rate(part, n_parts, round, rate)

    def copy_in(self, destination: int, source: int, nbytes: int, part: int, stride: int, round: int, segment: int,
                offset: int) -> None:
        """Copy into the segment and announce, partition by partition (`Port.copy_in`)."""
        with self._inside as port:
            port.copy_in(destination, source, nbytes, part, stride, round, segment, offset)

    def land(self, part: int, round: int, segment: int, offset: int, nbytes: int, begin_ns: int) -> None:
        """Announce a partition that a line has brought from a device (`Port.land`)."""
        with self._inside as port:
            port.land(part, round, segment, offset, nbytes, begin_ns)

    def look(self, part: int, round: int, timeout_s: float) -> bool:
        """Return whether *round* of a partition is complete, waiting a moment for it. Raises when it never will be."""
        with self._inside as port:
            if timeout_s <= 0 or port.done(part, 1, round):
                return port.done(part, 1, round)
            outcome = port.look(part, round, timeout_s)
        if outcome in (ABORTED, NODE_DIED):
            raise self._over()
        return outcome == DONE

    def note_arrival(self, part: int, round: int, nbytes: int, begin_ns: int) -> None:
        """Note that a result is on a device (`Port.note_arrival`)."""
        with self._inside as port:
            port.note_arrival(part, round, nbytes, begin_ns)

    def done(self, part: int, n_parts: int, round: int) -> bool:
        """Return whether *round* of all these partitions is complete."""
        with self._inside as port:
            return port.done(part, n_parts, round)

    def wait(self, unit: Unit, part: int, n_parts: int, round: int, timeout_s: float) -> None:
        """Wait until *round* of these partitions of *unit* is complete.

        Raises
        ------
        StallError
            After *timeout_s* seconds, naming who is missing; soon, if who is missing has left and will not come.
        PeerLostError
            Or whatever the job was aborted with.
        """
        self._in_slices(lambda port, wait_s: port.wait(part, n_parts, round, wait_s),
                        unit, part, n_parts, round, timeout_s)

    def exchange(self, unit: Unit, round: int, place: tuple[int, int], timeout_s: float) -> None:
        """Announce *unit*'s inputs at *place* (segment, offset) and wait, with less around it than two calls have."""
        part, n_parts = unit.first_part, unit.n_parts
        slice_s = min(timeout_s, _DEFERRED_SLICE_S if self._start_deferred() else _SLICE_S)
        with self._inside as port:
            port.submit(part, n_parts, round, *place, nbytes=unit.nbytes)
            outcome = port.wait(part, n_parts, round, slice_s)
        if outcome != DONE:
            self._in_slices(lambda port, wait_s: port.wait(part, n_parts, round, wait_s),
                            unit, part, n_parts, round, timeout_s, spent_s=slice_s)

    def deliver(self, unit: Unit, address: int, source: int, nbytes: int, part: int, round: int,
                timeout_s: float) -> None:
        """Copy *nbytes* at *source*, results from partition *part* on, to *address* as they complete.

        Raises as `wait`; the destination is then partly written.
        """
        n_parts = -(-nbytes // unit.stride)
        # A slice that ends early copies the complete partitions again: rare, and cheap beside the wait.
        self._in_slices(
            lambda port, wait_s: port.deliver(address, source, nbytes, part, unit.stride, round, wait_s),
            unit, part, n_parts, round, timeout_s)

    def pipelined_transfer(self, chunks: np.ndarray[Any, Any], ahead: int, subject_of: Callable[[int], tuple[Unit, int, int]],
               timeout_s: float) -> bool:
        """Put in and take out *legs* (`Port.pipelined_transfer`); whether the tickets among them agree. *subject_of* leg i is
        (unit, partition of the job, round).

        Raises as `wait`.
        """
        n_in = n_out = 0
        raw = chunks.view(np.uint8)
        deferred = self._start_deferred()
        with StallTimer(self._me, timeout_s, self._inquiry, self._inspector) as patience:
            while True:
                with self._inside as port:
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

    def check(self) -> None:
        """Raise what the job was aborted with, if it was."""
        with self._inside as port:
            if port.state()[0]:
                raise self._abort_error()

    def trace(self) -> bytes:
        """Return the native records so far."""
        return self._port.trace()

    def close(self, timeout_s: float) -> bool:
        """Close the port once no thread is inside; return False, and leave it open, if one still is at the end.

        The session must be closed before, so that nobody comes in.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closing = True
        while self._n_inside:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        self._port.close()
        return True

    # -- innards ---------------------------------------------------------------------------------------------------

    def _in_slices(self, wait: Callable[[Port, float], int], unit: Unit, part: int, n_parts: int, round: int,
                   timeout_s: float, spent_s: float = 0.0) -> None:
        deferred = self._start_deferred()
        with StallTimer(self._me, timeout_s, self._inquiry, self._inspector, spent_s=spent_s) as patience:
            while True:
                with self._inside as port:
                    outcome = wait(port, min(_DEFERRED_SLICE_S if deferred else _SLICE_S, patience.rest_s))
                if outcome == DONE:
                    break
                if outcome in (ABORTED, NODE_DIED):
                    raise self._over()
                assert outcome == TIMED_OUT, f"the port returned {outcome}"
                patience.look(lambda: self._ask(unit, part, n_parts, round), lambda: self.done(part, n_parts, round))
                deferred = self._start_deferred()

    def _ask(self, unit: Unit, part: int, n_parts: int, round: int) -> tuple[Subject, StallAnswer]:
        """Ask who is missing from the first of these partitions that is not complete."""
        first = next((i for i in range(part, part + n_parts) if not self.done(i, 1, round)), part)
        subject = Subject.of(unit.name, list(unit.members), first - unit.first_part, unit.n_parts, round)
        return subject, self._inquiry.ask(first, round, unit.name)

    def _over(self) -> BpsError:
        """Return why the job is over: what it was aborted with, or else the node is gone."""
        if self._port.state()[0]:
            return self._abort_error()
        return self._node_lost()

    def _abort_error(self) -> BpsError:
        report("told")
        name, _, reason = self._port.state()[1].partition(": ")
        return error_of(name, reason)


class _Inside:
    """A thread's stay inside the port; as many at once as like. Per push and wait, so no generator."""

    __slots__ = ("_guarded",)

    def __init__(self, guarded: GuardedPort) -> None:
        self._guarded = guarded

    def __enter__(self) -> Port:
        guarded = self._guarded
        guarded._require_open()  # before the lock: in a forked child nobody may be there to release it
        with guarded._lock:
            if guarded._closing:
                guarded._require_open()
            guarded._n_inside += 1
        return guarded._port

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        guarded = self._guarded
        try:
            if isinstance(exc, ConnectionError) and not isinstance(exc, BpsError):
                raise guarded._over() from exc
            if isinstance(exc, LaneFull):
                raise StallError(f"{guarded._node} {exc}") from exc
        finally:
            with guarded._lock:
                guarded._n_inside -= 1
