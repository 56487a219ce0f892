"""A peer without the key that sends harmful messages to a listening socket, as many as requested.

A *message* is all bytes of one connection: malformed, truncated, reordered, replayed (real members' bytes), foreign
(those of another job's members), or of another protocol.
"""
from __future__ import annotations

import array
import contextlib
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence

from tests.support.listening_sockets import Listening

Recording = list[bytes]

#: Timeout of a connection: a full queue of the kernel answers after a second.
_CONNECT_S = 1.5
#: Pause after a connection that was not accepted.
_REST_S = 5.0
_ANSWER_S = 0.5
_SHARE_HEARD = 0.03
_SHARE_RESET = 0.7


class Stranger:
    """Sends messages to one *listening* socket: *own* recordings are of its job, *foreign* ones of another job.

    One thread. `said` counts messages by kind; `n_unheard` those that were not accepted; `answers` has all replies.
    """

    def __init__(self, listening: Listening, own: Sequence[Recording], foreign: Sequence[Recording], seed: int) -> None:
        self.listening = listening
        self.said: Counter[str] = Counter()
        self.n_unheard = 0
        self.answers = bytearray()
        self._own = own
        self._foreign = foreign
        self._random = random.Random(seed)
        self._rests_until = 0.0

    def throw(self, n: int) -> None:
        """Send *n* messages, each on a new connection."""
        kinds = (self._malformed, self._truncated, self._reordered, self._replayed, self._strange, self._other)
        for _ in range(n):
            if time.monotonic() < self._rests_until:
                self.n_unheard += 1
                continue
            make = self._random.choice(kinds)
            try:
                with self.listening.call(_CONNECT_S) as sock:
                    self._say(sock, make())
            except BlockingIOError:
                self._rests_until = time.monotonic() + _REST_S
                self.n_unheard += 1
            else:
                self.said[make.__name__[1:]] += 1

    def _say(self, sock: socket.socket, pieces: Recording) -> None:
        draw = self._random.random
        with contextlib.suppress(OSError):  # it may close the connection
            if sock.family == socket.AF_UNIX and draw() < 0.3:
                self._send_descriptors(sock, pieces[0] if pieces else b"x")
                pieces = pieces[1:]
            if draw() < 0.5:
                pieces = [b"".join(pieces)]
            for piece in pieces:
                sock.sendall(piece)
            if draw() < _SHARE_HEARD:
                self._hear(sock)
            elif draw() < _SHARE_RESET:  # otherwise close it normally
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _send_descriptors(self, sock: socket.socket, first: bytes) -> None:
        with open(os.devnull, "rb") as file:
            given = array.array("i", [file.fileno()] * self._random.choice((1, 3, 15, 100)))
            sock.sendmsg([first or b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)])

    def _hear(self, sock: socket.socket) -> None:
        sock.settimeout(_ANSWER_S)
        data, ancillary, _, _ = sock.recvmsg(1 << 16, socket.CMSG_SPACE(4 * 15))
        assert not ancillary, f"{self.listening.owner} passed descriptors to a stranger"
        self.answers += data

    # -- kinds of messages -----------------------------------------------------------------------------------------

    def _malformed(self) -> Recording:
        """Return a real message with some bytes changed, lengths among them."""
        pieces = [bytearray(piece) for piece in self._random.choice(self._own) if piece]
        for _ in range(self._random.randrange(1, 4)):
            piece = self._random.choice(pieces)
            piece[self._random.randrange(len(piece))] = self._random.choice((0, 0xff, self._random.randrange(256)))
        return [bytes(piece) for piece in pieces]

    def _truncated(self) -> Recording:
        whole = b"".join(self._random.choice(self._own))
        return [whole[:self._random.randrange(len(whole))]]

    def _reordered(self) -> Recording:
        pieces = [*self._random.choice(self._own), *self._random.choice(self._own)]
        self._random.shuffle(pieces)
        return pieces

    def _replayed(self) -> Recording:
        return self._random.choice(self._own)

    def _strange(self) -> Recording:
        return self._random.choice(self._foreign)

    def _other(self) -> Recording:
        """Return a message of another protocol."""
        draw = self._random
        return [draw.choice((
            b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00" + draw.randbytes(512),
            draw.randbytes(draw.randrange(1, 5000)), bytes(draw.randrange(1, 100_000)), b"\xff" * 4096,
            struct.pack("<I", draw.choice((0xfffffff, 1 << 31, 1 << 20))) + draw.randbytes(300),
        ))]
