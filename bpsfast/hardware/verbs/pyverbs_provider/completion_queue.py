"""RDMA completion queues over pyverbs, and the record of posted work; methods are those of `bpsfast.pyx.verbs`."""
from __future__ import annotations

import errno
import os
from collections import deque
from typing import Any, NamedTuple

from . import verbs_object
from .device import Device, readable
from .verbs_object import VerbsResource, errors_as, module, reason

_WITH_IMMEDIATE = 2

Completion = tuple[int, int, int, int, int | None, int]


class CompletionQueue(VerbsResource):
    """A completion queue; with *events*, `wait` can sleep. A post that could overrun it is refused."""

    _verb = "ibv_destroy_cq"
    _kinds_of_children = "queue pairs"

    def __init__(self, device: Device, depth: int, *, events: bool = False, vector: int = 0) -> None:
        context = device._open()
        if depth < 1:
            raise ValueError(f"a completion queue needs depth >= 1, got {depth}")
        with errors_as(lambda rc: f"ibv_create_cq({device.name}, depth={depth}, events={events}, vector={vector}): "
                                  f"{reason(rc)}; the device takes max_cqe={device.attributes['max_cqe']} in a queue "
                                  f"and max_cq={device.attributes['max_cq']} queues, and has "
                                  f"{device.completion_vectors} completion vectors, numbered from 0"):
            self._channel = module("cq").CompChannel(context) if events else None
            try:
                raw = module("cq").CQ(context, depth, None, self._channel, vector)
            except BaseException:
                if self._channel is not None:
                    self._channel.close()
                raise
        self.device, self._name = device, f"completion queue of {device.name}"
        self._capacity = QueueCapacity(raw.cqe)
        self._posted: dict[int, PostedWork] = {}  # by the queue pair's number
        self._ready: deque[Completion] = deque()
        self._users, self._fd, self._channel_address = 0, -1, 0
        if self._channel is not None:
            self._channel_address, self._fd = verbs_object.channel_pointer(self._channel, device.handle)
            os.set_blocking(self._fd, False)
        self._own(raw, device)

    @property
    def handle(self) -> int:
        return verbs_object.object_pointer(self._open(), self.device.handle)

    @property
    def depth(self) -> int:
        return self._capacity.depth

    @property
    def pending(self) -> int:
        return self._capacity.pending

    def resize(self, depth: int) -> None:
        raw = self._open()
        if depth < 1:
            raise ValueError(f"a completion queue needs depth >= 1, got {depth}")
        with self.device.lock, errors_as(
                lambda rc: f"ibv_resize_cq({self.device.name}, depth={depth}): {reason(rc)}; it has {self.depth}, the "
                           f"device takes max_cqe={self.device.attributes['max_cqe']} in a queue"):
            raw.resize(depth)
            self._capacity.depth = raw.cqe

    def poll(self, n: int = 32) -> list[Completion]:
        self._open()
        if n < 1:
            raise ValueError(f"poll needs n >= 1, got {n}")
        found = [self._ready.popleft() for _ in range(min(n, len(self._ready)))]
        if len(found) < n:
            found += self._take(n - len(found))
        return found

    def _take(self, n: int) -> list[Completion]:
        raw = self._open()
        with self.device.lock:
            with errors_as(lambda rc: f"ibv_poll_cq({self.device.name}): the queue is broken ({reason(rc)}): it "
                                      "overran, or the device is gone"):
                _, batch = raw.poll(n)
            return [self._account(wc) for wc in batch]

    def _account(self, wc: Any) -> Completion:
        posted = self._posted.get(wc.qp_num)
        opcode, nbytes = posted.complete(wc) if posted is not None else (wc.opcode, wc.byte_len)
        # rxe sets the flag for a send with immediate as well
        has_immediate = wc.status == 0 and opcode & RECV and wc.wc_flags & _WITH_IMMEDIATE
        immediate = int.from_bytes(wc.imm_data.to_bytes(4, "little"), "big") if has_immediate else None
        return (wc.wr_id, wc.status, opcode, nbytes, immediate, wc.qp_num)

    def wait(self, timeout_s: float | None = None) -> bool:
        raw = self._open()
        if self._channel is None:
            raise ValueError("wait needs a CompletionQueue(..., events=True)")
        if self._ready:
            return True
        with errors_as(lambda rc: f"ibv_req_notify_cq({self.device.name}): {reason(rc)}"):
            raw.req_notify()
        # completions from before the queue was armed give no event
        self._ready.extend(found := self._take(32))
        if found:
            return True
        self._users += 1
        try:
            if not readable(self._fd, timeout_s):
                return False
        finally:
            self._users -= 1
        with errors_as(lambda rc: f"ibv_get_cq_event({self.device.name}): {reason(rc)}"):
            self._channel.get_cq_event(raw)
        raw.ack_events(1)
        return True

    def _forget(self, number: int) -> None:
        """Poll all completions and drop those of the queue pair *number*."""
        found = [*self._ready, *self._take(self.depth)]
        self._ready = deque(completion for completion in found if completion[5] != number)

    def _busy(self) -> str:
        return super()._busy() or ("is in use: another thread is in wait or poll" if self._users else "")

    def _abandon(self) -> None:
        super()._abandon()
        if self._channel is not None:
            # libibverbs still counts the queue as a user of the channel and would refuse to destroy the channel
            verbs_object.clear_pointer(self._channel, self._channel_address)
            os.close(self._fd)
            self._channel = None

    def _released(self) -> None:
        if self._channel is not None and self._is_ours:
            with errors_as(lambda rc: f"ibv_destroy_comp_channel({self.device.name}): {reason(rc)}"):
                self._channel.close()
        self._channel = None

    def _leak_in_child(self) -> None:
        super()._leak_in_child()
        self._add_reference(self._channel)


