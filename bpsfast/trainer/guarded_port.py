"""The native port for Python code: it stays open while a call is inside, and its errors name the rank that is missing.

Waits run in slices. Between two slices a wait notices that another thread has closed the session, and starts deferred
pushes, for which another rank may be waiting.
"""
from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from ..base.end_reports import report
from ..orchestration.errors import BpsError, ProtocolError, StallError, error_of
from ..orchestration.messages import StallAnswer
from ..pyx.direct import DIFFERENT as DIFFERENT_CALL, Channel, DirectCalls, DirectTensor, Rounds
from ..pyx.port import ABORTED, DIFFERENT, DONE, NODE_DIED, TIMED_OUT, LaneFull, Port
from .chunk_descriptors import Array, PartitionedUnit
from .membership import Membership
from .stall_inspector import StallInspector, StallQuery, StallTimer, Subject

C = TypeVar("C", bound=Callable[..., Any])

#: A wait sleeps at most this long before it checks whether another thread has closed the session.
_SLICE_S = 0.5
#: The same while pushes are deferred: commits arrive by socket, which does not wake a futex.
_DEFERRED_SLICE_S = 0.002
#: A direct call gives up so much later than its deadline, which is looked at before.
LATER_S = 0.01

#: What a wait is for: a round of partitions of a unit, by their first one and their number.
_Awaited = tuple[PartitionedUnit, int, int, int]


