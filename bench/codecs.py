"""``bpsfast bench codecs``: the speed of gradient codecs on one thread, relative to memcpy of the tensor's bytes.

A tensor is a partition of 4 MB of normally distributed numbers. Its operands come from DRAM: calls use the tensors of a
pool that is several times as large as the last-level cache. Contestants (memcpy, encode with and without error
feedback, decode, decode and add) take turns, so that other load on the machine affects all of them; figures are
medians. A ratio is memcpy's time divided by the contestant's: 1 is as fast as copying. #wrong counts the bytes of a
smaller tensor's frame, and its decoded elements, that differ from the reference codec in NumPy.
"""
from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bpsfast.bench.harness import table
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.cold_memory import last_level_nbytes, page_aligned
from bpsfast.kernels.codecs import codec_kernels, codec_reference
from bpsfast.orchestration.codec import FRAME_NBYTES, CodecSpec, count, flags_of, frame_nbytes

CODECS = {
    "onebit": CodecSpec(kind="onebit"),
    "topk 1%": CodecSpec(kind="topk", k=0.01),
    "topk 10%": CodecSpec(kind="topk", k=0.1),
    "randomk 1%": CodecSpec(kind="randomk", k=0.01),
    "dithering 4": CodecSpec(kind="dithering", k=4),
    "dithering 4 l2": CodecSpec(kind="dithering", k=4, l2=True),
    "dithering 4 natural": CodecSpec(kind="dithering", k=4, natural=True),
    "float16": CodecSpec(kind="float16"),
    "bfloat16": CodecSpec(kind="bfloat16"),
    "int8": CodecSpec(kind="int8"),
}
CONTESTANTS = ("memcpy", "encode", "encode, error feedback", "decode", "decode, add")
TENSOR_NBYTES = 4 << 20
_CHECKED_NBYTES = 256 << 10  # the reference codec is slow
_LAST_LEVEL_SHARE = 3  # size of a pool, in sizes of the last-level cache
_QUICK = ("onebit", "topk 1%", "float16")

_ENCODE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
                           ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_DECODE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 4,
                           ctypes.c_void_p)


@dataclass
class Row:
    """Results of one contestant of one codec: seconds per tensor, and bytes of the frame."""

    codec: str
    dtype: str
    contestant: str
    wire_nbytes: int
    n_wrong: int = 0
    samples_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)


