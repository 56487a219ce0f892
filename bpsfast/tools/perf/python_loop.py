"""The send and receive loops of `bpsfast perf` in Python, for pyverbs; ours has a compiled one (`pyx.perf.VerbsLoop`).

Every post and every poll goes through the interpreter, which dominates small messages and latencies.
"""
from __future__ import annotations

import array
import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

_BATCH = 32
_NAP_S = 0.05
_SUCCESS, _RECEIVE = 0, 128


class ProviderLoop:
    """`VerbsLoop` with Python objects for queue pairs and completion queues. One thread runs a loop."""

    def __init__(self, send_cq: Any, recv_cq: Any, pairs: Sequence[tuple[Any, int, int, int, int, int]], *,
                 operation: str, nbytes: int, depth: int, receive_depth: int, receive_nbytes: int, receives: bool,
                 moderation: int, inlined: bool = False, idle_s: float | None = None, stall_s: float = 30.0) -> None:
        self._send_cq, self._recv_cq, self._pairs = send_cq, recv_cq, pairs
        self._operation, self._nbytes, self._depth, self._inlined = operation, nbytes, depth, inlined
        self._receive_depth, self._receive_nbytes, self._receives = receive_depth, receive_nbytes, receives
        self._moderation, self._idle_s, self._stall_s = moderation, idle_s, stall_s
        self._posted, self._completed = [0] * len(pairs), [0] * len(pairs)
        self._unsignalled = [0] * len(pairs)
        self._receive_goal: int | None = None
        self._told = False
        self._cancelled = threading.Event()
        self._received = self._last_ns = 0
        self.all_sent: int | None = None
        self.failure: tuple[int, int, int, bool] | None = None

    def post_receives(self) -> None:
        """Post the receives of every pair."""
        for pair in range(len(self._pairs)):
            self._post_receives(pair, self._receive_depth)

    def _post_receives(self, pair: int, n: int) -> None:
        queue_pair, _, landing, lkey, _, _ = self._pairs[pair]
        nbytes = self._receive_nbytes if self._operation == "send" else 0
        for _ in range(n):
            queue_pair.post_recv(pair, landing, nbytes, lkey)

    def _post(self, pair: int, signaled: bool) -> None:
        queue_pair, source, _, lkey, remote, rkey = self._pairs[pair]
        self._unsignalled[pair] += 1
        wr_id = self._unsignalled[pair] << 32 | pair
        if self._operation == "send":
            queue_pair.post_send(wr_id, source, self._nbytes, lkey, None, signaled, self._inlined)
        elif self._operation == "read":
            queue_pair.post_read(wr_id, source, self._nbytes, lkey, remote, rkey, signaled)
        else:
            immediate = self._posted[pair] & 0xffffffff if self._operation == "write_imm" else None
            queue_pair.post_write(wr_id, source, self._nbytes, lkey, remote, rkey, immediate, signaled, self._inlined)
        self._posted[pair] += 1
        if signaled:
            self._unsignalled[pair] = 0

    def _poll_sends(self) -> int:
        n = 0
        for wr_id, status, _, _, _, _ in self._send_cq.poll(_BATCH):
            self._check(status, wr_id, False)
            self._completed[wr_id & 0xffffffff] += wr_id >> 32
            n += wr_id >> 32
        return n

    def _poll_receives(self) -> int:
        found = self._recv_cq.poll(_BATCH)
        for wr_id, status, _, nbytes, _, _ in found:
            self._check(status, wr_id, True)
            if nbytes != self._nbytes:
                raise OSError(errno.EPROTO, f"{nbytes} bytes arrived instead of {self._nbytes}")
            self._post_receives(wr_id, 1)
        self._received += len(found)
        return len(found)

    def _check(self, status: int, wr_id: int, is_receive: bool) -> None:
        if status != _SUCCESS:
            self.failure = status, 0, wr_id & 0xffffffff, is_receive
            raise OSError(errno.EIO, "bad completion")

    def _idle(self, sends: bool) -> int:
        """Check deadlines, and sleep if configured; return the time."""
        if self._cancelled.is_set():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        now_ns = time.monotonic_ns()
        if now_ns - self._last_ns > self._stall_s * 1e9:
            raise OSError(errno.ETIMEDOUT, f"after {sum(self._completed)} sends and {self._received} receives")
        if self._idle_s is not None and now_ns - self._last_ns >= self._idle_s * 1e9:
            (self._send_cq if sends else self._recv_cq).wait(_NAP_S)
        return now_ns

    def bandwidth(self, n_send: int | None, n_receive: int | None,
                  duration_s: float = 0.0) -> tuple[int, int, float, bytes, bytes]:
        """As `VerbsLoop.bandwidth`."""
        if not self._told:
            self._receive_goal = n_receive
        posted_ns, completed_ns = array.array("q"), array.array("q")
        now_ns = self._last_ns = time.monotonic_ns()
        begun_ns, ended_ns = (now_ns if n_send != 0 else 0), now_ns
        end_ns = now_ns + int(duration_s * 1e9) if n_send is None else None
        stopped = False
        while True:
            stopped = stopped or (end_ns is not None and now_ns >= end_ns)
            unfinished = False
            for pair in range(len(self._pairs) if n_send != 0 else 0):
                limit = self._posted[pair] + (self._unsignalled[pair] > 0) if stopped else n_send
                while self._posted[pair] - self._completed[pair] < self._depth and (
                        limit is None or self._posted[pair] < limit):
                    following = self._posted[pair] + 1
                    posted_ns.append(now_ns)
                    self._post(pair, following % self._moderation == 0 or following == limit)
                unfinished = unfinished or self._completed[pair] < self._posted[pair] or self._posted[pair] != limit
            n_sent = self._poll_sends() if unfinished else 0
            n_received = self._poll_receives() if self._receives else 0
            if n_sent or n_received:
                now_ns = self._last_ns = ended_ns = time.monotonic_ns()
                begun_ns = begun_ns or now_ns
                completed_ns.extend([now_ns] * n_sent)
                continue
            if not unfinished:
                self.all_sent = sum(self._completed)
                if not self._receives or (self._receive_goal is not None and self._received >= self._receive_goal):
                    break
            now_ns = self._idle(unfinished)
        recorded = end_ns is None
        return (sum(self._completed), self._received, max(0, ended_ns - begun_ns) / 1e9,
                posted_ns.tobytes() if recorded else b"", completed_ns.tobytes() if recorded else b"")

    def latency(self, n: int, first: bool) -> bytes:
        """As `VerbsLoop.latency`."""
        samples = array.array("q")
        source = self._pairs[0][1]
        last = (ctypes.c_uint8 * self._nbytes).from_address(source)
        now_ns = time.monotonic_ns()
        for turn in range(n):
            self._last_ns = now_ns
            if not first:
                self._until(self._arrival(turn))
            if self._operation != "read":
                last[self._nbytes - 1] = (turn + 1) & 0xff
            self._post(0, self._operation == "read" or (turn + 1) % self._moderation == 0 or turn + 1 == n)
            if first:
                self._until(self._arrival(turn))
            before_ns, now_ns = now_ns, time.monotonic_ns()
            samples.append(now_ns - before_ns)
            room = self._depth if turn + 1 < n else 1
            self._until(lambda room=room:  # type: ignore[misc]
                        self._poll_sends() >= 0 and self._posted[0] - self._completed[0] < room)
        return samples.tobytes()

    def _arrival(self, turn: int) -> Callable[[], bool]:
        """Return a function that tells whether the peer's data of *turn* has arrived."""
        if self._operation == "read":
            return lambda: self._poll_sends() >= 0 and self._completed[0] > turn
        if self._operation == "write":
            landing = (ctypes.c_uint8 * self._nbytes).from_address(self._pairs[0][2])
            return lambda: landing[self._nbytes - 1] == (turn + 1) & 0xff
        return lambda: self._poll_receives() >= 0 and self._received > turn

    def _until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self._poll_sends()
            self._idle(self._operation == "read")

    def expect(self, n: int) -> None:
        """Any thread: set the number of receives that ends the run."""
        self._told, self._receive_goal = True, n

    def cancel(self) -> None:
        """Any thread: end the loop."""
        self._cancelled.set()
