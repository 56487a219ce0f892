"""What compressed units keep from round to round on this node: to be saved with a model, and loaded again.

A saved state: a mark of what it is of (node, cut, codec), then for each partition the six words of
`Engine.codec_words` and the arrays of `CodedPart`.
"""
from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ..orchestration.codec import CodecSpec
from ..orchestration.errors import MismatchError
from ..pyx.engine import Engine

_MARK = struct.Struct("<8sQ")
_MAGIC = b"BPSCODE1"
_WORDS = struct.Struct("<6Q")


class CodedPart(NamedTuple):
    """One compressed partition here: what it is, and (address, nbytes) of each of its arrays."""

    part: int
    offset: int
    nbytes: int
    owned: bool
    arrays: tuple[tuple[int, int], ...]


class CodedState:
    """The state of one unit on node *node*, of *parts* compressed by *codec*. Only while nothing of it is under way."""

    def __init__(self, engine: Engine, node: int, codec: CodecSpec, dtype: str, parts: Sequence[CodedPart]) -> None:
        self._engine = engine
        self._node = node
        self._parts = parts
        cut = [(part.offset, part.nbytes, part.owned) for part in parts]
        self._mark = zlib.crc32(msgspec.msgpack.encode((node, codec, dtype, cut)))

    @property
    def nbytes(self) -> int:
        """Bytes of the saved state."""
        return _MARK.size + sum(_WORDS.size + sum(nbytes for _, nbytes in part.arrays) for part in self._parts)

    def save(self, address: int) -> None:
        """Write the state to *address*, where there are `nbytes`."""
        at = address
        for data in (_MARK.pack(_MAGIC, self._mark), *self._pieces()):
            if isinstance(data, bytes):
                ctypes.memmove(at, data, len(data))
                at += len(data)
            else:
                ctypes.memmove(at, *data)
                at += data[1]

    def _pieces(self) -> list[bytes | tuple[int, int]]:
        pieces: list[bytes | tuple[int, int]] = []
        for part in self._parts:
            pieces += [_WORDS.pack(*self._engine.codec_words(part.part)), *part.arrays]
        return pieces

    def load(self, address: int, nbytes: int) -> None:
        """Take the state from *nbytes* at *address*.

        Raises
        ------
        MismatchError
            If they are no state of this unit as it is cut, compressed and owned here; nothing has changed.
        """
        if nbytes != self.nbytes:
            raise MismatchError(f"the state has {nbytes} bytes, on node {self._node} it has {self.nbytes}: it is of "
                                "another job, node or compression")
        magic, mark = _MARK.unpack(ctypes.string_at(address, _MARK.size))
        if (magic, mark) != (_MAGIC, self._mark):
            raise MismatchError(f"the state is not one of node {self._node} of this job: each node saves and loads its "
                                "own, with the same ranks, partitions and compression")
        at = address + _MARK.size
        for part in self._parts:
            self._engine.codec_words(part.part, _WORDS.unpack(ctypes.string_at(at, _WORDS.size)))
            at += _WORDS.size
            for destination, length in part.arrays:
                ctypes.memmove(destination, at, length)
                at += length
