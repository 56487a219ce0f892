"""A rank's side of the Unix socket to its node: requests go out at once, replies are read by whoever waits for one.

There is no reader thread: a Python thread woken beside a busy trainer waits for the GIL, and the data path needs no
message at all. Of several waiting threads one reads and hands every message to the session's tables; the others
sleep until something was read.
"""
from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..base.message_socket import MessageSocket
from ..orchestration.errors import BpsError, ClosedError, PeerLostError
from ..orchestration.messages import Message

T = TypeVar("T")

#: How often a wait looks at the job's state on the board, which no descriptor announces.
SLICE_S = 0.1


class Mailbox:
    """Messages to and from the node over *channel*. Any thread.

    Parameters
    ----------
    channel
        Owned from now on.
    node_pidfd
        Polled beside the socket: it fires when the node dies, even if a forked child of it holds the socket open.
    deliver
        Called with each message and its descriptors (which it owns), one at a time.
    check
        Called before each sleep; raises if the job is over.
    lost
        Returns what to raise when the node is gone.
    """

    def __init__(self, channel: MessageSocket, node_pidfd: int, deliver: Callable[[Message, tuple[int, ...]], None],
                 check: Callable[[], None], lost: Callable[[], BpsError]) -> None:
        self._channel = channel
        self._deliver = deliver
        self._check = check
        self._lost = lost
        self._condition = threading.Condition()
        self._reading = False
        self._poller = select.poll()
        self._poller.register(channel.fileno(), select.POLLIN)
        self._poller.register(node_pidfd, select.POLLIN)
        self._node_pidfd = node_pidfd

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send *message*; raises what the job was aborted with, or what `lost` returns, if the node is gone."""
        try:
            self._channel.send(message, fds)
        except PeerLostError as exc:
            self._check()  # what the job was aborted with is why the node has left
            raise self._lost() from exc

    def wait(self, ready: Callable[[], T | None], timeout_s: float) -> T | None:
        """Read messages until ``ready()`` is not None and return that, or None after *timeout_s* seconds.

        Raises
        ------
        PeerLostError
            If the node died, or what `check` raises; but what was said before that counts first.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._condition:
                found = ready()
                remaining_s = deadline - time.monotonic()
                if found is not None or remaining_s <= 0:
                    return found
                if self._reading:
                    self._condition.wait(min(remaining_s, SLICE_S))
                    continue
                self._reading = True
            try:
                self._read(min(remaining_s, SLICE_S))
            except ClosedError:
                raise
            except BpsError:
                with self._condition:
                    found = ready()
                if found is None:
                    raise
                return found
            finally:
                with self._condition:
                    self._reading = False
                    self._condition.notify_all()

    def pump(self) -> None:
        """Deliver what has arrived, without waiting; nothing if another thread is reading."""
        with self._condition:
            if self._reading:
                return
            self._reading = True
        try:
            self._read(0.0)
        finally:
            with self._condition:
                self._reading = False
                self._condition.notify_all()

    def _read(self, timeout_s: float) -> None:
        """Take what arrives in time. An abort comes by the board and overtakes what the socket says of its cause."""
        try:
            self._check()
        except ClosedError:  # the socket is another's: of the process that forked us, or closed by another thread
            raise
        except BpsError:
            with contextlib.suppress(PeerLostError):
                self._take()
            raise
        events = dict(self._poller.poll(timeout_s * 1000))
        if self._channel.fileno() in events:
            try:
                self._take()
            except PeerLostError as exc:
                self._check()  # an abort that was published before the node left is the better reason
                raise self._lost() from exc
        elif self._node_pidfd in events:
            self._check()
            raise self._lost()

    def _take(self) -> None:
        arrived = self._channel.recv_nowait()
        with self._condition:
            for message, fds in arrived:
                self._deliver(message, fds)

    def close(self) -> None:
        """Close the socket. No thread may be waiting."""
        self._channel.close()
