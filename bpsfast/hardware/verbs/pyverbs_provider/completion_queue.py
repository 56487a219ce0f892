"""CompletionQueue."""
from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

from . import pointers
from .device import Device, readable
from .library import module, told, words
from .posted_work import RECV, QueueCapacity
from .resource import VerbsResource

if TYPE_CHECKING:
    from .queue_pair import QueuePair

_WITH_IMMEDIATE = 2

Completion = tuple[int, int, int, int, int | None, int]


class CompletionQueue(VerbsResource):
    """What of the posted work is done; with *events*, `wait` can sleep. A post that could overrun it is refused."""

    _verb = "ibv_destroy_cq"

    def __init__(self, device: Device, depth: int, *, events: bool = False) -> None:
        context = device._open()
        if depth < 1:
            raise ValueError(f"a completion queue needs depth >= 1, got {depth}")
        with words(lambda rc: f"ibv_create_cq({device.name}, depth={depth}, events={events}): {told(rc)}; the device "
                              f"takes max_cqe={device.attributes['max_cqe']} in a queue and "
                              f"max_cq={device.attributes['max_cq']} queues"):
            self._channel = module("cq").CompChannel(context) if events else None
            try:
                raw = module("cq").CQ(context, depth, None, self._channel, 0)
            except BaseException:
                if self._channel is not None:
                    self._channel.close()
                raise
        self.device, self._name = device, f"completion queue of {device.name}"
        self._capacity = QueueCapacity(raw.cqe)
        self._pairs: dict[int, QueuePair] = {}
        self._ready: deque[Completion] = deque()
        self._users, self._fd, self._channel_address = 0, -1, 0
        if self._channel is not None:
            self._channel_address, self._fd = pointers.channel(self._channel, device.handle)
            os.set_blocking(self._fd, False)
        self._own(raw, device)

    @property
    def handle(self) -> int:
        """Address of the ``ibv_cq``. Native code that polls it leaves `poll`, `wait` and `pending` alone."""
        return pointers.completion_queue(self._open(), self.device.handle)

    @property
    def depth(self) -> int:
        """How many completions there is room for."""
        return self._capacity.depth

    @property
    def pending(self) -> int:
        """How many of the places are taken, by posted work or by completions that were not polled."""
        return self._capacity.pending

    def poll(self, n: int = 32) -> list[Completion]:
        """Return up to *n* completions as (wr_id, status, opcode, nbytes, immediate or None, queue pair's number)."""
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
            with words(lambda rc: f"ibv_poll_cq({self.device.name}): the queue is broken ({told(rc)}): it overran, or "
                                  "the device is gone"):
                _, batch = raw.poll(n)
            return [self._account(wc) for wc in batch]

    def _account(self, wc: Any) -> Completion:
        pair = self._pairs.get(wc.qp_num)
        opcode, nbytes = pair.account.complete(wc) if pair is not None else (wc.opcode, wc.byte_len)
        # rxe says of a send with immediate, too, that it brought one
        has_immediate = wc.status == 0 and opcode & RECV and wc.wc_flags & _WITH_IMMEDIATE
        immediate = int.from_bytes(wc.imm_data.to_bytes(4, "little"), "big") if has_immediate else None
        return (wc.wr_id, wc.status, opcode, nbytes, immediate, wc.qp_num)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until `poll` may find something, at most *timeout_s* seconds (None: for ever); whether it may."""
        raw = self._open()
        if self._channel is None:
            raise ValueError("wait needs a CompletionQueue(..., events=True)")
        if self._ready:
            return True
        with words(lambda rc: f"ibv_req_notify_cq({self.device.name}): {told(rc)}"):
            raw.req_notify()
        # what came before the queue was armed rings no more
        self._ready.extend(found := self._take(32))
        if found:
            return True
        self._users += 1
        try:
            if not readable(self._fd, timeout_s):
                return False
        finally:
            self._users -= 1
        with words(lambda rc: f"ibv_get_cq_event({self.device.name}): {told(rc)}"):
            self._channel.get_cq_event(raw)
        raw.ack_events(1)
        return True

    def _forget(self, number: int) -> None:
        """Take all there is and drop what is of a queue pair that is gone."""
        found = [*self._ready, *self._take(self.depth)]
        self._ready = deque(completion for completion in found if completion[5] != number)

    def _busy(self) -> str:
        if self.children:
            return f"has {self.children} open queue pairs"
        return "is in use: another thread is in wait or poll" if self._users else ""

    def _abandon(self) -> None:
        super()._abandon()
        if self._channel is not None:
            # libibverbs still counts the queue as the channel's, and would refuse to destroy that
            pointers.forget(self._channel, self._channel_address)
            os.close(self._fd)
            self._channel = None

    def _released(self) -> None:
        if self._channel is not None and self._is_ours:
            with words(lambda rc: f"ibv_destroy_comp_channel({self.device.name}): {told(rc)}"):
                self._channel.close()
        self._channel = None

    def _leak_in_child(self) -> None:
        super()._leak_in_child()
        self._add_reference(self._channel)
