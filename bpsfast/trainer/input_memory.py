"""Memory that this rank and its node share: the mapped segments, and the input memory in them."""
from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.free_list import FreeList
from ..orchestration.errors import BpsError, CapacityError, ProtocolError, StallError, error_of
from ..orchestration.messages import Allocate, Allocated, Refuse, SegmentShared
from ..pyx.pages import Segment
from .node_connection import Mailbox


@dataclass(frozen=True)
class Region:
    """Input memory of this rank: `array` is writable uint8; `segment` and `offset` are its place for the node."""

    array: np.ndarray[Any, Any]
    segment: int
    offset: int
    address: int

    def part(self, offset: int, nbytes: int) -> Region:
        """Return *nbytes* of this region from *offset* on."""
        return Region(self.array[offset : offset + nbytes], self.segment, self.offset + offset, self.address + offset)


class InputMemory:
    """The segments that *rank* has mapped, and its input memory, which it allocates and releases. Any thread.

    *timeout_s*: how long the node may take to answer a request. *require_open* raises `ClosedError` when the session is
    closed, or is another process's. *mailbox* sends requests to the node; its owner calls `receive` with the replies.
    """

    def __init__(self, rank: int, timeout_s: float, require_open: Callable[[], None], mailbox: Mailbox) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._require_open = require_open
        self._mailbox = mailbox
        self._lock = threading.RLock()
        self._receiving = threading.RLock()  # guards the replies; never held while waiting for the node
        #: By owner ("rank", or "result:" and the node) and number.
        self.segments: dict[tuple[str, int], Segment] = {}
        #: Why a segment could not be mapped, if one could not.
        self.unmapped: CapacityError | None = None
        self._not_mapped: dict[tuple[str, int], tuple[SegmentShared, int]] = {}  # with descriptors
        self._inputs: list[tuple[int, Segment]] = []
        self._free: dict[int, FreeList] = {}  # released memory by input segment
        self._requests = 0
        self._asked: dict[int, int] = {}  # bytes of requests without a reply; replies come in order
        self._answers: dict[int, list[Allocated | BpsError]] = {}  # of requests that a thread waits for
        self._unclaimed: deque[tuple[Allocated, int]] = deque()  # with their bytes: replies to waits that had timed out

    def allocate(self, nbytes: int) -> Region:
        """Return *nbytes* of page-aligned input memory, zeros unless some of it was released before.

        It stays this rank's until the session ends, or until it is released. Raises `CapacityError` if the machine
        cannot hold it.
        """
        self._require_open()
        with self._lock:
            while self._unclaimed:
                late, late_nbytes = self._unclaimed.popleft()
                if ("rank", late.segment) in self.segments:  # mapping it may have failed
                    self._free.setdefault(late.segment, FreeList()).give(late.offset, _rounded(late_nbytes))
            for number, holes in self._free.items():
                offset = holes.take(_rounded(nbytes))
                if offset is not None:
                    return self._region(number, offset, nbytes)
            self._requests += 1
            request = self._requests
            self._asked[request] = nbytes
            answers = self._answers[request] = []
            self._mailbox.send(Allocate(request=request, nbytes=nbytes))
        try:
            self._mailbox.wait(lambda: answers[0] if answers else None, self._timeout_s)
        finally:
            with self._receiving:
                del self._answers[request]
        answer = answers[0] if answers else None
        if answer is None:
            raise StallError(f"the node did not answer a request for {nbytes} bytes within {self._timeout_s:g} s")
        if isinstance(answer, BpsError):
            raise answer
        segment = self.segments.get(("rank", answer.segment))
        if segment is None:
            raise self.unmapped or ProtocolError(f"the node answered with segment {answer.segment}, which it has not "
                                                 "shared")
        return self._region(answer.segment, answer.offset, nbytes)

    def _region(self, number: int, offset: int, nbytes: int) -> Region:
        segment = self.segments["rank", number]
        array = np.frombuffer(segment, np.uint8, nbytes, offset)  # type: ignore[call-overload]
        return Region(array, number, offset, segment.address + offset)

    def release(self, region: Region) -> None:
        """Release what `allocate` returned: it is not written any more, and all rounds pushed from it are over."""
        with self._lock:
            self._free.setdefault(region.segment, FreeList()).give(region.offset, _rounded(region.array.nbytes))

    def locate(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return (segment, offset) if these bytes lie in one of this rank's input segments."""
        for number, segment in self._inputs:
            if segment.address <= address and address + nbytes <= segment.address + segment.nbytes:
                return number, address - segment.address
        return None

    def around(self, address: int) -> tuple[int, int]:
        """Return the first address, and the one after the last, of the input segment with *address*; (0, 0): none."""
        for _, segment in self._inputs:
            if segment.address <= address < segment.address + segment.nbytes:
                return segment.address, segment.address + segment.nbytes
        return 0, 0

    def receive(self, message: SegmentShared | Allocated | Refuse, fds: tuple[int, ...]) -> None:
        """Handle a message of the node. Called with one message at a time."""
        match message:
            case SegmentShared():
                self._map(message, fds[0])
            case Allocated():
                self._answer(message.request, message)
            case Refuse():
                self._answer(next(iter(self._asked)), error_of(message.error, message.reason))

    def _answer(self, request: int, answer: Allocated | BpsError) -> None:
        nbytes = self._asked.pop(request)
        with self._receiving:
            if request in self._answers:
                self._answers[request].append(answer)
            elif isinstance(answer, Allocated):
                self._unclaimed.append((answer, nbytes))

    def _map(self, message: SegmentShared, fd: int) -> None:
        """Map a segment. If that fails, the thread that needs the segment raises the error, not this one."""
        try:
            segment = Segment.attach(fd, writable=message.owner in ("rank", "channel"))
        except OSError as exc:
            if message.owner == "rank":  # the thread that asked for it raises the error
                os.close(fd)
            else:
                self._not_mapped[message.owner, message.segment] = message, fd
            self.unmapped = CapacityError(f"rank {self._rank} cannot map a segment of {message.nbytes} bytes that its "
                                          f"node shares with it: {exc}; raise the limit of its address space "
                                          "(ulimit -v), or push less")
            return
        self.segments[message.owner, message.segment] = segment
        if message.owner == "rank":
            self._inputs = [*self._inputs, (message.segment, segment)]

    def map_again(self) -> None:
        again, self._not_mapped, self.unmapped = self._not_mapped, {}, None
        for message, fd in again.values():
            self._map(message, fd)

    def forget(self) -> list[Segment]:
        """Drop everything, at the end of the session; return the segments, which the caller closes."""
        self._inputs = []
        self._free.clear()
        segments, self.segments = list(self.segments.values()), {}
        for _, fd in self._not_mapped.values():
            os.close(fd)
        self._not_mapped.clear()
        return segments


def _rounded(nbytes: int) -> int:
    """Return *nbytes* rounded up to whole pages, the node's unit."""
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
