"""Chunk streams: carry collectives of any size, chunk by chunk, through a few partitions that node processes sum.

A gradient has a unit of its own, declared once and summed in every step. The arguments of collectives change with every
call, so a stream is declared instead, and the bytes of a call are split into chunks that use its partitions in turn:
chunk c of the stream's life is partition c mod n, round c div n + 1. All members split alike. There are three chunk
sizes, so that few bytes have low latency and many bytes need few chunks.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..base.dtypes import TABLE
from ..orchestration.messages import TensorSpec
from ..orchestration.placement.partition import round_after
from ..pyx.port import FINGERPRINT
from ..trainer.chunk_descriptors import chunk_table, offsets, results
from ..trainer.session import Session


class ChunkSize(NamedTuple):
    """Bytes of a chunk, and how many chunks may be in a stream at once."""

    name: str
    chunk_nbytes: int
    n_chunks: int


TINY = ChunkSize("tiny", 4 << 10, 32)
SMALL = ChunkSize("small", 64 << 10, 16)
#: Within one machine few chunks, which stay in the caches; between machines enough to fill the links.
WIDE_WITHIN = ChunkSize("wide", 256 << 10, 8)
WIDE_BETWEEN = ChunkSize("wide", 512 << 10, 32)
#: Call fingerprints have a stream of their own: where calls differ, so do their chunks.
FINGERPRINTS = ChunkSize("fingerprints", 4 << 10, 32)
#: A tail of more tiny chunks than this takes one small chunk: a chunk costs more than its bytes.
_MOST_TINY = 1
#: Collectives go before gradients: their callers are blocked.
PRIORITY = 1 << 20


def chunk_sizes(is_within: bool) -> tuple[ChunkSize, ChunkSize, ChunkSize]:
    """Return the chunk sizes, largest first, for a job within one machine or not."""
    return (WIDE_WITHIN if is_within else WIDE_BETWEEN), SMALL, TINY


def split(nbytes: int, wide: ChunkSize) -> list[tuple[ChunkSize, int]]:
    """Return how many chunks of each size *nbytes* take, largest first; the last chunk may be short."""
    found = []
    if nbytes >= wide.chunk_nbytes:
        found.append((wide, nbytes // wide.chunk_nbytes))
        nbytes %= wide.chunk_nbytes
    n_small, rest = divmod(nbytes, SMALL.chunk_nbytes)
    n_tiny = -(-rest // TINY.chunk_nbytes)
    if n_tiny > _MOST_TINY:
        n_small, n_tiny = n_small + 1, 0
    if n_small:
        found.append((SMALL, n_small))
    if n_tiny:
        found.append((TINY, n_tiny))
    return found


class ChunkStream:
    """One stream of *session*; the ranks of *spec* make the same calls in the same order. One thread at a time.

    The constructor waits until all of them have declared it, at most *timeout_s*. Raises as `TensorRegistry.unit`.
    """

    def __init__(self, session: Session, spec: TensorSpec, timeout_s: float) -> None:
        session.tensors.declare([spec])
        self.unit = unit = session.tensors.unit(spec.name, timeout_s)
        self._next = 0
        self._first_round = np.uint64(unit.first_round)
        self._descriptors = chunk_table(unit, unit.staging, offsets(unit))
        self._results = results(unit)

    def chunks(self, n: int) -> np.ndarray[Any, Any]:
        """Return the descriptors of the next *n* chunks, without source, destination and size."""
        if n == 1:
            return self._next_chunk()
        numbers = np.arange(self._next, self._next + n, dtype=np.uint64)
        self._next += n
        parts = (numbers % np.uint64(self.unit.n_parts)).astype(np.intp)
        chunks = self._descriptors[parts]
        chunks["round"] = rounds = numbers // np.uint64(self.unit.n_parts) + self._first_round
        chunks["result"] = self._results[(rounds & np.uint64(1)).astype(np.intp), parts]
        return chunks

    def _next_chunk(self) -> np.ndarray[Any, Any]:
        """Return the descriptor of the next chunk: as `chunks`, without the cost of vector operations."""
        number, part = divmod(self._next, self.unit.n_parts)
        self._next += 1
        chunks = self._descriptors[part:part + 1].copy()
        chunks["round"] = round_ = round_after(self.unit.first_round, number)
        chunks["result"] = self._results[round_ & 1, part]
        return chunks

    def fingerprint(self, words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a chunk that compares the two 64-bit *words* of all members: the stream combines them by "band"."""
        chunks = self.chunks(1)
        chunks["source"], chunks["nbytes"], chunks["flags"] = words.ctypes.data, words.nbytes, FINGERPRINT
        return chunks

    def close(self) -> None:
        """Retire the stream; its memory is free when all members have. No call may be under way on any member."""
        self.unit.session.retire([self.unit], releases_staging=True)


def spec_of(name: str, ranks: tuple[int, ...], dtype: str, op: str, size: ChunkSize) -> TensorSpec:
    """Return the declaration of the stream of this *size* for *op* ("avg": an averaged sum) of *dtype*."""
    n = size.n_chunks * size.chunk_nbytes // TABLE[dtype].itemsize
    return TensorSpec(name=f"{name}/{dtype}.{op}.{size.name}", dtype=dtype, shape=(n,), average=op == "avg",
                      op="sum" if op == "avg" else op, ranks=ranks, priority=PRIORITY,
                      partition_nbytes=size.chunk_nbytes, separate=True)
