"""Describes compressed partitions to the node's summing engine; saves and loads their state between rounds.

A saved state: a fingerprint of what it belongs to (node, layout, codec), then for each partition the six words of
`Engine.codec_words` and the arrays of `CodedPart`.
"""
from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ..orchestration import codec
from ..orchestration.codec import CodecSpec
from ..orchestration.errors import MismatchError
from ..orchestration.placement.partition import ITEM_NBYTES
from ..pyx.engine import Engine

_HEADER = struct.Struct("<8sQ")
_MAGIC = b"BPSCODE1"
_WORDS = struct.Struct("<6Q")


class CodedPart(NamedTuple):
    """One compressed partition on this node, with (address, nbytes) of each of its arrays."""

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
        layout = [(part.offset, part.nbytes, part.owned) for part in parts]
        self._fingerprint = zlib.crc32(msgspec.msgpack.encode((node, codec, dtype, layout)))

    @property
    def nbytes(self) -> int:
        """Bytes of the saved state."""
        return _HEADER.size + sum(_WORDS.size + sum(nbytes for _, nbytes in part.arrays) for part in self._parts)

    def save(self, address: int) -> None:
        """Write the state to *address*, where there are `nbytes`."""
        at = address
        for data in (_HEADER.pack(_MAGIC, self._fingerprint), *self._pieces()):
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
        """Load the state from *nbytes* at *address*.

        Raises `MismatchError` if it is not the state of this unit with its present partitions, codec and owners;
        nothing has changed.
        """
        if nbytes != self.nbytes:
            raise MismatchError(f"the state has {nbytes} bytes, but {self.nbytes} on node {self._node}: it belongs to "
                                "another job, node or compression")
        magic, fingerprint = _HEADER.unpack(ctypes.string_at(address, _HEADER.size))
        if (magic, fingerprint) != (_MAGIC, self._fingerprint):
            raise MismatchError(f"the state is not one of node {self._node} of this job: each node saves and loads its "
                                "own, with the same ranks, partitions and compression")
        at = address + _HEADER.size
        for part in self._parts:
            self._engine.codec_words(part.part, _WORDS.unpack(ctypes.string_at(at, _WORDS.size)))
            at += _WORDS.size
            for destination, length in part.arrays:
                ctypes.memmove(destination, at, length)
                at += length


class PartCodec(NamedTuple):
    """The codec of one partition; addresses, or 0. `pyx/codec.h` explains each.

    `width`: bytes of an element while it is compressed. `frame`: where a member's partial is encoded. `frames`: of the
    results by parity. `results`: where a member decodes them. `error`, `momentum`, `error_back`: states, which have as
    many elements.
    """

    encode: int
    decode: int
    feed: int
    feed_back: int
    divide: int
    narrow: int
    width: int
    room_nbytes: int
    scratch_nbytes: int
    k: int
    flags: int
    mu: float
    seed: int
    frame: int = 0
    frames: tuple[int, int] = (0, 0)
    results: tuple[int, int] = (0, 0)
    error: int = 0
    momentum: int = 0
    error_back: int = 0


def part_codec(spec: CodecSpec, dtype: str, n_elements: int) -> PartCodec:
    """Return the codec of a partition of *n_elements* of *dtype*, without memory. Compiles its kernels if need be."""
    from ..kernels.codecs import codec_kernels

    width = codec.width_of(dtype)
    at = codec_kernels.addresses(spec, dtype)
    return PartCodec(
        encode=at.encode, decode=at.decode, feed=at.feed, feed_back=at.feed_wide, divide=at.divide,
        narrow=at.narrow if width != ITEM_NBYTES[dtype] else 0, width=width,
        room_nbytes=codec.frame_nbytes(spec, n_elements, dtype), k=codec.count(spec, n_elements),
        scratch_nbytes=codec_kernels.scratch_nbytes(spec, n_elements, dtype), flags=codec.flags_of(spec),
        mu=spec.momentum, seed=spec.seed)