class GuardedPort:
    """Wraps *port*, of which it has `submit`, `copy_in`, `land`, `set_rate`, `note_arrival` and `done`. Any thread.

    *me* and *node* name this rank and its node in errors: "rank 3", "node 1 (pid 77 on this machine)". *require_open*
    raises `ClosedError` when the session is closed, or is another process's. *stall_query* asks which ranks are
    missing, and whether they can still come; *inspector* records long waits. *start_deferred* starts deferred pushes
    that can be, and returns whether some are left. *node_lost* returns what to raise when the node has ended and no
    abort says why. *make_channel* opens the channel in some memory: for so many ranks, as one of them, for so many
    bytes. *deferred*: the deferred pushes. *membership*: which ranks take part.
    """

    def __init__(self, port: Port, me: str, node: str, require_open: Callable[[], None], stall_query: StallQuery,
                 inspector: StallInspector, start_deferred: Callable[[], bool], node_lost: Callable[[], BpsError],
                 make_channel: Callable[[memoryview, int, int, int], Channel], deferred: dict[str, Any],
                 membership: Membership) -> None:
        self._port = port
        self._deferred = deferred
        self._membership = membership
        self._make_channel = make_channel
        self._channels: set[Channel] = set()
        self._me = me
        self._node = node
        self._require_open = require_open
        self._stall_query = stall_query
        self._inspector = inspector
        self.start_deferred = start_deferred
        self._node_lost = node_lost
        self._is_closing = False
        self._inside: list[None] = []  # an item for each call inside: appending and popping need no lock
        guarded = self._guarded
        self.submit, self.copy_in, self.land = guarded(port.submit), guarded(port.copy_in), guarded(port.land)
        self.set_rate, self.note_arrival, self.done = (
            guarded(port.set_rate), guarded(port.note_arrival), guarded(port.done))
        self._wait, self._look, self._deliver = guarded(port.wait), guarded(port.look), guarded(port.deliver)
        self._note_direct = guarded(port.note_direct)
        self._transfer, self._state = guarded(port.pipelined_transfer), guarded(port.state)
        _open.add(self)

    def _guarded(self, native: C) -> C:
        """Return *native*, a method of the port, as a call during which the port stays open, and with its errors.

        It takes positional arguments only: options would cost as much as all the rest.
        """
        enter, leave = self._inside.append, self._inside.pop

        def call(*arguments: Any) -> Any:
            enter(None)  # before the look: `close` waits for calls inside
            try:
                if self._is_closing:
                    self._require_open()
                return native(*arguments)
            except (ConnectionError, LaneFull) as exc:
                if isinstance(exc, BpsError):  # of `require_open`
                    raise
                raise (StallError(f"{self._node} {exc}") if isinstance(exc, LaneFull) else self._over()) from exc
            finally:
                leave()

        return cast("C", call)

    def look(self, part: int, round: int, timeout_s: float) -> bool:
        """Wait up to *timeout_s* and return whether *round* of a partition is complete. Raises if the job is over."""
        if timeout_s <= 0 or self.done(part, 1, round):
            return self.done(part, 1, round)
        outcome = self._look(part, round, timeout_s)
        if outcome in (ABORTED, NODE_DIED):
            raise self._over()
        return outcome == DONE

    def wait(self, unit: PartitionedUnit, part: int, n_parts: int, round: int, timeout_s: float) -> None:
        """Wait until *round* of these partitions of *unit* is complete.

        Raises `StallError` after *timeout_s* seconds, or earlier if a missing rank has left the job; it names the
        missing ranks. Raises what the job was aborted with, as `PeerLostError`.
        """
        self._in_slices(lambda wait_s: self._wait(part, n_parts, round, wait_s),
                        lambda: (unit, part, n_parts, round), timeout_s, needed=unit.needed)
        self._note_members(unit, round)

    def _note_members(self, unit: PartitionedUnit, round: int) -> None:
        """Tell the program, before it gets *round* of *unit*, which ranks that is without."""
        if self._membership.goes_on:
            self._membership.learn()
            self._membership.waited_for(unit.lost_in(round))

    def exchange(self, unit: PartitionedUnit, round: int, place: tuple[int, int], timeout_s: float) -> None:
        """Announce *unit*'s inputs at *place* (segment, offset) and wait: cheaper than `submit` and `wait`."""
        part, n_parts = unit.first_part, unit.n_parts
        slice_s = min(timeout_s, _DEFERRED_SLICE_S if self.start_deferred() else _SLICE_S)
        self.submit(part, n_parts, round, *place, False, unit.nbytes)
        if self._wait(part, n_parts, round, slice_s) == DONE:
            self._note_members(unit, round)
        else:
            self._in_slices(lambda wait_s: self._wait(part, n_parts, round, wait_s),
                            lambda: (unit, part, n_parts, round), timeout_s, spent_s=slice_s)
            self._note_members(unit, round)

    def deliver(self, unit: PartitionedUnit, address: int, source: int, nbytes: int, part: int, round: int,
                timeout_s: float) -> None:
        """Copy *nbytes* at *source*, results from partition *part* on, to *address* as they complete.

        Raises as `wait`; the destination is then partly written.
        """
        n_parts = -(-nbytes // unit.stride)
        # A slice that times out copies complete partitions again, which is rare and cheap beside the wait.
        self._in_slices(lambda wait_s: self._deliver(address, source, nbytes, part, unit.stride, round, wait_s),
                        lambda: (unit, part, n_parts, round), timeout_s, needed=unit.needed)

    def pipelined_transfer(self, chunks: Array, ahead: int,
                           subject_of: Callable[[int], tuple[PartitionedUnit, int, int]], timeout_s: float,
                           needed: Collection[int] = ()) -> bool:
        """Send and receive *chunks* (`Port.pipelined_transfer`); return whether the fingerprints among them agree.

        ``subject_of(i)`` is (unit, partition of the job, round) of chunk i. Raises as `wait`, and `PeerLostError` if
        one of the ranks *needed* is lost.
        """
        n_in = n_out = 0
        raw = chunks.view(np.uint8)

        def transfer(wait_s: float) -> int:
            nonlocal n_in, n_out
            outcome, n_in, n_out = self._transfer(raw, ahead, n_in, n_out, wait_s)
            return outcome

        def subject() -> _Awaited:
            unit, part, round = subject_of(n_out)
            return unit, part, 1, round

        return self._in_slices(transfer, subject, timeout_s, needed=needed) == DONE

    def open_channel(self, memory: memoryview, n_ranks: int, me: int, most_nbytes: int) -> Channel:
        """Return the channel in *memory* as rank *me* of the *n_ranks* that use it (`pyx.direct.Channel`). It is closed
        with the port.
        """
        self._require_open()
        channel = self._make_channel(memory, n_ranks, me, most_nbytes)
        self._channels.add(channel)
        return channel

    def close_channel(self, channel: Channel) -> None:
        """Close what `open_channel` returned; no thread is in a call of it."""
        self._channels.discard(channel)
        channel.close()

    def direct_tensor(self, channel: Channel, unit: SummedUnit, ranks: Sequence[int], dtype: str, divisor: int,
                      timeout_s: Callable[[], float]) -> DirectTensor:
        """Return *unit* as a tensor that *ranks* sum in *channel* (`pyx.direct.DirectTensor`)."""
        waits = _UnitWaits(self, channel, unit, ranks, timeout_s)
        return DirectTensor(channel, unit.rounds, self._port, waits, self._deferred, unit.first_part, dtype,
                            unit.nbytes, divisor)

    def call_directly(self, channel: Channel, call: Callable[[float, Callable[[], None]], int], unit: PartitionedUnit,
                      ranks: Sequence[int], number: int, timeout_s: float, check: Callable[[], None], nbytes: int
                      ) -> bool:
        """Do *call*, number *number* of *channel*, whose memory is *unit*; return whether all ranks make the same call.

        *call* is called with the seconds that it may take, and with what it has to look at meanwhile. *ranks*: those of
        the job that use the channel, in its order. *check* is called while it waits, and may raise. *nbytes*: of this
        rank's input. Raises as `wait`.
        """
        began_ns = time.monotonic_ns()
        self.start_deferred()
        waits = DirectWaits(self, channel, unit, ranks, lambda: number, lambda: timeout_s, check)
        try:
            outcome = self._guarded(call)(timeout_s + LATER_S, lambda: waits.look(began_ns))
            self._note_direct(began_ns, nbytes)
            waits.end(outcome, began_ns)
        except BaseException as exc:
            waits.failed(exc)
            if isinstance(exc, ValueError):  # of a channel that another thread has closed
                self._require_open()
            raise
        return outcome == DONE

    def direct_calls(self, channel: Channel, *arguments: Any) -> DirectCalls:
        """Return the calls of a group in *channel*; *arguments*: the further ones of `pyx.direct.DirectCalls`."""
        return DirectCalls(channel, self._port, self._deferred, *arguments)

    def _stall_timer(self, timeout_s: float, spent_s: float = 0.0) -> StallTimer:
        return StallTimer(self._me, timeout_s, self._stall_query, self._inspector, spent_s=spent_s)

    def check(self) -> None:
        """Raise the error that the job was aborted with, if it was."""
        if self._state()[0]:
            raise self._abort_error()

    def trace(self) -> bytes:
        """Return the native records so far."""
        return self._port.trace()

    def refuse_calls(self) -> None:
        """Let every call ask first whether the session is open: it is being closed, or this is a forked child."""
        self._is_closing = True
        for channel in list(self._channels):
            channel.refuses = True

    def close(self, timeout_s: float) -> bool:
        """Close the port once no thread is inside; return False, and leave it open, if one still is at the end.

        The session must be closed before, so that no thread comes in.
        """
        deadline = time.monotonic() + timeout_s
        self.refuse_calls()
        while self._inside or any(channel.busy for channel in list(self._channels)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        for channel in list(self._channels):
            channel.close()
        self._port.close()
        return True

    def _in_slices(self, wait: Callable[[float], int], subject: Callable[[], _Awaited], timeout_s: float,
                   spent_s: float = 0.0, needed: Collection[int] = ()) -> int:
        """Call *wait* with seconds until it returns DONE or DIFFERENT, and return that.

        Raises `PeerLostError` if one of the ranks *needed* is lost.
        """
        deferred = self.start_deferred()
        with StallTimer(self._me, timeout_s, self._stall_query, self._inspector, spent_s=spent_s) as patience:
            while True:
                outcome = wait(min(_DEFERRED_SLICE_S if deferred else _SLICE_S, patience.rest_s))
                if self._membership.goes_on and outcome in (DONE, DIFFERENT, TIMED_OUT):
                    self._membership.require(needed, "this call")
                if outcome in (DONE, DIFFERENT):
                    return outcome
                if outcome in (ABORTED, NODE_DIED):
                    raise self._over()
                assert outcome == TIMED_OUT, f"the port returned {outcome}"
                unit, part, n_parts, round = subject()
                patience.look(lambda: self._ask(unit, part, n_parts, round),  # noqa: B023 - called before it changes
                              lambda: self.done(part, n_parts, round))  # noqa: B023
                deferred = self.start_deferred()

    def _ask(self, unit: PartitionedUnit, part: int, n_parts: int, round: int) -> tuple[Subject, StallAnswer]:
        """Ask which ranks are missing from the first of these partitions that is not complete."""
        first = next((i for i in range(part, part + n_parts) if not self.done(i, 1, round)), part)
        subject = Subject.of(unit.name, list(unit.members), first - unit.first_part, unit.n_parts, round)
        return subject, self._stall_query.ask(first, round, unit.name)

    def _over(self) -> BpsError:
        """Return why the job is over: the error it was aborted with, or that the node is lost."""
        if self._port.state()[0]:
            return self._abort_error()
        return self._node_lost()

    def _abort_error(self) -> BpsError:
        report("told")
        name, _, reason = self._port.state()[1].partition(": ")
        return error_of(name, reason)


class SummedUnit(PartitionedUnit, Protocol):
    """What a direct tensor needs of its unit."""

    rounds: Rounds

    def refusal(self) -> BpsError: ...
    def give_up(self, error: BaseException) -> None: ...
    def sum_by_node(self, round: int, source: int, destination: int, timeout_s: float) -> None: ...


class DirectWaits:
    """What a rank does while a direct call waits for long, and when one fails; one call at a time.

    *unit*: whose memory *channel* is, *ranks*: those of the job that use it, in its order. *number* and *timeout_s*
    return those of the present call. *check* may raise.
    """

    def __init__(self, port: GuardedPort, channel: Channel, unit: PartitionedUnit, ranks: Sequence[int],
                 number: Callable[[], int], timeout_s: Callable[[], float], check: Callable[[], None]) -> None:
        self._port, self._channel, self._unit, self._ranks = port, channel, unit, tuple(ranks)
        self._number, self._timeout_s, self._check = number, timeout_s, check
        self._timer: StallTimer | None = None

    def look(self, began_ns: int) -> None:
        """Look at all that may end the call, which began at *began_ns*, or has to be done meanwhile."""
        if self._port._is_closing:
            self._port._require_open()
        self._check()
        self._port.start_deferred()
        self._patience(began_ns).look(self._ask, lambda: not self._channel.missing())

    def end(self, outcome: int, began_ns: int) -> None:
        """End a call that has waited for long, or has failed with *outcome*; raises its error."""
        if outcome in (ABORTED, NODE_DIED):
            raise self._port._over()
        if outcome == TIMED_OUT:
            self._patience(began_ns).look(self._ask, lambda: False)
            raise AssertionError("the time was not up")
        self._stop(None)

    def failed(self, error: BaseException) -> None:
        """End a call that has raised *error*."""
        self._stop(error)

    def _ask(self) -> tuple[Subject, StallAnswer]:
        try:
            missing = tuple(self._ranks[index] for index in self._channel.missing())
        except ValueError:  # another thread has closed the channel
            self._port._require_open()
            raise
        unit, number = self._unit, self._number()
        answer = (self._port._stall_query.ask(unit.first_part, number, unit.name, missing) if missing
                  else StallAnswer(rank=-1, question=0, stage="done", missing="no rank is missing any more"))
        return Subject.of(unit.name, list(unit.members), 0, 1, number), answer

    def _patience(self, began_ns: int) -> StallTimer:
        if self._timer is None:
            self._timer = self._port._stall_timer(self._timeout_s(), (time.monotonic_ns() - began_ns) / 1e9)
        return self._timer

    def _stop(self, error: BaseException | None) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.__exit__(None if error is None else type(error), error, None)


class _UnitWaits(DirectWaits):
    """The same for a unit that is summed directly, whose rounds may go another way, or be lost."""

    def __init__(self, port: GuardedPort, channel: Channel, unit: SummedUnit, ranks: Sequence[int],
                 timeout_s: Callable[[], float]) -> None:
        super().__init__(port, channel, unit, ranks, lambda: unit.rounds.n_begun, timeout_s, lambda: None)
        self._summed = unit
        self.timeout_s = lambda: timeout_s() + LATER_S
        self.start_deferred, self.sum_by_node = port.start_deferred, unit.sum_by_node

    def end(self, outcome: int, began_ns: int) -> None:
        if outcome == DIFFERENT_CALL:
            raise ProtocolError(f"ranks {self._ranks} do not sum the same tensor in the memory of {self._unit.name!r}")
        super().end(outcome, began_ns)

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        self._summed.give_up(error)

    def refusal(self) -> BpsError:
        """Return why no round can begin; raises the reason if it is that the session is closed."""
        self._port._require_open()
        return self._summed.refusal()


_open: weakref.WeakSet[GuardedPort] = weakref.WeakSet()


def _forked() -> None:
    for port in list(_open):
        port.refuse_calls()


os.register_at_fork(after_in_child=_forked)
