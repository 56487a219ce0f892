"""One end of a ``bpsfast perf`` measurement through shared memory: a ring announces messages, the reader copies them.

As between two nodes of a job, data stays in its owner's segment, the peer maps it read-only, and an entry in a lane
announces it. The measurement covers the announcement and a copy out of the peer's memory.
"""
from __future__ import annotations

import contextlib
import errno
import os
from typing import Any

from ...base.process_identity import boot_id
from ...orchestration.errors import PeerLostError, StallError, UnsupportedError
from ...pyx import ring
from ...pyx.pages import Segment
from ...pyx.perf import MemoryLoop
from .perf_plan import Plan


class ShmEnd:
    """The lane, doorbell and data of this side, and those of the peer. One thread, except `expect` and `cancel`."""

    def __init__(self, plan: Plan, awake_s: float, stream_nbytes: int) -> None:
        self.plan, self._awake_s, self._stream_nbytes = plan, awake_s, stream_nbytes
        self._undo = contextlib.ExitStack()
        self._loop: MemoryLoop | None = None
        try:
            keep = self._undo.enter_context
            self._lane = keep(Segment(ring.LANE_NBYTES + 64 * plan.depth, name="bpsfast-perf-lane", huge=False))
            ring.format_lane(self._lane)
            self._bell = keep(Segment(ring.DOORBELL_NBYTES, name="bpsfast-perf-bell", huge=False))
            ring.format_doorbell(self._bell)
            self._data = keep(Segment(plan.largest_nbytes * plan.depth, name="bpsfast-perf-data", huge=False))
            self._sink = keep(Segment(plan.largest_nbytes, huge=False))
        except BaseException:
            self._undo.close()
            raise

    def offer(self) -> dict[str, Any]:
        """Return how the peer finds the memory of this side."""
        return {"boot": boot_id(), "host": os.uname().nodename, "pid": os.getpid(),
                "fds": [self._lane.fileno(), self._bell.fileno(), self._data.fileno()]}

    def connect(self, peer: dict[str, Any]) -> None:
        """Map the peer's memory; raise `UnsupportedError` if it is on another machine, or may not be opened."""
        if peer["boot"] != boot_id():
            raise UnsupportedError(f"--transport shm: the peer runs on another machine, {peer['host']}; shared memory "
                                   "needs one machine")
        mapped = []
        for fd, writable in zip(peer["fds"], (True, True, False)):
            path = f"/proc/{peer['pid']}/fd/{fd}"
            try:
                opened = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
            except OSError as exc:
                raise UnsupportedError(f"--transport shm: the peer's memory, {path}, cannot be opened "
                                       f"({exc.strerror}): run both sides as the same user and in the same container") \
                    from exc
            try:
                segment = Segment.attach(opened, writable=writable)
            except BaseException:
                os.close(opened)
                raise
            mapped.append(self._undo.enter_context(segment))
        self._peer_lane, self._peer_bell, self._peer_data = mapped

    def place(self) -> dict[str, Any]:
        """Return a description of this side."""
        return {"pid": os.getpid(), "page_nbytes": self._data.page_nbytes}

    def prepare(self, nbytes: int, receives: bool) -> None:
        """Create the loop for messages of *nbytes*."""
        self._end_loop()
        self._loop = MemoryLoop(self._lane, self._peer_lane, self._bell, self._peer_bell, self._peer_data, self._sink,
                                nbytes=nbytes, depth=self.plan.depth, awake_s=self._awake_s,
                                stall_s=self.plan.timeout_s, stream_nbytes=self._stream_nbytes)

    def bandwidth(self, n_send: int | None, n_receive: int | None, duration_s: float) -> tuple[Any, ...]:
        """Run `MemoryLoop.bandwidth`; it records no times of single messages."""
        assert self._loop is not None
        return *self._run(lambda loop: loop.bandwidth(n_send, n_receive, duration_s)), b"", b""

    def latency(self, n: int, first: bool) -> bytes:
        """Run `MemoryLoop.latency`."""
        return self._run(lambda loop: loop.latency(n, first))

    def _run(self, run: Any) -> Any:
        try:
            return run(self._loop)
        except OSError as exc:
            if exc.errno == errno.ETIMEDOUT:
                raise StallError(f"shared memory: nothing moved for {self.plan.timeout_s:g} s; {exc.strerror}") from exc
            raise

    def expect(self, n: int) -> None:
        """Any thread: set the number of messages that the peer sent."""
        if self._loop is None:
            raise PeerLostError("the peer's run ended before this side's began")
        self._loop.expect(n)

    def cancel(self) -> None:
        """Any thread: end the loop."""
        if self._loop is not None:
            self._loop.cancel()

    def counters(self) -> list[Any]:
        """Return nothing: no network card takes part."""
        return []

    def close(self) -> None:
        """Unmap and free. Idempotent."""
        self._end_loop()
        self._undo.close()

    def _end_loop(self) -> None:
        """Release the memory now; an error may hold a reference to the loop for long."""
        if self._loop is not None:
            self._loop.close()
        self._loop = None