RECV = 128
_SUCCESS, _FLUSHED = 0, 5
#: posted operation (IBV_WR_*, or RECV) -> its opcode in the completion (IBV_WC_*)
_COMPLETES_AS = {0: 1, 1: 1, 2: 0, 3: 0, 4: 2, RECV: RECV}


class Work(NamedTuple):
    """One posted operation."""

    opcode: int
    wr_id: int
    address: int
    nbytes: int
    lkey: int
    remote_address: int = 0
    rkey: int = 0


class QueueCapacity:
    """The places of one completion queue; each post takes one until it completes."""

    def __init__(self, depth: int) -> None:
        self.depth, self.pending = depth, 0


class WorkQueue:
    """One direction of a queue pair: up to *capacity* posts, oldest first."""

    def __init__(self, capacity: int, places: QueueCapacity) -> None:
        self.capacity, self.places = capacity, places
        self.items: deque[Work] = deque()

    def reserve(self, work: Work) -> int:
        """Record a post; return 0, EXFULL (the queue is full) or EOVERFLOW (the completion queue is full)."""
        if len(self.items) == self.capacity:
            return errno.EXFULL
        if self.places.pending == self.places.depth:
            return errno.EOVERFLOW
        self.items.append(work)
        self.places.pending += 1
        return 0

    def cancel(self) -> None:
        """Remove the newest post, which the device refused."""
        self.items.pop()
        self.places.pending -= 1

    def find(self, wr_id: int) -> int | None:
        """Return the number of posts before the oldest one with *wr_id*, None if there is none."""
        return next((i for i, work in enumerate(self.items) if work.wr_id == wr_id), None)

    def retire(self, n: int) -> Work:
        """Remove the *n* oldest posts; return the last of them."""
        self.places.pending -= n
        for _ in range(n - 1):
            self.items.popleft()
        return self.items.popleft()


class PostedWork:
    """The posted work of both directions of a queue pair, and its first bad completion."""

    def __init__(self, send: WorkQueue, recv: WorkQueue) -> None:
        self.send, self.recv = send, recv
        self.failed: tuple[int, int, Work] | None = None  # status, vendor error, the operation

    def complete(self, wc: Any) -> tuple[int, int]:
        """Retire the completed work; return opcode and nbytes, which a bad completion does not have."""
        says_recv = bool(wc.opcode & RECV)
        if wc.status == _SUCCESS:
            queue = self.recv if says_recv else self.send
            before = queue.find(wc.wr_id)
        else:  # a bad completion does not say which queue it is of
            sends, receives = self.send.find(wc.wr_id), self.recv.find(wc.wr_id)
            is_recv = receives is not None and (
                sends is None or receives < sends or (receives == sends and says_recv))
            queue, before = (self.recv, receives) if is_recv else (self.send, sends)
        if before is None:
            return wc.opcode, wc.byte_len
        work = queue.retire(before + 1)
        if wc.status == _SUCCESS:
            return wc.opcode, wc.byte_len if says_recv else work.nbytes
        if self.failed is None or (self.failed[0] == _FLUSHED and wc.status != _FLUSHED):
            self.failed = (wc.status, wc.vendor_err, work)
        return _COMPLETES_AS[work.opcode], 0

    def forget(self) -> bool:
        """Retire everything; return whether there was any work."""
        found = [queue for queue in (self.send, self.recv) if queue.items]
        for queue in found:
            queue.retire(len(queue.items))
        return bool(found)
