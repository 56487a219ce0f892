"""A rank's session with its node: everything a rank owns, from `init` to `shutdown`.

A session knows the units that were committed and the segments that were shared. Waits on rounds are native
(`GuardedPort`); the socket is read only by a call that needs a reply, and beside a wait while pushes are deferred.
`current` holds the one session of a process.
"""
from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..orchestration.errors import BpsError, BusyError, ClosedError, MismatchError, PeerLostError, StallError
from ..orchestration.messages import (
    Allocate,
    Allocated,
    Ask,
    BarrierDone,
    BarrierEnter,
    Declare,
    Declared,
    DeclareFailed,
    Departed,
    Detach,
    Detached,
    Message,
    Refuse,
    SegmentShared,
    StallAnswer,
    Stalled,
    TensorSpec,
    Told,
)
from ..pyx.pages import Segment
from ..pyx.port import Port
from ..settings import Settings
from .attachment import Attachment, error_of
from .guarded_port import GuardedPort
from .mailbox import Mailbox
from .unit import Region, Unit

if TYPE_CHECKING:
    from .broadcaster import Broadcaster
    from .repeat import Repeat

T = TypeVar("T")

#: How long to wait for the answer to "who is missing?".
STALL_ANSWER_S = 2.5
#: Once somebody has left, how often a wait for other ranks asks whether it is in vain.
_DOUBT_S = 0.5
#: How long `close` waits for the node's goodbye, and for other threads to come out of the port.
_GOODBYE_S = 5.0
#: A killed process closes its sockets just before its pidfd fires.
_DYING_S = 0.5


