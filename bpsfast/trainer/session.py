"""A rank's session with its node: everything a rank owns, from `init` to `shutdown`.

A session knows the segments that were shared; `Tensors` knows the names and units. Waits on rounds are native
(`GuardedPort`); the socket is read only by a call that needs a reply, and beside a wait while pushes are deferred.
`current` holds the one session of a process.
"""
from __future__ import annotations

import contextlib
import mmap
import os
import select
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..holes import Holes
from ..orchestration import notices
from ..orchestration.errors import (
    BpsError,
    BusyError,
    CapacityError,
    ClosedError,
    PeerLostError,
    ProtocolError,
    StallError,
)
from ..orchestration.messages import (
    Allocate,
    Allocated,
    Ask,
    BarrierDone,
    BarrierEnter,
    Credit,
    Declared,
    DeclareFailed,
    Departed,
    Detach,
    Detached,
    Found,
    LagAnswer,
    LagQuestion,
    Lookup,
    Message,
    Publish,
    Refuse,
    Retire,
    SegmentShared,
    StallAnswer,
    Told,
    UnitReady,
    Withdraw,
)
from ..pyx.pages import Segment
from ..pyx.port import Port
from ..settings import Settings
from ..trace.records import RECORD, limits
from .attachment import Attachment, error_of
from .guarded_port import GuardedPort
from .inquiry import Inquiry
from .mailbox import Mailbox
from .stall_inspector import StallInspector
from .step_clock import StepClock
from .tensors import Tensors
from .unit import Region, Unit

if TYPE_CHECKING:
    from ..post import Post
    from .broadcaster import Broadcaster
    from .repeat import Repeat

