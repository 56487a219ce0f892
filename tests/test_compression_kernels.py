"""The kernels of compression against their NumPy reading, bit for bit."""
from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.compression import kernels, reading
from bpsfast.compression.flags import flags_of
from bpsfast.orchestration.codec import FRAME_NBYTES, CodecSpec, count, frame_nbytes
from bpsfast.orchestration.errors import UnsupportedError

CODECS = [
    CodecSpec(kind="onebit"),
    CodecSpec(kind="onebit", scaled=False),
    CodecSpec(kind="topk", k=0.01),
    CodecSpec(kind="topk", k=7),
    CodecSpec(kind="topk", k=0.5),
    CodecSpec(kind="randomk", k=0.01, seed=3),
    CodecSpec(kind="randomk", k=9, seed=(1 << 64) - 1),
    CodecSpec(kind="randomk", k=0.5, seed=77),
    CodecSpec(kind="dithering", k=1, seed=5),
    CodecSpec(kind="dithering", k=127, seed=6),
    CodecSpec(kind="dithering", k=1 << 20, l2=True, seed=7),
    CodecSpec(kind="dithering", k=4, natural=True, seed=8),
    CodecSpec(kind="dithering", k=30, natural=True, l2=True, seed=9),
    CodecSpec(kind="float16"),
    CodecSpec(kind="bfloat16"),
    CodecSpec(kind="int8"),
]
DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SIZES = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1000, 1025, 4099]

codecs = st.sampled_from(CODECS)
wides = st.sampled_from(["float32", "float64"])
dtypes = st.sampled_from(list(DTYPES))
sizes = st.sampled_from(SIZES) | st.integers(0, 3000)
seeds = st.integers(0, 2**32)
patterns = st.sampled_from(["moderate", "mixed", "bits", "equal", "zeros", "tiny", "few", "infinite"])

_I64, _PTR, _F64 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_ENCODE = ctypes.CFUNCTYPE(_I64, _PTR, _I64, _PTR, _I64, _PTR, _PTR, _I64, _I64, _PTR)
_DECODE = ctypes.CFUNCTYPE(_I64, _PTR, _I64, _PTR, _I64, _I64, _I64, _I64, _PTR)
_FEED = ctypes.CFUNCTYPE(None, _PTR, _PTR, _PTR, _PTR, _I64, _F64, _F64)
_DIVIDE = ctypes.CFUNCTYPE(None, _PTR, _I64, _F64)
_NARROW = ctypes.CFUNCTYPE(None, _PTR, _PTR, _I64)
_GUARD = 0xA5