class Tensors:
    """A pool of tensors with buffers for the results, and the kernels of one codec that use them."""

    def __init__(self, codec: CodecSpec, dtype: str, n_tensors: int, tensor_nbytes: int = TENSOR_NBYTES) -> None:
        self.codec, self.dtype = codec, dtype
        wide = codec_reference.wide_dtype(dtype)
        self.n = tensor_nbytes // wide.itemsize
        values = np.random.default_rng(1).standard_normal(self.n).astype(wide)
        self.sources = [page_aligned(tensor_nbytes).view(wide) for _ in range(n_tensors)]
        self.targets = [page_aligned(tensor_nbytes).view(wide) for _ in range(n_tensors)]
        for source, target in zip(self.sources, self.targets):
            source[:], target[:] = values, 0
        self.room = frame_nbytes(codec, self.n, dtype) - FRAME_NBYTES
        self.wires = [page_aligned(self.room) for _ in range(n_tensors)]
        self.nbytes = [0] * n_tensors
        self.scratch = page_aligned(codec_kernels.scratch_nbytes(codec, self.n, dtype))
        self.generator = np.full(2, codec.seed, np.uint64)
        at = codec_kernels.addresses(codec, dtype)
        self._encode, self._decode = _ENCODE(at.encode), _DECODE(at.decode)
        self._k, self._flags = count(codec, self.n), flags_of(codec)
        for i in range(n_tensors):
            self.encode(i, False)

    def contestants(self) -> dict[str, Callable[[int], None]]:
        """Return the functions to time by name; their argument is the index of a tensor."""
        return {
            "memcpy": self.copy,
            "encode": lambda i: self.encode(i, False),
            "encode, error feedback": lambda i: self.encode(i, True),
            "decode": lambda i: self.decode(i, False),
            "decode, add": lambda i: self.decode(i, True),
        }

    def copy(self, i: int) -> None:
        """Copy a tensor."""
        ctypes.memmove(self.targets[i].ctypes.data, self.sources[i].ctypes.data, self.sources[i].nbytes)

    def encode(self, i: int, keeps_error: bool) -> None:
        """Encode a tensor into its frame; with *keeps_error*, also store the error."""
        self.nbytes[i] = self._encode(self.wires[i].ctypes.data, self.room, self.sources[i].ctypes.data, self.n,
                                      self.targets[i].ctypes.data if keeps_error else None, self.generator.ctypes.data,
                                      self._k, self._flags, self.scratch.ctypes.data)

    def decode(self, i: int, adds: bool) -> None:
        """Decode a tensor's frame."""
        self._decode(self.targets[i].ctypes.data, self.n, self.wires[i].ctypes.data, self.nbytes[i], self._k,
                     self._flags, int(adds), self.scratch.ctypes.data)

    def n_wrong(self) -> int:
        """Count elements of one decoded tensor, and bytes of its frame, that differ from the reference codec."""
        want = codec_reference.Generator(self.codec.seed)
        self.generator[:] = want.words
        self.encode(0, False)
        self.decode(0, False)
        frame = codec_reference.encode(self.codec, self.sources[0], want)
        decoded = codec_reference.decode(self.codec, frame, self.n, self.dtype)
        found = self.wires[0][: self.nbytes[0]]
        if found.size != len(frame):
            return self.n
        return int((found != np.frombuffer(frame, np.uint8)).sum() + (decoded != self.targets[0]).sum())


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure with *options* (quick, n_rounds, json_path; all may be None), print a table, return the records."""
    given = BenchRun("codecs", options)
    names = _QUICK if given.quick else tuple(CODECS)
    rows: list[Row] = []
    for dtype in ("float32",) if given.quick else ("float32", "float64"):
        for name in names:
            rows += measure(name, dtype, given.rounds(8, quick=2), _n_tensors())
    print(report(rows))
    return given.finish([_record(row, _ratio(row, rows)) for row in rows])


def measure(name: str, dtype: str, n_rounds: int, n_tensors: int) -> list[Row]:
    """Time one codec's contestants in *n_rounds* turns with a pool of *n_tensors*."""
    tensors = Tensors(CODECS[name], dtype, n_tensors)
    n_wrong = Tensors(CODECS[name], dtype, 1, _CHECKED_NBYTES).n_wrong()
    rows = {each: Row(name, dtype, each, tensors.nbytes[0], n_wrong) for each in CONTESTANTS}
    order = list(tensors.contestants().items())
    for turn in range(-1, n_rounds):  # turn -1 warms up code and page tables
        random.shuffle(order)
        for contestant, call in order:
            for i in range(n_tensors):
                begin = time.perf_counter()
                call(i)
                elapsed_s = time.perf_counter() - begin
                if turn >= 0:
                    rows[contestant].samples_s.append(elapsed_s)
    return list(rows.values())


def report(rows: list[Row]) -> str:
    """Return the table with a line for each codec and dtype."""
    lines: list[tuple[str, ...]] = [("codec", "dtype", "bytes of 100", "memcpy us", *CONTESTANTS[1:], "#wrong")]
    for row in rows:
        if row.contestant == "memcpy":
            ours = [each for each in rows if (each.codec, each.dtype) == (row.codec, row.dtype)]
            ratios = [f"{_ratio(each, rows):.2f}" for each in ours if each.contestant != "memcpy"]
            lines.append((row.codec, row.dtype, f"{100 * row.wire_nbytes / TENSOR_NBYTES:.2f}",
                          f"{row.median_s * 1e6:.0f}", *ratios, str(row.n_wrong)))
    return f"{table.plain(lines)}\n(times of memcpy's speed, in bytes of the tensor)"


def _record(row: Row, ratio: float) -> dict[str, Any]:
    return {
        "section": "codecs",
        "chosen": {"codec": row.codec, "dtype": row.dtype, "contestant": row.contestant, "nbytes": TENSOR_NBYTES},
        "measured": {"median_s": row.median_s, "of_memcpy": ratio, "wire_nbytes": row.wire_nbytes,
                     "n_wrong": row.n_wrong, "samples_s": row.samples_s},
    }


def _ratio(row: Row, rows: list[Row]) -> float:
    """Return memcpy's time divided by this row's, for the same codec."""
    copy = next(each for each in rows if (each.codec, each.dtype, each.contestant) == (row.codec, row.dtype, "memcpy"))
    return copy.median_s / row.median_s


def _n_tensors() -> int:
    """Return how many tensors exceed the caches."""
    return max(4, _LAST_LEVEL_SHARE * last_level_nbytes() // (2 * TENSOR_NBYTES))
