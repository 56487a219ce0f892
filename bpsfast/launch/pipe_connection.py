"""Messages over two pipes: ssh's standard input and output, as the launcher and the agent of a host have them.

A message is its length (4 bytes, little endian) and MessagePack. What a login script prints before the agent speaks
is no message: the agent's first bytes are a mark that no text has in it, and whatever comes before is kept as `noise`.
"""
from __future__ import annotations

import os
import struct
from typing import Any

import msgspec

from ..orchestration.errors import DECODE_ERRORS, ProtocolError

#: No part of it is both its beginning and its end, so it is found at once, whatever stands before it.
MARK = b"\x00\xffbpsfast agent\xff\xfe"
_LENGTH = struct.Struct("<I")
_LARGEST_NBYTES = 16 << 20
_READ_NBYTES = 1 << 16
_NOISE_NBYTES = 1 << 16


class PipeConnection:
    """One end. Neither side ever waits for the other: what a pipe does not take now stays here until `flush`.

    Parameters
    ----------
    source, target
        Descriptors to read and write; the caller's, and made non-blocking here.
    messages
        The union of what may come.
    after_mark
        Whether the other side's messages begin behind the mark. (This side's `mark` sends one.)
    """

    def __init__(self, source: int, target: int, messages: Any, after_mark: bool) -> None:
        self.source = source
        self.target = target
        self._noise = b""
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._awaits_mark = after_mark
        self._came = bytearray()
        self._leaves = bytearray()
        for fd in (source, target):
            os.set_blocking(fd, False)

    @property
    def noise(self) -> bytes:
        """What came before the mark, its end if it was long."""
        return self._noise + self._came if self._awaits_mark else self._noise

    @property
    def pending_nbytes(self) -> int:
        """Bytes that wait for the pipe."""
        return len(self._leaves)

    def mark(self) -> None:
        """Send the mark that messages follow."""
        self._leaves += MARK

    def send(self, message: Any) -> None:
        """Append *message* to what leaves, and let the pipe take what it takes; see `flush`."""
        data = msgspec.msgpack.encode(message)
        self._leaves += _LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes now.

        Raises
        ------
        BrokenPipeError
            If nobody reads any more.
        """
        while self._leaves:
            try:
                n_written = os.write(self.target, self._leaves[:_READ_NBYTES])
            except BlockingIOError:
                return
            del self._leaves[:n_written]

    def receive(self) -> list[Any]:
        """Return the messages that one read completes.

        Raises
        ------
        EOFError
            The other side has closed the line.
        ProtocolError
            Bytes that are no message of this version.
        """
        try:
            data = os.read(self.source, _READ_NBYTES)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        self._came += data
        if self._awaits_mark:
            self._drop_noise()
        found: list[Any] = []
        while not self._awaits_mark and (message := self._next()) is not None:
            found.append(message)
        return found

    def _drop_noise(self) -> None:
        before, mark, after = bytes(self._came).partition(MARK)
        # of what may be the beginning of the mark nothing is noise yet
        kept = 0 if mark else min(len(before), len(MARK) - 1)
        self._noise = (self._noise + before[:len(before) - kept])[-_NOISE_NBYTES:]
        self._came = bytearray(after if mark else before[len(before) - kept:])
        self._awaits_mark = not mark

    def _next(self) -> Any:
        if len(self._came) < _LENGTH.size:
            return None
        nbytes = _LENGTH.unpack_from(self._came)[0]
        if nbytes > _LARGEST_NBYTES:
            raise ProtocolError(f"a message of {nbytes} bytes was announced: something else writes to this line")
        end = _LENGTH.size + nbytes
        if len(self._came) < end:
            return None
        data = bytes(self._came[_LENGTH.size:end])
        del self._came[:end]
        try:
            return self._decoder.decode(data)
        except DECODE_ERRORS as exc:
            raise ProtocolError(f"a message cannot be read ({exc}): other version, or something else writes to this "
                                "line") from exc
