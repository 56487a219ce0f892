"""What was posted to a queue pair and has not completed: `pyx/work.h` in Python, with the same rules."""
from __future__ import annotations

import errno
from collections import deque
from typing import Any, NamedTuple

RECV = 128
_SUCCESS, _FLUSHED = 0, 5
#: What a posted operation (IBV_WR_*, or RECV) is called in its completion (IBV_WC_*).
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
    """The places of one completion queue; each post takes one until it is retired."""

    def __init__(self, depth: int) -> None:
        self.depth, self.pending = depth, 0


class WorkQueue:
    """One direction of a queue pair: up to *capacity* posts, oldest first."""

    def __init__(self, capacity: int, places: QueueCapacity) -> None:
        self.capacity, self.places = capacity, places
        self.items: deque[Work] = deque()

    def reserve(self, work: Work) -> int:
        """Record a post; 0, or why it cannot be: EXFULL (the queue) or EOVERFLOW (the completion queue)."""
        if len(self.items) == self.capacity:
            return errno.EXFULL
        if self.places.pending == self.places.depth:
            return errno.EOVERFLOW
        self.items.append(work)
        self.places.pending += 1
        return 0

    def cancel(self) -> None:
        """Forget the newest post, which the device did not take."""
        self.items.pop()
        self.places.pending -= 1

    def find(self, wr_id: int) -> int | None:
        """Return how many posts are older than the oldest one with *wr_id*."""
        return next((i for i, work in enumerate(self.items) if work.wr_id == wr_id), None)

    def retire(self, n: int) -> Work:
        """Drop the *n* oldest posts; return the last of them."""
        self.places.pending -= n
        for _ in range(n - 1):
            self.items.popleft()
        return self.items.popleft()


class PostedWork:
    """Both directions of a queue pair, and the first bad completion."""

    def __init__(self, send: WorkQueue, recv: WorkQueue) -> None:
        self.send, self.recv = send, recv
        self.failed: tuple[int, int, Work] | None = None  # status, vendor error, the operation

    def complete(self, wc: Any) -> tuple[int, int]:
        """Retire what completed; return opcode and nbytes, which a bad completion leaves open."""
        says_recv = bool(wc.opcode & RECV)
        if wc.status == _SUCCESS:
            queue = self.recv if says_recv else self.send
            before = queue.find(wc.wr_id)
        else:  # does not tell which queue it is of
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
        """Retire everything; whether there was something."""
        found = [queue for queue in (self.send, self.recv) if queue.items]
        for queue in found:
            queue.retire(len(queue.items))
        return bool(found)
