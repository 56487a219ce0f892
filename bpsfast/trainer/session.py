"""A rank's session with its node: everything a rank owns, from `init` to `shutdown`.

`InputMemory` knows the segments that were shared, `TensorRegistry` the names and units. Waits on rounds are native
(`GuardedPort`); the socket is read only by a call that needs a reply, and beside a wait while pushes are deferred.
Modules that build on sessions keep what they know of one as its extensions. `process` holds the one session of a
process.
"""
from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from ..base.addresses import local_host
from ..base.end_reports import report
from ..base.settings import Settings
from ..base.trace_file import Origin, write as write_trace
from ..base.trace_records import RECORD, limits
from ..orchestration import messages
from ..orchestration.errors import BpsError, BusyError, ClosedError, PeerLostError, ProtocolError, error_of
from ..pyx.direct import Channel
from ..pyx.port import Port
from .codec_state import States
from .gpu.devices import Devices
from .guarded_port import GuardedPort
from .input_memory import InputMemory
from .key_value_client import KeyValueClient
from .membership import Membership
from .node_connection import Attachment, Mailbox, NodeRequests
from .stall_inspector import StallInspector, StallQuery
from .step_clock import StepClock
from .tensor_registry import TensorRegistry
from .unit import Unit

T = TypeVar("T")

#: How long `close` waits for the node's reply, and for other threads to leave the port.
_CLOSE_TIMEOUT_S = 5.0
#: A killed process closes its sockets just before its pidfd fires.
_DYING_S = 0.5
_SHUT_DOWN = "bpsfast was shut down in this process: call bpsfast.init() before using it again"


