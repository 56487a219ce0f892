"""One end of a ``bpsfast perf`` measurement over TCP, with the native streams that jobs use, as many as -q says.

Messages are posted from Python, as the node posts partitions; native threads send and receive them. A message counts as
sent when the peer's kernel has acknowledged its last byte.
"""
from __future__ import annotations

import array
import errno
import os
import queue
import socket
import threading
import time
from typing import Any

from ...orchestration import security
from ...orchestration.errors import PeerLostError, StallError
from ...orchestration.handshakes import HandshakeAcceptor
from ...orchestration.host_lookup import format_address
from ...pyx.pages import Segment
from ...pyx.perf import Mailbox
from ...pyx.tcp import IoThreads, Slots, Stream
from .control import Control
from .perf_plan import Plan

_CONTEXT = "bpsfast perf data"
_EPOCH = 1
_CONNECT_S = 10.0
_NAP_S = 0.05
_ALIGNMENT = 4096


class TcpEnd:
    """The streams of this side to one peer. One thread, except `expect` and `cancel`."""

    def __init__(self, plan: Plan, control: Control, key: bytes, is_server: bool, awake_s: float) -> None:
        self.plan, self._control, self._key, self._awake_s = plan, control, key, awake_s
        self._streams: list[Stream] = []
        self._io_threads = IoThreads(2)
        self._mailbox = Mailbox()
        self._stride = -(-plan.largest_nbytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = Segment(2 * self._stride, huge=False)
        # all messages in flight may be on one stream; a slot holds one
        self._n_slots = plan.depth * plan.pairs
        self._posted = self._arrived = self._expected = 0
        self._started = self._cancelled = self._told = False
        #: Any thread: number of messages sent in the run, once it is final.
        self.all_sent: int | None = None
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._acceptor: HandshakeAcceptor[security.StreamHello] | None = None
        self._accepted: queue.Queue[tuple[security.StreamHello, socket.socket]] = queue.Queue()
        self._early: dict[int, socket.socket] = {}  # by number
        self._refused = ""
        if is_server:
            family = socket.AF_INET6 if ":" in control.own_host else socket.AF_INET
            self._listener = socket.create_server((control.own_host, 0), family=family)
            self._acceptor = HandshakeAcceptor(
                self._listener, lambda sock: security.plain_handshake_acceptor(
                    sock, self._key, _CONTEXT, peer=0, epoch=_EPOCH, timeout_s=_CONNECT_S),
                lambda sock, hello: self._accepted.put((hello, sock)), self._refuse, self._refuse, plan.pairs,
                "bpsfast-perf-data")
            self._acceptor.start()

    def offer(self) -> dict[str, Any]:
        """Return the port of the streams, if this side listens."""
        return {"port": self._listener.getsockname()[1] if self._listener else None}

    def connect(self, peer: dict[str, Any]) -> None:
        """Open the streams.

        Raises `StallError` if nobody answers, `PeerLostError` if the peer is gone, `MismatchError` if job keys differ.
        """
        for number in range(self.plan.pairs):
            sock = self._accept(number) if self._listener else self._dial(peer["port"], number)
            sock.settimeout(None)
            try:
                self._streams.append(Stream(sock.fileno(), self._io_threads, peer=number, engine=self._mailbox.handle,
                                            arrived=self._mailbox.arrived_address, notify=self._mailbox.notify_address,
                                            slots=Slots(self._n_slots, epoch=_EPOCH), keep=self._mailbox))
            except BaseException:
                sock.close()
                raise
            sock.detach()

    def _accept(self, number: int) -> socket.socket:
        deadline = time.monotonic() + _CONNECT_S
        while number not in self._early:  # threads accept them in any order
            try:
                hello, sock = self._accepted.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                assert self._listener is not None
                also = f"; refused: {self._refused}" if self._refused else ""
                raise StallError(
                    f"{self._control.peer} did not open data connection {number} within {_CONNECT_S:g} s: is port "
                    f"{self._listener.getsockname()[1]} open?{also}") from None
            self._early[hello.stream] = sock
        return self._early.pop(number)

    def _refuse(self, why: object) -> None:
        self._refused = str(why)

    def _dial(self, port: int, number: int) -> socket.socket:
        host = self._control.peer_host
        try:
            sock = socket.create_connection((host, port), timeout=_CONNECT_S)
        except OSError as exc:
            raise StallError(f"data connection {number} to {format_address(host, port)}: {exc}; is that port open?"
                             ) from exc
        try:
            hello = security.StreamHello(peer=0, stream=number, epoch=_EPOCH)
            security.plain_handshake_dialer(sock, self._key, _CONTEXT, hello, _CONNECT_S)
        except BaseException:
            sock.close()
            raise
        return sock

    def place(self) -> dict[str, Any]:
        """Return a description of this side."""
        return {"host": self._control.own_host, "streams": self.plan.pairs}

    def prepare(self, nbytes: int, receives: bool) -> None:
        """Bind every slot of every stream to the landing buffer, for messages of *nbytes*."""
        self._nbytes = nbytes
        landing = self._memory.address + self._stride
        for stream in self._streams:
            for slot in range(self._n_slots):
                stream.slots.bind(slot, landing, landing, nbytes, next_round=0)
            if not self._started:
                stream.start()
        self._started = True
        self._posted, self._arrived = self._mailbox.delivered, self._mailbox.arrived
        self._told, self.all_sent = False, None

    def _post(self, number: int) -> None:
        slot = number % self._n_slots
        self._streams[number % len(self._streams)].post(slot, number // self._n_slots, 0, self._memory.address,
                                                        self._nbytes)

    def _wait(self, arrived: int | None, delivered: int | None, since_s: float) -> None:
        """Wait briefly for a count; raise the error that ended the run."""
        if not self._mailbox.wait(arrived, delivered, _NAP_S, self._awake_s):
            if time.monotonic() - since_s > self.plan.timeout_s:
                raise StallError(f"tcp to {self._control.peer}: nothing moved for {self.plan.timeout_s:g} s")
        if self._cancelled:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        if self._mailbox.lost is not None:
            reason = os.strerror(self._mailbox.lost) if self._mailbox.lost else "the peer closed it"
            raise PeerLostError(f"a data connection to {self._control.peer} is gone: {reason}")

    def bandwidth(self, n_send: int | None, n_receive: int | None, duration_s: float) -> tuple[Any, ...]:
        """Post *n_send* messages on each stream (None: for *duration_s*) and receive *n_receive*; as `VerbsLoop`."""
        goal = None if n_send is None else n_send * len(self._streams)
        posted_ns, completed_ns = array.array("q"), array.array("q")
        begun_ns = ended_ns = now_ns = time.monotonic_ns()
        end_ns = now_ns + int(duration_s * 1e9) if goal is None else None
        posted = sent = received = 0
        with self._lock:
            if not self._told:
                self._expected = -1 if n_receive is None else n_receive
        moved_s = time.monotonic()
        while True:
            if end_ns is not None and now_ns >= end_ns:
                goal = posted
            while posted - sent < self._n_slots and (goal is None or posted < goal):
                posted_ns.append(now_ns)
                self._post(posted)
                posted += 1
            expected = self._expected
            if goal is not None and sent >= goal:
                self.all_sent = sent
                if 0 <= expected <= received:
                    break
            self._wait((self._arrived + received + 1) % 2**32 if expected != received else None,
                       (self._posted + sent + 1) % 2**32 if sent < posted else None, moved_s)
            n_sent = (self._mailbox.delivered - self._posted) % 2**32 - sent
            n_received = (self._mailbox.arrived - self._arrived) % 2**32 - received
            now_ns = time.monotonic_ns()
            if n_sent or n_received:
                moved_s, ended_ns = time.monotonic(), now_ns
                completed_ns.extend([now_ns] * n_sent)
                sent, received = sent + n_sent, received + n_received
        recorded = end_ns is None
        return (sent, received, (ended_ns - begun_ns) / 1e9, posted_ns.tobytes() if recorded else b"",
                completed_ns.tobytes() if recorded else b"")

    def latency(self, n: int, first: bool) -> bytes:
        """Exchange *n* messages on one stream; as `VerbsLoop.latency`."""
        samples = array.array("q")
        before_ns = time.monotonic_ns()
        for turn in range(n):
            if first:
                self._post(turn)
            moved_s = time.monotonic()
            while (self._mailbox.arrived - self._arrived) % 2**32 <= turn:
                self._wait((self._arrived + turn + 1) % 2**32, None, moved_s)
            if not first:
                self._post(turn)
            now_ns = time.monotonic_ns()
            samples.append(now_ns - before_ns)
            before_ns = now_ns
            # a slot is free once its message is acknowledged; an answer implies that only at the other end
            room = self._n_slots if turn + 1 < n else 1
            while turn + 1 - (self._mailbox.delivered - self._posted) % 2**32 >= room:
                self._wait(None, (self._mailbox.delivered + 1) % 2**32, moved_s)
        return samples.tobytes()

    def expect(self, n: int) -> None:
        """Any thread: set the number of messages that the peer sent."""
        with self._lock:
            self._told, self._expected = True, n

    def cancel(self) -> None:
        """Any thread: end the run."""
        self._cancelled = True

    def counters(self) -> list[Any]:
        """Return nothing: a stream belongs to no port."""
        return []

    def close(self) -> None:
        """Close the streams. Idempotent."""
        if self._acceptor is not None:
            self._acceptor.close()
        while not self._accepted.empty():
            self._accepted.get()[1].close()
        for sock in self._early.values():
            sock.close()
        for stream in self._streams:
            stream.close()
        self._io_threads.close()
        self._memory.close()
