"""A connection between two posts: frames in order, both ways, on a stream socket that never blocks."""
from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from typing import Protocol

from ...orchestration.errors import PeerLostError
from .encrypted_socket import EncryptedSocket
from .protocol import DATA, EAGER_NBYTES, HEADER, Frame, unpack

_STAGING_NBYTES = 64 << 10
#: Taken from one connection, or given to it, before others have their turn.
_TURN_NBYTES = 4 << 20
_MOST_BUFFERS = 16


class FrameHandler(Protocol):
    """Who a link belongs to."""

    def handle_frame(self, frame: Frame, payload: memoryview) -> None:
        """Act on *frame*; *payload* is only valid until this returns. May raise `ProtocolError`."""

    def sink(self, frame: Frame) -> memoryview:
        """Return where the payload of a DATA frame goes; `handle_frame` is called when it is there."""

    def next_piece(self) -> tuple[Frame, memoryview] | None:
        """Return the next DATA frame, when nothing else is to be sent."""

    def sent(self, frame: Frame) -> None:
        """Note that the kernel has taken all of a DATA frame."""


class FrameSocket:
    """Owns *sock*. Not thread-safe: used under the post's lock. Everything raises `PeerLostError` once it is broken."""

    def __init__(self, sock: socket.socket, talker: FrameHandler) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._talker = talker
        self._outbox: deque[memoryview] = deque()
        self._piece: Frame | None = None  # the DATA frame that ends the outbox
        self._staging = bytearray(_STAGING_NBYTES)
        self._view = memoryview(self._staging)
        self._begin = self._end = 0
        self._sink = memoryview(b"")
        self._sinking: Frame | None = None

    @property
    def backlog(self) -> bool:
        """Whether something waits until the socket takes more."""
        return bool(self._outbox)

    def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        """Send *frame* as far as the socket takes it, and keep a copy of the rest: *payload* is the caller's again."""
        buffers = [memoryview(frame.pack())]
        if payload:
            buffers.append(payload)
        if not self._outbox:
            buffers = self._write(buffers)
        self._outbox += [memoryview(bytes(buffer)) for buffer in buffers]

    def flush(self) -> None:
        """Send what the socket takes now, pieces included, up to a turn's share; `backlog` tells whether there is more.
        """
        budget = _TURN_NBYTES
        while True:
            if not self._outbox:
                if self._piece is not None:
                    piece, self._piece = self._piece, None
                    self._talker.sent(piece)
                following = self._talker.next_piece()
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
        """Write once or more; return what the socket did not take."""
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
        """Take what has arrived, up to a turn's share, and hand over every whole frame."""
        budget = _TURN_NBYTES
        while budget > 0 or (isinstance(self.sock, EncryptedSocket) and self.sock.is_pending):
            target = self._sink if self._sinking is not None else self._view[self._end:]
            try:
                n = self.sock.recv_into(target)
            except BlockingIOError:
                return
            except OSError as exc:
                raise PeerLostError(f"its connection broke: {exc}") from exc
            if not n:
                raise PeerLostError("its connection ended without a last word: its process has ended")
            budget -= n
            full = n == len(target)
            if self._sinking is not None:
                self._sunk(n)
            else:
                self._end += n
                self._cut()
            if not full and self._sinking is None:
                return

    def _sunk(self, n: int) -> None:
        self._sink = self._sink[n:]
        if not self._sink:
            frame, self._sinking = self._sinking, None
            assert frame is not None
            self._talker.handle_frame(frame, self._sink)

    def _cut(self) -> None:
        """Hand over what is whole in the staging buffer."""
        while self._sinking is None and self._end - self._begin >= HEADER.size:
            frame = unpack(self._staging, self._begin)
            start = self._begin + HEADER.size
            if frame.kind == DATA:
                self._begin = start
                self._sink, self._sinking = self._talker.sink(frame), frame
                n = min(self._end - start, frame.nbytes)
                self._sink[:n] = self._view[start:start + n]
                self._begin += n
                self._sunk(n)
                continue
            end = start + frame.n_payload
            if end > self._end:
                break
            self._begin = end
            self._talker.handle_frame(frame, self._view[start:end])
        if self._begin == self._end:
            self._begin = self._end = 0
        elif _STAGING_NBYTES - self._begin < HEADER.size + EAGER_NBYTES:  # a frame must find room behind what is there
            rest = bytes(self._view[self._begin:self._end])
            self._view[:len(rest)] = rest
            self._begin, self._end = 0, len(rest)

    @property
    def has_hung_up(self) -> bool:
        """Whether the other end sends nothing any more, even if not all that it has sent was read."""
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def shutdown_writing(self) -> None:
        """Tell the other end that nothing follows; it can still be read from."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self._outbox.clear()
        self.sock.close()