class Session:
    """One rank's attachment to its node. Any thread; made by `init`, found by `current`.

    *failure* returns what became of the daemons that this process started, or None.
    """

    def __init__(self, attachment: Attachment, settings: Settings,
                 failure: Callable[[], str | None] = lambda: None) -> None:
        attached = attachment.attached
        self.rank, self.size = attached.rank, attached.size
        self.local_rank, self.local_size = attached.local_rank, attached.local_size
        self.node, self.n_nodes, self.n_helpers = attached.node, attached.n_nodes, attached.n_helpers
        self.transports = dict(attached.transports)
        self.machines = attached.machines
        self.job = attached.job
        self.settings = settings
        self.role = attachment.role
        self.pid = os.getpid()
        self.closed = False
        port = Port(attachment.lane, attachment.board, attachment.doorbell, attachment.node_pidfd,
                    awake_us=settings.awake_us, **limits(settings)._asdict())
        self._node_name = f"node {self.node} (pid {attached.node_pid} on this machine)"
        self._failure = failure
        self._attachment = attachment
        self._mailbox = mailbox = Mailbox(attachment.channel, attachment.node_pidfd, self._receive,
                                          lambda: self.port.check(), self._node_lost, self.require_open)
        self._requests = NodeRequests(settings.timeout_s, mailbox)
        self.stall_query = StallQuery(self.rank, self._requests)
        self.inspector = StallInspector(f"rank {self.rank}", settings.stall_warn_s, port.count_stall)
        goes_on = settings.on_worker_loss == "continue"
        self._retired_nbytes = 0  # pushed by units that are retired
        self.clock = StepClock(port, self._pushed_nbytes)
        self.memory = InputMemory(self.rank, settings.timeout_s, self.require_open, mailbox)
        self.states = States(self._requests, self.memory)
        self.key_values = KeyValueClient(self.rank, self._requests)
        self.tensors = TensorRegistry(self.rank, self.size, settings.timeout_s, self.require_open, mailbox,
                                      self.stall_query, self.inspector, goes_on)
        #: Which ranks take part.
        self.membership = Membership(self.size, goes_on, lambda: port.n_lost, mailbox, settings.timeout_s,
                                     self._begin_without)
        self.port = GuardedPort(port, f"rank {self.rank}", self._node_name, self.require_open, self.stall_query,
                                self.inspector, self.tensors.start_committed, self._node_lost,
                                functools.partial(Channel, board=attachment.board, doorbell=attachment.doorbell,
                                                  node_pidfd=attachment.node_pidfd, awake_us=4 * settings.awake_us,
                                                  is_crowded=self.local_size > (os.cpu_count() or 1),
                                                  huge_pages=settings.huge_pages == "auto"),
                                self.tensors.deferred, self.membership)
        #: Whether tensors of all ranks may be summed by the ranks themselves.
        self.sums_directly = (self.n_nodes + self.n_helpers == 1 and settings.sums == "on"
                              and settings.direct_sums == "auto" and not goes_on)
        self.devices = Devices(self)
        self._lock = threading.RLock()
        self._extensions: dict[Callable[..., Any], _Extension] = {}
        self._barriers_entered = 0
        self._barriers_done = 0
        self._released = False
        self._is_leaving = False

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have called this as often; raise `StallError` if they have not done so in time."""
        self.require_open()
        with self._lock:
            self._barriers_entered += 1
            sequence = self._barriers_entered
        self._mailbox.send(messages.BarrierEnter(rank=self.rank, sequence=sequence))
        self.tensors.wait(lambda: True if self._barriers_done >= sequence else None, timeout_s,
                          f"in barrier {sequence}", f"barrier:{sequence}")

    def extension(self, make: Callable[[Session], T]) -> T:
        """Return what *make* made of this session when it was first asked for; `close` calls its ``close``, if any.

        Raises `ClosedError` if it was not made, and the session is closed, or is being closed.
        """
        found = self._extensions.get(make)
        if found is None:
            with self._lock:
                found = self._extensions.setdefault(make, _Extension())
        if not found.is_made:
            with found.lock:  # not the session's: some wait for the node while they are made
                if not found.is_made:
                    self.require_open()
                    if self._is_leaving:
                        raise ClosedError(_SHUT_DOWN)
                    found.value = make(self)
                    found.is_made = True
        return cast("T", found.value)

    @property
    def host(self) -> str:
        """This machine's address for other machines of the job; raises as `local_host`."""
        return local_host(self.settings, [host for host, _ in self.role.schedulers])

    def retire(self, units: Sequence[Unit], releases_staging: bool = False) -> None:
        """Retire *units*: their resources are free as soon as all ranks have retired them.

        All their rounds must be complete, and their results not be read any more. Their names may be declared again.
        *releases_staging*: also release their input memory, which the caller does otherwise.
        """
        self.require_open()
        were_retired = [unit.is_retired for unit in units]
        for unit in units if not any(unit.in_flight for unit in units) else ():
            unit.rounds.is_retired = True  # no round begins any more
        if any(unit.in_flight for unit in units):
            for unit, was_retired in zip(units, were_retired):
                unit.rounds.is_retired = was_retired
            raise BusyError("a tensor cannot be retired before its last round was waited for")
        try:
            for unit in units:
                unit.await_readers()
        except BaseException:
            for unit, was_retired in zip(units, were_retired):
                unit.rounds.is_retired = was_retired
            raise
        regions = [unit.staging for unit in units if unit.has_staging and releases_staging]
        names = [name for unit in units for name in unit.members]
        self.tensors.retire(names)
        self.devices.direct.forget(names)
        for unit in units:
            self._retired_nbytes += unit.pushed_nbytes
            self.devices.direct.release_input(unit)
            unit.forget()
        self._mailbox.send(messages.Retire(rank=self.rank, units=tuple(unit.number for unit in units)))
        for region in regions:
            self.memory.release(region)

    def set_credit(self, nbytes: int) -> None:
        """Set the credit of every node to *nbytes* under way to one peer; 0: its own setting. Does not wait."""
        self.require_open()
        self._mailbox.send(messages.Credit(rank=self.rank, nbytes=nbytes))

    def ask_node(self) -> messages.Counters:
        """Return the counters of this machine's node."""
        return self._requests.ask(messages.Counters, lambda request: messages.CountersRequest(request=request),
                                  "the node did not send its counters")

    def share_device(self, question: Callable[[int], messages.ShareDevice], trouble: str,
                     fd: int) -> messages.DeviceShared:
        """Ask the node to register memory of this rank's device, whose descriptor *fd* is; see `NodeRequests.ask`."""
        return self._requests.ask(messages.DeviceShared, question, trouble, fds=[fd])

    def say_direct(self, names: Sequence[str]) -> None:
        """Tell the node which of the tensors that are declared next lie on this rank's device."""
        self._mailbox.send(messages.GpuDirectTensors(names=tuple(names)))

    def ask_lags(self) -> messages.LagAnswer:
        """Return how late the ranks of the job were, and which nodes did not reply within two seconds."""
        return self._requests.ask(
            messages.LagAnswer, lambda request: messages.LagQuestion(rank=self.rank, question=request),
            "node or scheduler did not tell how late the ranks are")

    def _receive(self, message: messages.Message, fds: tuple[int, ...]) -> None:
        """Handle one message of the node. The mailbox calls it with one message at a time."""
        match message:
            case messages.SegmentShared() | messages.Allocated() | messages.Refuse():
                self.memory.receive(message, fds)
            case messages.Declared():
                self._commit(message.units)
            case messages.DeclareFailed():
                self.tensors.refused(message.names, error_of(message.error, message.reason))
            case messages.RanksLost():
                self.membership.note(message)
            case messages.FirstRankLeft():
                self.stall_query.departed()
            case messages.BarrierDone():
                self._barriers_done = max(self._barriers_done, message.sequence)
            case messages.Counters() | messages.StateDone() | messages.DeviceShared():
                self._requests.receive(message.request, message)
            case messages.StallAnswer() | messages.LagAnswer() | messages.KeyValueReply():
                self._requests.receive(message.question, message)
            case messages.Detached():
                self._released = True

    def _begin_without(self, number: int, round: int, lost: frozenset[int]) -> dict[str, int]:
        """See *begin* of `Membership`."""
        unit = next((unit for unit in self.tensors.units() if unit.number == number), None)
        return unit.lose(round, lost) if unit is not None else {}

    def _pushed_nbytes(self) -> int:
        return self._retired_nbytes + sum(unit.pushed_nbytes for unit in self.tensors.units())

    def _commit(self, units: Sequence[messages.UnitReady]) -> None:
        """Enter units as tensors of this rank. Units of a new layout that cannot be mapped are retired at once.

        The other ranks retire a layout that one rank cannot have, and nodes wait for this rank, too. Other tensors are
        not retired: the next tensors would get the same memory, which this rank could not map either.
        """
        given_up = []
        for ready in units:
            try:
                try:
                    unit = Unit(self, ready, self.memory.segments, self.devices.direct.segments)
                except ProtocolError:
                    self.memory.map_again()
                    unit = Unit(self, ready, self.memory.segments, self.devices.direct.segments)
            except ProtocolError as exc:
                names = [member.name for member in ready.plan.members]
                if self.tensors.is_relayout(names):
                    given_up.append(ready.plan.unit)
                self.tensors.refused(names, self.memory.unmapped or exc)
            else:
                self.tensors.committed(unit)
        if given_up:
            self._mailbox.send(messages.Retire(rank=self.rank, units=tuple(given_up)))

    def _node_lost(self) -> BpsError:
        """Return the error of a node that has ended without giving a reason."""
        if self._released:
            return ClosedError("bpsfast was shut down in this process while this call waited")
        report("told")
        poll = select.poll()
        poll.register(self._attachment.node_pidfd, select.POLLIN)
        ended = bool(poll.poll(_DYING_S * 1000))
        how = self._failure() or ("its process has ended" if ended else "it has closed its channel, and still runs")
        return PeerLostError(
            f"{self._node_name} is lost: {how}. Rank {self.rank} cannot go on without it. A node that ends by itself "
            "or by SIGTERM gives the reason. One that gives none was killed (SIGKILL, by the kernel if memory is "
            "short: see dmesg) or has crashed: see its output and its launcher's for the signal")

    def require_open(self) -> None:
        if self.pid != os.getpid():
            raise ClosedError(f"this process ({os.getpid()}) is a fork of rank {self.rank} (pid {self.pid}): a session "
                              "is not inherited; call bpsfast in the process that called init()")
        if self.closed:
            raise ClosedError(_SHUT_DOWN)

    def close(self, clean: bool = True, reason: str = "", timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Leave the job and wait up to *timeout_s* for its end. Idempotent; never raises for lost peers.

        *clean* False aborts the job with *reason*. Arrays in the segments stay usable.
        """
        if self.closed or self.pid != os.getpid():
            return
        self._is_leaving = True
        for extension in reversed(list(self._extensions.values())):
            with extension.lock:  # also of one that another thread is making
                if hasattr(extension.value, "close"):
                    extension.value.close()
        with contextlib.suppress(BpsError):  # the node may be lost or the job aborted: leaving goes on
            held_up = tuple(unit.number for unit in self.tensors.units() if unit.has_siblings and not unit.in_flight)
            if clean and held_up:  # so that other workers do not wait for pushes that never come
                self._mailbox.send(messages.Retire(rank=self.rank, units=held_up))
            report("leaves")
            self._mailbox.send(messages.Detach(clean=clean, reason=reason))
            self._mailbox.wait(lambda: True if self._released else None, timeout_s if clean else min(timeout_s, 1.0))
        if clean and self._released:
            report("left")
        self.closed = True
        self.port.refuse_calls()
        devices_closed = self.devices.close(_CLOSE_TIMEOUT_S, lambda: ClosedError(_SHUT_DOWN))
        self._write_trace()
        self.tensors.forget()
        self._extensions.clear()
        segments = self.memory.forget()
        if not self.port.close(_CLOSE_TIMEOUT_S) or not devices_closed:
            return  # a thread is still inside: its mappings must stay
        self._attachment.close()
        for segment in segments:
            with contextlib.suppress(BufferError):  # the user still holds arrays; the last one unmaps it
                segment.close()

    def _write_trace(self) -> None:
        if self.settings.trace_dir:
            records = self.port.trace()
            parts = {number: part for unit in self.tensors.units() for number, part in unit.titles().items()}
            write_trace(self.settings.trace_dir, f"rank {self.rank}", records, parts, Origin(
                node=self.node, rank=self.rank, full=len(records) >= self.settings.trace_capacity * RECORD.size))


class _Extension:
    """What is made at the first use, under its own lock, since a signal handler may close while it is made."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.value: Any = None
        self.is_made = False