#: How long `close` waits for the node's goodbye, and for other threads to come out of the port.
_GOODBYE_S = 5.0
#: How much longer than the scheduler a rank waits for its word on a notice.
_FINDING_S = 5.0
_GIVEN_UP = Found(rank=-1, question=0, error="ClosedError", reason="nobody waits for the notice any more")
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
        self.machines = attached.machines
        self.tunes = False  # whether the gradients of some model are tuned: those that come first
        self.settings = settings
        self.place = attachment.place
        self.pid = os.getpid()
        self.closed = False
        port = Port(attachment.lane, attachment.board, attachment.doorbell, attachment.node_pidfd,
                    awake_us=settings.awake_us, **limits(settings)._asdict())
        self._node_name = f"node {self.node} (pid {attached.node_pid} on this machine)"
        self._failure = failure
        self._attachment = attachment
        self.inquiry = Inquiry(self.rank, self.require_open, lambda: self._mailbox)
        self.inspector = StallInspector(f"rank {self.rank}", settings.stall_warn_s, port.count_stall)
        self._retired_nbytes = 0  # pushed by units that are retired
        self.clock = StepClock(
            port, lambda: self._retired_nbytes + sum(unit.round * unit.nbytes for unit in self.tensors.units()))
        self.tensors = Tensors(self.rank, self.size, settings.timeout_s, self.require_open, lambda: self._mailbox,
                               self.inquiry, self.inspector)
        self.port = GuardedPort(port, f"rank {self.rank}", self._node_name, self.require_open, self.inquiry,
                                self.inspector, self.tensors.look_for_commits, self._node_lost)
        self._lock = threading.RLock()
        self._segments: dict[tuple[str, int], Segment] = {}
        self._inputs: list[tuple[int, Segment]] = []
        self._free: dict[int, Holes] = {}  # by input segment: what was released
        self.repeats: dict[str, Repeat] = {}
        self.n_stores = 0  # made for torch (`torch.backend.launched`)
        self.n_groups: Counter[tuple[int, ...]] = Counter()  # made of the same ranks in the same order (`collective`)
        self.n_users: Counter[str] = Counter()  # name on the wire -> how many `Gradients` push it
        self._asked: list[int] = []  # requests for memory that have no answer yet: they are answered in order
        self._allocated: dict[int, Allocated | BpsError] = {}
        self._unmapped: CapacityError | None = None
        self._not_mapped: dict[tuple[str, int], tuple[SegmentShared, int]] = {}  # with their descriptors
        self._told: dict[int, Message] = {}
        self._requests = 0
        self._barriers_entered = 0
        self._barriers_done = 0
        self.order: dict[str, int] = {}  # of names: the place at which `bpsfast.torch.declare` was told of them
        self._released = False
        self._broadcaster: Broadcaster | None = None
        self._post: Post | None = None
        self._post_lock = threading.Lock()
        self._mailbox = Mailbox(attachment.channel, attachment.node_pidfd, self._receive, self.port.check,
                                self._node_lost)

    # -- memory ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Region:
        """Return *nbytes* of page-aligned input memory, zeros unless some of it was released before.

        It stays this rank's until the session ends, or until it is released.

        Raises
        ------
        CapacityError
            If the machine cannot hold it.
        """
        self.require_open()
        with self._lock:
            for number, holes in self._free.items():
                offset = holes.take(_rounded(nbytes))
                if offset is not None:
                    return self._region(number, offset, nbytes)
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
        segment = self._segments.get(("rank", answer.segment))
        if segment is None:
            raise self._unmapped or ProtocolError(f"the node answered with segment {answer.segment}, which it has not "
                                                  "shared")
        return self._region(answer.segment, answer.offset, nbytes)

    def _region(self, number: int, offset: int, nbytes: int) -> Region:
        segment = self._segments["rank", number]
        array = np.frombuffer(segment, np.uint8, nbytes, offset)  # type: ignore[call-overload]
        return Region(array, number, offset, segment.address + offset)

    def release(self, region: Region) -> None:
        """Take back what `allocate` returned: nobody writes there any more, and all rounds pushed from it are over."""
        with self._lock:
            self._free.setdefault(region.segment, Holes()).give(region.offset, _rounded(region.array.nbytes))

    def locate(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return (segment, offset) if these bytes lie in one of this rank's input segments."""
        for number, segment in self._inputs:
            if segment.address <= address and address + nbytes <= segment.address + segment.nbytes:
                return number, address - segment.address
        return None

    # -- the job ---------------------------------------------------------------------------------------------------

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have called this as often as this rank.

        Raises
        ------
        StallError
            If they have not in time.
        """
        self.require_open()
        with self._lock:
            self._barriers_entered += 1
            sequence = self._barriers_entered
        self._mailbox.send(BarrierEnter(rank=self.rank, sequence=sequence))
        self.tensors.wait(lambda: True if self._barriers_done >= sequence else None, timeout_s,
                          f"in barrier {sequence}", f"barrier:{sequence}")

    @property
    def broadcaster(self) -> Broadcaster:
        """The session's broadcast channel."""
        from .broadcaster import Broadcaster

        with self._lock:
            if self._broadcaster is None:
                self._broadcaster = Broadcaster(self)
            return self._broadcaster

    @property
    def post(self) -> Post:
        """Messages from rank to rank. Others are reached once they have asked for theirs, too."""
        from ..post import Post

        self.require_open()
        with self._post_lock:  # not the other lock: a post waits for the node
            if self._post is None:
                self._post = Post(self)
            return self._post

    def retire(self, units: Sequence[Unit]) -> None:
        """Give up *units* for good: what they use is others' as soon as all ranks have given them up.

        All their rounds are complete, and nobody reads their results any more. Their input memory is the caller's to
        release. Their names may be declared again.
        """
        self.require_open()
        if any(unit.in_flight for unit in units):
            raise BusyError("a tensor is retired whose last round was not waited for")
        self.tensors.retire([name for unit in units for name in unit.members])
        for unit in units:
            self._retired_nbytes += unit.round * unit.nbytes
            for name in unit.members:
                self.repeats.pop(name, None)
            unit.forget()
        self._mailbox.send(Retire(rank=self.rank, units=tuple(unit.number for unit in units)))

    def set_credit(self, nbytes: int) -> None:
        """Let every node of the job have *nbytes* under way to one peer; 0: what its own setting says. Not waited for.
        """
        self.require_open()
        self._mailbox.send(Credit(rank=self.rank, nbytes=nbytes))

    def ask_node(self) -> Told:
        """Return what this machine's node has counted."""
        told = self._ask(lambda request: Ask(request=request), "the node did not tell its counters")
        assert isinstance(told, Told)
        return told

    def ask_lags(self) -> LagAnswer:
        """Return how late the ranks of the whole job were: nodes that do not answer in a second or two are named."""
        answer = self._ask(lambda request: LagQuestion(rank=self.rank, question=request),
                           "node or scheduler did not tell who is late")
        assert isinstance(answer, LagAnswer)
        return answer

    def publish(self, key: str, value: bytes) -> None:
        """Leave a notice for all ranks to find, instead of one of the same *key* that this rank has left before.

        Once this returns, every `lookup` finds it. It stays until it is withdrawn, also after this rank has left.

        Raises
        ------
        ConfigError, CapacityError
            If the key is empty or too long; if the value, or all that this rank has published, is too much.
        MismatchError
            If another rank has published under this key.
        """
        notices.check(key, value)
        self._find(lambda question: Publish(rank=self.rank, question=question, key=key, value=value),
                   f"did not take notice {key!r}", 0.0)

    def withdraw(self, prefix: str) -> None:
        """Take back this rank's notices whose keys begin with *prefix*. Not waited for."""
        self.require_open()
        self._mailbox.send(Withdraw(rank=self.rank, prefix=prefix))

    def lookup(self, key: str, timeout_s: float, who: str, given_up: Callable[[], bool] = lambda: False) -> bytes:
        """Return the value of notice *key*, as soon as somebody has published it.

        Parameters
        ----------
        who
            Whose notice it is, for errors. Called "rank 3", it is not waited for once that rank has left the job.
        given_up
            Asked now and then whether this still matters to anybody.

        Raises
        ------
        StallError
            If it was not published within *timeout_s* seconds, or *who* has left without it.
        ClosedError
            If it was *given_up*.
        """
        notices.check(key)
        found = self._find(lambda question: Lookup(rank=self.rank, question=question, key=key, timeout_s=timeout_s,
                                                   who=who), f"did not say whether {who} published {key!r}", timeout_s,
                           given_up)
        return found.value

    def _find(self, question: Callable[[int], Message], trouble: str, timeout_s: float,
              given_up: Callable[[], bool] = lambda: False) -> Found:
        found = self._ask(question, f"node or scheduler {trouble}", timeout_s + _FINDING_S, given_up)
        assert isinstance(found, Found)
        if found.error:
            raise error_of(found.error, found.reason)
        return found

    def _ask(self, question: Callable[[int], Message], trouble: str, timeout_s: float = 0.0,
             given_up: Callable[[], bool] = lambda: False) -> Message:
        """Return the answer to a question; *timeout_s* 0: the setting."""
        timeout_s = timeout_s or self.settings.timeout_s
        self.require_open()
        with self._lock:
            self._requests += 1
            request = self._requests
        self._mailbox.send(question(request))
        told = self._mailbox.wait(lambda: self._told.pop(request, None) or (_GIVEN_UP if given_up() else None),
                                  timeout_s)
        if told is None:
            raise StallError(f"{trouble} within {timeout_s:g} s")
        return told

    def _receive(self, message: Message, fds: tuple[int, ...]) -> None:
        """Enter one message of the node into the tables. Called by the mailbox, one message at a time."""
        match message:
            case SegmentShared():
                self._map(message, fds[0])
            case Allocated():
                self._asked.remove(message.request)
                self._allocated[message.request] = message
            case Declared():
                self._commit(message.units)
            case DeclareFailed():
                self.tensors.refused(message.names, error_of(message.error, message.reason))
            case Refuse():
                self._allocated[self._asked.pop(0)] = error_of(message.error, message.reason)
            case StallAnswer() | Departed():
                self.inquiry.receive(message)
            case BarrierDone():
                self._barriers_done = max(self._barriers_done, message.sequence)
            case Told():
                self._told[message.request] = message
            case LagAnswer() | Found():
                self._told[message.question] = message
            case Detached():
                self._released = True

    def _map(self, message: SegmentShared, fd: int) -> None:
        """Map a segment; if that fails, whoever needs it gets the error, which may be another thread than this."""
        try:
            segment = Segment.attach(fd, writable=message.owner == "rank")
        except OSError as exc:
            if message.owner == "rank":  # who has asked for it is told
                os.close(fd)
            else:
                self._not_mapped[message.owner, message.segment] = message, fd
            self._unmapped = CapacityError(f"rank {self.rank} cannot map a segment of {message.nbytes} bytes that its "
                                           f"node shares with it: {exc}; raise the limit of its address space "
                                           "(ulimit -v), or push less")
            return
        self._segments[message.owner, message.segment] = segment
        if message.owner == "rank":
            self._inputs = [*self._inputs, (message.segment, segment)]

    def _commit(self, units: Sequence[UnitReady]) -> None:
        """Enter units as tensors of this rank; those of an edition that cannot be mapped are given up at once.

        Others have retired an edition that one rank cannot have, and nodes wait for this rank, too. Other tensors are
        not given up: their memory would be the next ones', which this rank could not map either.
        """
        given_up = []
        for ready in units:
            try:
                try:
                    unit = Unit(self, ready, self._segments)
                except ProtocolError:
                    self._map_again()
                    unit = Unit(self, ready, self._segments)
            except ProtocolError as exc:
                names = [member.name for member in ready.plan.members]
                if self.tensors.are_edition(names):
                    given_up.append(ready.plan.unit)
                self.tensors.refused(names, self._unmapped or exc)
            else:
                self.tensors.committed(unit)
        if given_up:
            self._mailbox.send(Retire(rank=self.rank, units=tuple(given_up)))

    def _map_again(self) -> None:
        """Try what could not be mapped before: there may be room now."""
        again, self._not_mapped, self._unmapped = self._not_mapped, {}, None
        for message, fd in again.values():
            self._map(message, fd)

    def _node_lost(self) -> BpsError:
        """Return in words that the node has ended without having said why, or let this rank go."""
        if self._released:
            return ClosedError("bpsfast was shut down in this process while this call waited")
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
        if self._post is not None:
            self._post.close()
        with contextlib.suppress(BpsError):  # the node may be gone or the job aborted: leaving needs nobody's consent
            self._mailbox.send(Detach(clean=clean, reason=reason))
            self._mailbox.wait(lambda: True if self._released else None, timeout_s if clean else min(timeout_s, 1.0))
        self.closed = True
        self._write_trace()
        self.tensors.forget()
        self.repeats.clear()
        self._inputs = []
        self._free.clear()
        segments, self._segments = list(self._segments.values()), {}
        for _, fd in self._not_mapped.values():
            os.close(fd)
        self._not_mapped.clear()
        if not self.port.close(_GOODBYE_S):
            return  # a thread is still inside: better to keep the mappings than to pull them from under it
        self._attachment.close()
        for segment in segments:
            with contextlib.suppress(BufferError):  # the user still holds arrays: the last of them unmaps it
                segment.close()

    def _write_trace(self) -> None:
        if self.settings.trace_dir:
            from .. import trace

            records = self.port.trace()
            parts = {number: part for unit in self.tensors.units() for number, part in unit.titles().items()}
            trace.write(self.settings.trace_dir, f"rank {self.rank}", records, parts, trace.Origin(
                node=self.node, rank=self.rank, full=len(records) >= self.settings.trace_capacity * RECORD.size))


def _rounded(nbytes: int) -> int:
    """Return *nbytes* as whole pages, which is what the node gives."""
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
