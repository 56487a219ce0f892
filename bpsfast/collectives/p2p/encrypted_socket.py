"""A stream socket between two ranks that encrypts everything that it sends (setting encryption), for their messages.

A `FrameSocket` uses it as a socket.

    record   length of the plaintext 4, little endian | ciphertext | tag 16

The length is not encrypted: a record with a changed length fails to decrypt.
"""
from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Any

from ...base.encryption import Seals
from ...pyx.seal import RECORD_NBYTES, TAG_NBYTES

_LENGTH_NBYTES = 4


class EncryptedSocket(socket.socket):
    """A socket over *sock*, which it owns. `sendmsg`, `send`, `recv_into` and `recv` encrypt; no other method may be
    used.

    The latter two raise `OSError` EBADMSG for data that the peer has not encrypted; then the connection is unusable.
    """

    def __init__(self, sock: socket.socket, seals: Seals) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self._seals = seals
        self._unsent = memoryview(b"")
        self._n_accepted = 0
        self._record = bytearray()
        self._plain = memoryview(b"")

    @property
    def is_pending(self) -> bool:
        """Whether decrypted bytes wait to be read: polling the descriptor does not show them."""
        return bool(self._plain)

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None) -> int:
        """Encrypt and send one record from the start of *buffers*; return how many of their bytes were sent.

        After a `BlockingIOError` call again with the same bytes, which are encrypted already; more may follow them.
        """
        if not self._unsent:
            plain = _first(buffers)
            if not plain:
                return 0  # an empty record would be taken for the end
            self._n_accepted = len(plain)
            self._unsent = memoryview(len(plain).to_bytes(_LENGTH_NBYTES, "little") + self._seals.out.close(plain))
        self._unsent = self._unsent[super().send(self._unsent, flags):]
        if self._unsent:
            raise BlockingIOError(errno.EAGAIN, "a record was sent in part")
        return self._n_accepted

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive into *buffer*, at most one record; 0 at the end."""
        if not self._plain and not self._receive_record(flags):
            return 0
        target = memoryview(buffer).cast("B")
        n = min(len(self._plain), nbytes or len(target))
        target[:n] = self._plain[:n]
        self._plain = self._plain[n:]
        return n

    def send(self, data: Any, flags: int = 0) -> int:
        """Send *data*, which must fit into the kernel's buffer: for the first byte of a connection."""
        return self.sendmsg([memoryview(data)], (), flags)

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        """Return at most *nbytes* of one record; nothing at the end."""
        data = bytearray(nbytes)
        return bytes(data[:self.recv_into(data, nbytes, flags)])

    def _receive_record(self, flags: int) -> bool:
        while (missing := self._n_missing()) > 0:
            data = super().recv(missing, flags)
            if not data:
                return False
            self._record += data
        try:
            self._plain = memoryview(self._seals.incoming.open(self._record[_LENGTH_NBYTES:]))
        except ValueError as exc:
            raise OSError(errno.EBADMSG, str(exc)) from exc
        self._record.clear()
        return True

    def _n_missing(self) -> int:
        have = len(self._record)
        if have < _LENGTH_NBYTES:
            return _LENGTH_NBYTES - have
        nbytes = int.from_bytes(self._record[:_LENGTH_NBYTES], "little")
        if not 0 < nbytes <= RECORD_NBYTES:
            raise OSError(errno.EBADMSG, f"a record of {nbytes} bytes, of 1 to {RECORD_NBYTES}")
        return _LENGTH_NBYTES + nbytes + TAG_NBYTES - have


def _first(buffers: Sequence[memoryview]) -> bytes:
    """Return the first bytes of *buffers*, as many as a record has room for."""
    pieces, room = [], RECORD_NBYTES
    for buffer in buffers:
        pieces.append(bytes(buffer[:room]))
        room -= len(pieces[-1])
        if not room:
            break
    return b"".join(pieces)
