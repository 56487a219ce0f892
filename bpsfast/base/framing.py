"""Length-prefixed MessagePack messages on byte streams: local sockets, ssh pipes, TCP of `bpsfast doctor` and `perf`.

A frame is a little-endian 32-bit word, then a MessagePack message. The word is the message's length; a protocol may use
its highest bits as a tag.
"""
from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from ..orchestration.errors import DECODE_ERRORS, ProtocolError

_WORD = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()

M = TypeVar("M")


class Frames(Generic[M]):
    """Packs messages into frames, and cuts bytes that have arrived into messages. No I/O; not thread-safe.

    *decode* turns the bytes of a frame into a message. Errors name the sender, *source*, and the likely cause, *hint*.
    Messages longer than *max_nbytes* are refused as soon as they are announced. The *tag_bits* highest bits of the word
    are a tag.
    """

    def __init__(self, decode: Callable[[bytes], M], source: str, hint: str = "",
                 max_nbytes: int = 16 << 20, tag_bits: int = 0) -> None:
        self.max_nbytes = max_nbytes
        #: The tag of the message that `next` returned last.
        self.tag = 0
        self._decode = decode
        self._source = source
        self._hint = f": {hint}" if hint else ""
        self._length_bits = 32 - tag_bits
        self._buffer = bytearray()

    def pack(self, message: Any, tag: int = 0) -> bytes:
        """Return the frame of *message*; `ProtocolError` if it is too long."""
        data = _ENCODER.encode(message)
        if len(data) >> self._length_bits:
            raise ProtocolError(f"{type(message).__name__} of {len(data)} bytes does not fit one frame (less than "
                                f"{1 << self._length_bits} bytes)")
        return _WORD.pack(len(data) | tag << self._length_bits) + data

    def feed(self, data: bytes) -> None:
        """Take *data*, which has arrived."""
        self._buffer += data

    def next(self) -> M | None:
        """Return the next message; None if it has not arrived whole.

        Raises `ProtocolError` if it is too long, or no message: nothing more can be read from this stream.
        """
        if len(self._buffer) < _WORD.size:
            return None
        (word,) = _WORD.unpack_from(self._buffer)
        nbytes = word & (1 << self._length_bits) - 1
        if nbytes > self.max_nbytes:  # before it arrives, so that this process need not hold it
            raise ProtocolError(f"{self._source} announces {nbytes} bytes, at most {self.max_nbytes} are taken"
                                f"{self._hint}")
        end = _WORD.size + nbytes
        if len(self._buffer) < end:
            return None
        data = bytes(memoryview(self._buffer)[_WORD.size:end])
        del self._buffer[:end]
        self.tag = word >> self._length_bits
        try:
            return self._decode(data)
        except DECODE_ERRORS as exc:
            raise ProtocolError(f"{nbytes} bytes of {self._source} are no message ({exc}){self._hint}") from exc
