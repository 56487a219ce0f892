"""The connection by which two ranks exchange messages: frames in order, both ways, on a non-blocking stream socket."""
from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from typing import Protocol

from ...orchestration.errors import PeerLostError
from .encrypted_socket import EncryptedSocket
from .protocol import DATA, EAGER_NBYTES, HEADER, Frame, unpack

_STAGING_NBYTES = 2 * EAGER_NBYTES
#: Bytes read from one connection, or written to it, before others have their turn.
_TURN_NBYTES = 4 << 20
_MOST_BUFFERS = 16


class FrameHandler(Protocol):
    """What a frame socket needs of its owner, a `Peer`, which documents these."""

    def handle_frame(self, frame: Frame, payload: memoryview) -> None: ...
    def sink(self, frame: Frame) -> memoryview: ...
    def next_piece(self) -> tuple[Frame, memoryview] | None: ...
    def sent(self, frame: Frame) -> None: ...


class FrameSocket:
    """Sends and receives frames over *sock*, which it owns. Not thread-safe: used with the endpoint's lock.

    Methods raise `PeerLostError` once the connection is broken.
    """

    def __init__(self, sock: socket.socket, handler: FrameHandler) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._handler = handler
        self._outbox: deque[memoryview] = deque()
        self._piece: Frame | None = None  # the DATA frame that ends the outbox
        self._staging = bytearray(_STAGING_NBYTES)
        self._view = memoryview(self._staging)
        self._begin = self._end = 0
        self._sink = memoryview(b"")
        self._receiving: Frame | None = None

    @property
    def backlog(self) -> bool:
        """Whether bytes wait until the socket accepts more."""
        return bool(self._outbox)

    def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        """Send *frame* and *payload*; what the socket does not accept now is copied and sent by `flush`."""
        buffers = [memoryview(frame.pack())]
        if payload:
            buffers.append(payload)
        if not self._outbox:
            buffers = self._write(buffers)
        self._outbox += [memoryview(bytes(buffer)) for buffer in buffers]

    def flush(self) -> None:
        """Send what the socket accepts, pieces included, at most one turn's share; `backlog` tells if more waits."""
        budget = _TURN_NBYTES
        while True:
            if not self._outbox:
                if self._piece is not None:
                    piece, self._piece = self._piece, None
                    self._handler.sent(piece)
                following = self._handler.next_piece()
                if following is None:
                    return
                self._piece, payload = following
                self._outbox += [memoryview(self._piece.pack()), payload]
            if budget <= 0:
                return
            buffers = [self._outbox.popleft() for _ in range(min(_MOST_BUFFERS, len(self._outbox)))]
            budget -= sum(map(len, buffers))
            rest = self._write(buffers)
            if rest:
                self._outbox.extendleft(reversed(rest))
                return

    def _write(self, buffers: list[memoryview]) -> list[memoryview]:
        """Write; return what the socket did not accept."""
        while buffers:
            try:
                n = self.sock.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return buffers
            except OSError as exc:
                raise PeerLostError(f"its connection broke: {exc}") from exc
            while buffers and n >= len(buffers[0]):
                n -= len(buffers.pop(0))
            if n:
                buffers[0] = buffers[0][n:]
        return buffers

    def read(self) -> None:
        """Read what has arrived, at most one turn's share, and hand over each complete frame."""
        budget = _TURN_NBYTES
        while budget > 0 or (isinstance(self.sock, EncryptedSocket) and self.sock.is_pending):
            target = self._sink if self._receiving is not None else self._view[self._end:]
            try:
                n = self.sock.recv_into(target)
            except BlockingIOError:
                return
            except OSError as exc:
                raise PeerLostError(f"its connection broke: {exc}") from exc
            if not n:
                raise PeerLostError("its connection ended without a LEAVE frame: its process has ended")
            budget -= n
            full = n == len(target)
            if self._receiving is not None:
                self._received(n)
            else:
                self._end += n
                self._split_frames()
            if not full and self._receiving is None:
                return

    def _received(self, n: int) -> None:
        self._sink = self._sink[n:]
        if not self._sink:
            frame, self._receiving = self._receiving, None
            assert frame is not None
            self._handler.handle_frame(frame, self._sink)

    def _split_frames(self) -> None:
        """Hand over the complete frames in the staging buffer."""
        while self._receiving is None and self._end - self._begin >= HEADER.size:
            frame = unpack(self._staging, self._begin)
            start = self._begin + HEADER.size
            if frame.kind == DATA:
                self._begin = start
                self._sink, self._receiving = self._handler.sink(frame), frame
                n = min(self._end - start, frame.nbytes)
                self._sink[:n] = self._view[start:start + n]
                self._begin += n
                self._received(n)
                continue
            end = start + frame.n_payload
            if end > self._end:
                break
            self._begin = end
            self._handler.handle_frame(frame, self._view[start:end])
        if self._begin == self._end:
            self._begin = self._end = 0
        elif _STAGING_NBYTES - self._begin < HEADER.size + EAGER_NBYTES:  # a frame must find room behind what is there
            rest = bytes(self._view[self._begin:self._end])
            self._view[:len(rest)] = rest
            self._begin, self._end = 0, len(rest)

    @property
    def has_hung_up(self) -> bool:
        """Whether the other end has stopped sending, even if not all of it was read."""
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def shutdown_writing(self) -> None:
        """Tell the other end that no frame follows; reading goes on."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._outbox.clear()
        self.sock.close()