class Kernels:
    """The kernels of one codec and dtype on NumPy arrays; whatever they must leave alone is checked."""

    def __init__(self, codec: CodecSpec, dtype: str, n: int) -> None:
        self.codec, self.n = codec, n
        self.wide = reading.wide_dtype(dtype)
        self.room = frame_nbytes(codec, n, dtype) - FRAME_NBYTES
        self.at = kernels.addresses(codec, dtype)
        self.scratch = np.full(kernels.scratch_nbytes(codec, n, dtype) + 64, _GUARD, np.uint8)
        self.words = np.array([codec.seed, codec.seed], np.uint64)

    def encode(self, x: np.ndarray, error: np.ndarray | None = None, room: int | None = None) -> bytes | None:
        room = self.room if room is None else room
        wire = np.full(-(-(room + 64) // 8), _GUARD * 0x0101010101010101, np.uint64).view(np.uint8)
        written = _ENCODE(self.at.encode)(wire.ctypes.data, room, x.ctypes.data, self.n,
                                          None if error is None else error.ctypes.data, self.words.ctypes.data,
                                          count(self.codec, self.n), flags_of(self.codec), self.scratch.ctypes.data)
        self._check_scratch()
        assert (wire[room:] == _GUARD).all()
        assert -1 <= written <= room
        return None if written < 0 else wire[:written].tobytes()

    def decode(self, frame: bytes, out: np.ndarray, add: bool) -> int:
        wire = np.zeros(-(-len(frame) // 8), np.uint64).view(np.uint8)
        wire[: len(frame)] = np.frombuffer(frame, np.uint8)
        found = _DECODE(self.at.decode)(out.ctypes.data, self.n, wire.ctypes.data, len(frame),
                                        count(self.codec, self.n), flags_of(self.codec), add, self.scratch.ctypes.data)
        self._check_scratch()
        return int(found)

    def _check_scratch(self) -> None:
        assert (self.scratch[-64:] == _GUARD).all()


def draw_values(pattern: str, n: int, dtype: np.dtype, seed: int) -> np.ndarray:
    """Return *n* elements; each pattern is one that something goes wrong with first."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    values = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4)
    if pattern == "equal":
        values = np.where(rng.integers(0, 2, n), 0.75, -0.75)
    elif pattern == "zeros":
        values = np.where(rng.integers(0, 2, n), 0.0, -0.0)
    elif pattern == "few":
        values = np.where(rng.integers(0, 50, n) == 0, values, 0.0)
    with np.errstate(all="ignore"):
        out = values.astype(dtype)
        if pattern == "tiny":
            out = (rng.integers(-200, 201, n) * float(ml_dtypes.finfo(dtype).smallest_subnormal)).astype(dtype)
    if pattern in ("mixed", "infinite"):
        limits = ml_dtypes.finfo(dtype)
        special = [0.0, -0.0, limits.max, -limits.max, limits.tiny, limits.smallest_subnormal, np.inf, -np.inf, np.nan]
        special = np.array([float(each) for each in (special if pattern == "infinite" else special[:6])], dtype)
        np.copyto(out, rng.choice(special, n), where=rng.integers(0, 10, n) == 0)
    elif pattern == "bits":
        out = rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8).view(dtype)
        with np.errstate(all="ignore"):
            is_nan = np.isnan(out)
        out = np.where(is_nan & (rng.integers(0, 4, n) > 0), dtype.type(1), out)
    return np.ascontiguousarray(out, dtype)


def differences(got: np.ndarray, want: np.ndarray) -> list[str]:
    assert got.dtype == want.dtype and got.shape == want.shape
    bits = f"u{got.itemsize}"
    wrong = np.flatnonzero(got.view(bits) != want.view(bits))
    return [f"[{i}] {got[i]} {got.view(bits)[i]:#x} not {want[i]} {want.view(bits)[i]:#x}" for i in wrong[:5]]


def _check_round_trip(codec: CodecSpec, dtype: str, n: int, pattern: str, seed: int) -> None:
    """Encode twice with one generator, with and without error, decode, add."""
    kernel = Kernels(codec, dtype, n)
    generator = reading.Generator(codec.seed)
    sums = draw_values("mixed", n, kernel.wide, seed + 7)
    for turn in range(2):
        x = draw_values(pattern, n, kernel.wide, seed + turn)
        kept = x.copy()
        want = reading.encode(codec, x, generator)
        before = kernel.words.copy()
        assert kernel.encode(x) == want
        assert kernel.words.tolist() == generator.words
        assert x.tobytes() == kept.tobytes()
        decoded = reading.decode(codec, want, n, dtype)
        with np.errstate(all="ignore"):
            lost = x - decoded
        lost = np.where(np.isfinite(lost), lost, kernel.wide.type(0))
        for in_place in (False, True):
            kernel.words[:] = before
            error = x.copy() if in_place else np.full(n, 3, kernel.wide)
            source = error if in_place else x
            assert kernel.encode(source, error) == want
            assert not differences(error, lost)
        out = np.full(n, 5, kernel.wide)
        assert kernel.decode(want, out, add=False) == 0
        assert not differences(out, decoded)
        total = reading.add(codec, want, sums)
        assert kernel.decode(want, sums, add=True) == 0
        assert not differences(sums, total)


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_kind_at_every_edge(codec: CodecSpec, wide: str) -> None:
    for n in SIZES:
        _check_round_trip(codec, wide, n, "mixed", n)


@settings(max_examples=400, deadline=None)
@given(codec=codecs, wide=wides, n=sizes, pattern=patterns, seed=seeds)
def test_any_values_as_the_reading_has_them(codec, wide, n, pattern, seed) -> None:
    _check_round_trip(codec, wide, n, pattern, seed)


@settings(max_examples=150, deadline=None)
@given(codec=codecs, wide=wides, n=sizes, pattern=patterns, seed=seeds, less=st.integers(1, 40))
def test_too_little_room_is_said(codec, wide, n, pattern, seed, less) -> None:
    x = draw_values(pattern, n, reading.wide_dtype(wide), seed)
    kernel = Kernels(codec, wide, n)
    whole = kernel.encode(x)
    assert whole is not None
    assert Kernels(codec, wide, n).encode(x, room=max(0, len(whole) - less)) is None or not whole
    assert Kernels(codec, wide, n).encode(x, room=len(whole)) == whole


@settings(max_examples=300, deadline=None)
@given(dtype=dtypes, n=sizes, pattern=patterns, seed=seeds, mu=st.sampled_from([0.0, 0.9]),
       ratio=st.sampled_from([None, 1.0, 0.1]), in_place=st.booleans())
def test_feed_is_the_reading(dtype, n, pattern, seed, mu, ratio, in_place) -> None:
    """Two rounds of what precedes encode, with the state that is left between them."""
    wide = reading.wide_dtype(dtype)
    at = kernels.addresses(CODECS[0], dtype)
    error = draw_values("mixed", n, wide, seed + 1)
    momentum = np.zeros(n, wide)
    want_momentum = momentum.copy()
    for turn in range(2):
        x = draw_values(pattern, n, np.dtype(DTYPES[dtype]), seed + turn)
        with np.errstate(all="ignore"):
            want = x.astype(wide)
            if mu:
                fresh = wide.type(mu) * want_momentum + want
                want = want + wide.type(mu) * fresh
                want_momentum = np.where(np.isfinite(fresh), fresh, wide.type(0))
            if ratio is not None:
                want = want + wide.type(ratio) * error
        want = np.where(np.isnan(want), wide.type(np.nan), want)
        e = error.copy()
        v = e if in_place else np.full(n, 9, wide)
        _FEED(at.feed)(v.ctypes.data, x.ctypes.data, None if ratio is None else e.ctypes.data,
                       momentum.ctypes.data if mu else None, n, mu, ratio or 0.0)
        assert not differences(v, want)
        assert not differences(momentum, want_momentum)


@settings(max_examples=200, deadline=None)
@given(dtype=dtypes, n=sizes, pattern=patterns, seed=seeds, divisor=st.integers(1, 1000))
def test_divide_and_narrow_are_the_reading(dtype, n, pattern, seed, divisor) -> None:
    wide = reading.wide_dtype(dtype)
    at = kernels.addresses(CODECS[0], dtype)
    acc = draw_values(pattern, n, wide, seed)
    with np.errstate(all="ignore"):
        want = acc / wide.type(divisor)
        want[np.isnan(want)] = np.nan
        narrow = want.astype(DTYPES[dtype])
    narrow[np.isnan(narrow)] = np.nan
    _DIVIDE(at.divide)(acc.ctypes.data, n, divisor)
    assert not differences(acc, want)
    out = np.full(n, 1, DTYPES[dtype])
    _NARROW(at.narrow)(out.ctypes.data, acc.ctypes.data, n)
    assert not differences(out, narrow)


def test_what_is_not_compressed_has_no_kernels() -> None:
    with pytest.raises(UnsupportedError, match="int32"):
        kernels.addresses(CODECS[0], "int32")