class Session:
    """One rank's attachment to its node. Any thread; made by `init`, found by `current`.

    *failure* says what became of the daemons this process started, or None.
    """

    def __init__(self, attachment: Attachment, settings: Settings,
                 failure: Callable[[], str | None] = lambda: None) -> None:
        attached = attachment.attached
        self.rank, self.size = attached.rank, attached.size
        self.local_rank, self.local_size = attached.local_rank, attached.local_size
        self.node, self.n_nodes, self.n_helpers = attached.node, attached.n_nodes, attached.n_helpers
        self.transports = dict(attached.transports)
        self.settings = settings
        self.pid = os.getpid()
        self.closed = False
        port = Port(attachment.lane, attachment.board, attachment.doorbell, attachment.node_pidfd,
                    awake_us=settings.awake_us, trace_capacity=settings.trace_capacity if settings.trace_dir else 0)
        self._node_name = f"node {self.node} (pid {attached.node_pid} on this machine)"
        self._failure = failure
        self._attachment = attachment
        self.port = GuardedPort(port, f"rank {self.rank}", self._node_name, self.require_open, self._ask_missing,
                                self._look_for_deferred, self._somebody_left, self._node_lost)
        self._lock = threading.RLock()
        self._segments: dict[tuple[str, int], Segment] = {}
        self._inputs: list[tuple[int, Segment]] = []
        self._specs: dict[str, TensorSpec] = {}
        self._units: dict[str, Unit] = {}
        self._failed: dict[str, BpsError] = {}
        self.repeats: dict[str, Repeat] = {}
        self._deferred: dict[str, Callable[[], None]] = {}
        self._asked: list[int] = []  # requests for memory that have no answer yet: they are answered in order
        self._allocated: dict[int, Allocated | BpsError] = {}
        self._told: dict[int, dict[str, int]] = {}
        self._stall_answers: dict[tuple[int, int], StallAnswer] = {}
        self._departed = False
        self._requests = 0
        self._barriers_entered = 0
        self._barriers_done = 0
        self._unnamed: dict[str, int] = {}
        self.order: dict[str, int] = {}
        self._released = False
        self._broadcaster: Broadcaster | None = None
        self._mailbox = Mailbox(attachment.channel, attachment.node_pidfd, self._receive, self.port.check,
                                self._node_lost)

    # -- tensors ---------------------------------------------------------------------------------------------------

    def declare(self, specs: Sequence[TensorSpec]) -> None:
        """Tell the job about tensors. Returns at once; they may be pushed when all ranks have declared them.

        Ranks may declare in any order. Declaring the same again changes nothing.

        Raises
        ------
        MismatchError
            If this rank declared one of the names differently before; what the ranks could not agree on stays refused.
        """
        self.require_open()
        with self._lock:
            new = [spec for spec in specs if self._is_new(spec)]
            for spec in new:
                self._specs[spec.name] = spec
        if new:
            self._mailbox.send(Declare(rank=self.rank, tensors=tuple(new)))

    def knows(self, spec: TensorSpec) -> bool:
        """Return whether exactly this was declared before, and is used still: the short way of a repeated push."""
        return self._specs.get(spec.name) == spec and not self.closed

    def _is_new(self, spec: TensorSpec) -> bool:
        if spec.name in self._failed:
            raise self._failed[spec.name]
        known = self._specs.get(spec.name)
        if known is None:
            return True
        for field in ("shape", "dtype", "average", "group", "priority", "partition_nbytes"):
            before, now = getattr(known, field), getattr(spec, field)
            if before != now and not (field == "priority" and now is None):
                raise MismatchError(f"{field} of tensor {spec.name!r} differs: it was {before!r} when rank {self.rank} "
                                    f"first used the name, now {now!r}; use one name for one kind of tensor")
        return False

    def unnamed(self, prefix: str) -> str:
        """Return the next automatic name that begins with *prefix*: prefix.0, prefix.1, ... on this rank."""
        with self._lock:
            number = self._unnamed.get(prefix, 0)
            self._unnamed[prefix] = number + 1
        return f"{prefix}.{number}"

    def unit(self, name: str, timeout_s: float | None = None) -> Unit:
        """Return the unit that tensor *name* is part of, waiting until all ranks have declared it.

        Raises
        ------
        StallError
            If it was not committed in time: some rank has not declared the name.
        MismatchError
            Or whatever the job refused the declaration with.
        """
        self.require_open()
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        found = self._units.get(name)
        if found is not None and name not in self._deferred:
            return found
        answer = self._await(lambda: self._units.get(name) or self._failed.get(name), timeout_s,
                             f"for tensor {name!r} to be declared by all {self.size} ranks", name)
        if isinstance(answer, Unit):
            return answer
        raise answer

    def unit_nowait(self, name: str) -> Unit | None:
        """Return the unit that tensor *name* is part of, or None if it is not committed yet."""
        self.require_open()
        if name not in self._units or name in self._deferred:
            try:
                self._mailbox.pump()
            except BpsError as exc:
                raise self._failed.get(name, exc) from None  # why the name failed may be why the job ended
            self._start_deferred()
        failed = self._failed.get(name)
        if failed is not None:
            raise failed
        return self._units.get(name)

    def defer(self, name: str, start: Callable[[], None]) -> None:
        """Call *start* in whichever thread first sees that *name* is committed. *start* raises nothing."""
        with self._lock:
            if name in self._deferred:
                raise BusyError(f"{name!r} is pushed again, but its first push was not waited for: synchronize the "
                                "handle first, or use another name")
            self._deferred[name] = start
        self._start_deferred()

    def _look_for_deferred(self) -> bool:
        """Start deferred pushes whose commit has arrived; return whether some are left."""
        if self._deferred:
            self.require_open()  # before any lock: a forked child may have inherited it locked
            self._mailbox.pump()
            self._start_deferred()
        return bool(self._deferred)

    def _start_deferred(self) -> None:
        while self._deferred:
            with self._lock:
                known = self._startable()
                start = self._deferred.pop(known) if known is not None else None
            if start is None:
                return
            start()

    def _startable(self) -> str | None:
        """Return a name whose deferred push can go out."""
        with self._lock:
            return next((name for name in self._deferred if name in self._units or name in self._failed), None)

    def _await(self, ready: Callable[[], T | None], timeout_s: float, what: str, name: str) -> T:
        """Wait as the mailbox does for *what* other ranks do: they may wait for one of our deferred pushes before.

        Raises
        ------
        StallError
            If it did not come in time, or cannot come any more; the job is asked about *name*.
        """
        begin = time.monotonic()
        deadline, doubt = begin + timeout_s, begin + _DOUBT_S
        while True:
            self._mailbox.wait(lambda: ready() or self._startable(), max(0.0, min(doubt, deadline) - time.monotonic()))
            self._start_deferred()
            found = ready()
            if found is not None:
                return found
            now = time.monotonic()
            late = now >= deadline
            if late or (now >= doubt and self._departed):
                missing, hopeless = self._ask_missing(-1, self._question(), name)
                if late or hopeless:
                    raise StallError(f"rank {self.rank} waited {timeout_s if late else now - begin:.3g} s {what}: "
                                     f"{missing}")
            doubt = max(doubt, now + _DOUBT_S)

    @property
    def broadcaster(self) -> Broadcaster:
        """The session's broadcast channel."""
        from .broadcaster import Broadcaster

        with self._lock:
            if self._broadcaster is None:
                self._broadcaster = Broadcaster(self)
            return self._broadcaster

    # -- memory ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Region:
        """Return *nbytes* of zeroed, page-aligned input memory. It stays this rank's until the session ends.

        Raises
        ------
        CapacityError
            If the machine cannot hold it.
        """
        self.require_open()
        with self._lock:
            self._requests += 1
            request = self._requests
            self._asked.append(request)
            self._mailbox.send(Allocate(request=request, nbytes=nbytes))
        answer = self._mailbox.wait(lambda: self._allocated.pop(request, None), self.settings.timeout_s)
        if answer is None:
            raise StallError(f"the node did not answer a request for {nbytes} bytes within "
                             f"{self.settings.timeout_s:g} s")
        if isinstance(answer, BpsError):
            raise answer
        segment = self._segments["rank", answer.segment]
        array = np.frombuffer(segment, np.uint8, nbytes, answer.offset)  # type: ignore[call-overload]
        return Region(array, answer.segment, answer.offset, segment.address + answer.offset)

    def locate(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return (segment, offset) if these bytes lie in one of this rank's input segments."""
        for number, segment in self._inputs:
            if segment.address <= address and address + nbytes <= segment.address + segment.nbytes:
                return number, address - segment.address
        return None

    def _question(self) -> int:
        """Return a number that tells this question apart from others about no partition."""
        with self._lock:
            self._requests += 1
            return self._requests

    def _ask_missing(self, part: int, round: int, name: str) -> tuple[str, bool]:
        """Ask the job who has not arrived for *round* of *part*; part -1: for the declaration or barrier *name*.

        Returns words, and whether waiting on is in vain.
        """
        self._mailbox.send(Stalled(rank=self.rank, part=part, round=round, name=name))
        answer = self._mailbox.wait(lambda: self._stall_answers.pop((part, round), None), STALL_ANSWER_S)
        if answer is None:
            return f"no answer to who is missing, from node or scheduler, within {STALL_ANSWER_S:g} s", False
        return answer.missing, answer.hopeless

    def _somebody_left(self) -> bool:
        """Return whether a rank has left, as far as the node's messages say."""
        if not self._departed:
            self.require_open()  # before any lock: a forked child may have inherited it locked
            self._mailbox.pump()
        return self._departed

    # -- the job ---------------------------------------------------------------------------------------------------

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have called this as often as this rank.

        Raises
        ------
        StallError
            If they have not in time.
        """
        self.require_open()
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        with self._lock:
            self._barriers_entered += 1
            sequence = self._barriers_entered
        self._mailbox.send(BarrierEnter(rank=self.rank, sequence=sequence))
        self._await(lambda: True if self._barriers_done >= sequence else None, timeout_s, f"in barrier {sequence}",
                    f"barrier:{sequence}")

    def counters(self) -> dict[str, int]:
        """Return the counters of this machine's node."""
        self.require_open()
        with self._lock:
            self._requests += 1
            request = self._requests
        self._mailbox.send(Ask(request=request))
        told = self._mailbox.wait(lambda: self._told.pop(request, None), self.settings.timeout_s)
        if told is None:
            raise StallError(f"the node did not tell its counters within {self.settings.timeout_s:g} s")
        return told

    def _receive(self, message: Message, fds: tuple[int, ...]) -> None:
        """Enter one message of the node into the tables. Called by the mailbox, one message at a time."""
        match message:
            case SegmentShared():
                segment = Segment.attach(fds[0], writable=message.owner == "rank")
                self._segments[message.owner, message.segment] = segment
                if message.owner == "rank":
                    self._inputs = [*self._inputs, (message.segment, segment)]
            case Allocated():
                self._asked.remove(message.request)
                self._allocated[message.request] = message
            case Declared():
                for ready in message.units:
                    unit = Unit(self, ready, self._segments)
                    for name in unit.members:
                        self._units[name] = unit
            case DeclareFailed():
                for name in message.names:
                    self._failed[name] = error_of(message.error, message.reason)
            case Refuse():
                self._allocated[self._asked.pop(0)] = error_of(message.error, message.reason)
            case StallAnswer():
                self._stall_answers[message.part, message.round] = message
            case Departed():
                self._departed = True
            case BarrierDone():
                self._barriers_done = max(self._barriers_done, message.sequence)
            case Told():
                self._told[message.request] = message.counters
            case Detached():
                self._released = True

    def _node_lost(self) -> PeerLostError:
        """Return in words that the node has ended without having said why."""
        poll = select.poll()
        poll.register(self._attachment.node_pidfd, select.POLLIN)
        ended = bool(poll.poll(_DYING_S * 1000))
        how = self._failure() or ("its process has ended" if ended else "it has closed its channel, and still runs")
        return PeerLostError(
            f"{self._node_name} is lost: {how}. Rank {self.rank} cannot go on without it. A node that ends on its own, "
            "or by SIGTERM, says why; one that does not was killed (SIGKILL: by somebody, or by the kernel for want of "
            "memory, see dmesg) or has crashed: see its output, and its launcher's, for the signal")

    # -- the end ---------------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        if self.pid != os.getpid():
            raise ClosedError(f"this process ({os.getpid()}) is a fork of rank {self.rank} (pid {self.pid}): a session "
                              "is not inherited; call bpsfast in the process that called init()")
        if self.closed:
            raise ClosedError("bpsfast was shut down in this process: call bpsfast.init() before using it again")

    def close(self, clean: bool = True, reason: str = "", timeout_s: float = _GOODBYE_S) -> None:
        """Leave the job and wait up to *timeout_s* for its end. Idempotent; never raises for lost peers.

        *clean* False tells the others to stop, with *reason*. Arrays that lie in the segments stay usable.
        """
        if self.closed or self.pid != os.getpid():
            return
        with contextlib.suppress(BpsError):  # the node may be gone or the job aborted: leaving needs nobody's consent
            self._mailbox.send(Detach(clean=clean, reason=reason))
            self._mailbox.wait(lambda: True if self._released else None, timeout_s if clean else min(timeout_s, 1.0))
        self.closed = True
        self._write_trace()
        for unit in set(self._units.values()):
            unit.forget()
        self._units.clear()
        self.repeats.clear()
        self._deferred.clear()
        self._inputs = []
        segments, self._segments = list(self._segments.values()), {}
        if not self.port.close(_GOODBYE_S):
            return  # a thread is still inside: better to keep the mappings than to pull them from under it
        self._attachment.close()
        for segment in segments:
            with contextlib.suppress(BufferError):  # the user still holds arrays: the last of them unmaps it
                segment.close()

    def _write_trace(self) -> None:
        if self.settings.trace_dir:
            from .. import trace

            names = {unit.first_part + i: unit.name for unit in set(self._units.values()) for i in range(unit.n_parts)}
            trace.write(self.settings.trace_dir, f"rank {self.rank}", self.port.trace(), names)
