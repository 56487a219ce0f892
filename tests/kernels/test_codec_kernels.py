"""The kernels of compression against their NumPy reading, bit for bit."""
from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.kernels.codecs import codec_kernels, codec_reference
from bpsfast.orchestration.codec import FRAME_NBYTES, CodecSpec, count, flags_of, frame_nbytes
from bpsfast.orchestration.errors import UnsupportedError
from tests.support.codec_kernel_calls import CODECS, DECODE, DIVIDE, ENCODE, FEED, NARROW, draw_values

DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SIZES = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1000, 1025, 4099]

codecs = st.sampled_from(CODECS)
wides = st.sampled_from(["float32", "float64"])
dtypes = st.sampled_from(list(DTYPES))
sizes = st.sampled_from(SIZES) | st.integers(0, 3000)
seeds = st.integers(0, 2**32)
PATTERNS = ["moderate", "mixed", "bits", "equal", "zeros", "tiny", "few", "infinite"]
patterns = st.sampled_from(PATTERNS)

_GUARD = 0xA5


class Kernels:
    """The kernels of one codec and dtype on NumPy arrays; whatever they must leave alone is checked."""

    def __init__(self, codec: CodecSpec, dtype: str, n: int) -> None:
        self.codec, self.n = codec, n
        self.wide = codec_reference.wide_dtype(dtype)
        self.room = frame_nbytes(codec, n, dtype) - FRAME_NBYTES
        self.at = codec_kernels.addresses(codec, dtype)
        self.scratch = np.full(codec_kernels.scratch_nbytes(codec, n, dtype) + 64, _GUARD, np.uint8)
        self.words = np.array([codec.seed, codec.seed], np.uint64)

    def encode(self, x: np.ndarray, error: np.ndarray | None = None, room: int | None = None) -> bytes | None:
        room = self.room if room is None else room
        wire = np.full(-(-(room + 64) // 8), _GUARD * 0x0101010101010101, np.uint64).view(np.uint8)
        written = ENCODE(self.at.encode)(wire.ctypes.data, room, x.ctypes.data, self.n,
                                          None if error is None else error.ctypes.data, self.words.ctypes.data,
                                          count(self.codec, self.n), flags_of(self.codec), self.scratch.ctypes.data)
        self._check_scratch()
        assert (wire[room:] == _GUARD).all()
        assert -1 <= written <= room
        return None if written < 0 else wire[:written].tobytes()

    def decode(self, frame: bytes, out: np.ndarray, add: bool) -> int:
        wire = np.zeros(-(-len(frame) // 8), np.uint64).view(np.uint8)
        wire[: len(frame)] = np.frombuffer(frame, np.uint8)
        found = DECODE(self.at.decode)(out.ctypes.data, self.n, wire.ctypes.data, len(frame),
                                        count(self.codec, self.n), flags_of(self.codec), add, self.scratch.ctypes.data)
        self._check_scratch()
        return int(found)

    def _check_scratch(self) -> None:
        assert (self.scratch[-64:] == _GUARD).all()


def differences(got: np.ndarray, want: np.ndarray) -> list[str]:
    assert got.dtype == want.dtype and got.shape == want.shape
    bits = f"u{got.itemsize}"
    wrong = np.flatnonzero(got.view(bits) != want.view(bits))
    return [f"[{i}] {got[i]} {got.view(bits)[i]:#x} not {want[i]} {want.view(bits)[i]:#x}" for i in wrong[:5]]


def _check_round_trip(codec: CodecSpec, dtype: str, n: int, pattern: str, seed: int) -> None:
    """Encode twice with one generator, with and without error, decode, add."""
    kernel = Kernels(codec, dtype, n)
    generator = codec_reference.Generator(codec.seed)
    sums = draw_values("mixed", n, kernel.wide, seed + 7)
    for turn in range(2):
        x = draw_values(pattern, n, kernel.wide, seed + turn)
        kept = x.copy()
        want = codec_reference.encode(codec, x, generator)
        before = kernel.words.copy()
        assert kernel.encode(x) == want
        assert kernel.words.tolist() == generator.words
        assert x.tobytes() == kept.tobytes()
        decoded = codec_reference.decode(codec, want, n, dtype)
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
        total = codec_reference.add(codec, want, sums)
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


@settings(max_examples=40, deadline=None)
@given(k=st.sampled_from([1, 7, 200, 0.01, 0.05, 0.07, 0.5]), wide=wides, n=st.integers(16384, 40000),
       pattern=patterns | st.sampled_from(["misleading", "hidden", "steps"]), seed=seeds)
def test_topk_of_many_is_exact_whatever_a_sample_says(k, wide, n, pattern, seed) -> None:
    """The kernel looks at a sample first, which may be like nothing else there."""
    x = draw_values(pattern if pattern in PATTERNS else "moderate", n, codec_reference.wide_dtype(wide), seed)
    sampled = np.arange(4096) * n // 4096
    if pattern == "misleading":  # all large ones are in the sample: fewer reach what it suggests than are wanted
        x[:] = 1e-3 * x
        x[sampled] = 100
    elif pattern == "hidden":  # none is: more candidates than there is room for
        x[:] = 100 + np.abs(x)
        x[sampled] = 1e-3
    elif pattern == "steps":
        x[:] = np.random.default_rng(seed).integers(-3, 4, n)
    codec = CodecSpec(kind="topk", k=k)
    want = codec_reference.encode(codec, x, codec_reference.Generator(1))
    assert Kernels(codec, wide, n).encode(x) == want
    assert Kernels(codec, wide, n).encode(x, x) == want


@settings(max_examples=150, deadline=None)
@given(codec=codecs, wide=wides, n=sizes, pattern=patterns, seed=seeds, less=st.integers(1, 40))
def test_too_little_room_is_said(codec, wide, n, pattern, seed, less) -> None:
    x = draw_values(pattern, n, codec_reference.wide_dtype(wide), seed)
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
    wide = codec_reference.wide_dtype(dtype)
    at = codec_kernels.addresses(CODECS[0], dtype)
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
        FEED(at.feed)(v.ctypes.data, x.ctypes.data, None if ratio is None else e.ctypes.data,
                       momentum.ctypes.data if mu else None, n, mu, ratio or 0.0)
        assert not differences(v, want)
        assert not differences(momentum, want_momentum)


@settings(max_examples=200, deadline=None)
@given(dtype=dtypes, n=sizes, pattern=patterns, seed=seeds, divisor=st.integers(1, 1000))
def test_divide_and_narrow_are_the_reading(dtype, n, pattern, seed, divisor) -> None:
    wide = codec_reference.wide_dtype(dtype)
    at = codec_kernels.addresses(CODECS[0], dtype)
    acc = draw_values(pattern, n, wide, seed)
    with np.errstate(all="ignore"):
        want = acc / wide.type(divisor)
        want[np.isnan(want)] = np.nan
        narrow = want.astype(DTYPES[dtype])
    narrow[np.isnan(narrow)] = np.nan
    DIVIDE(at.divide)(acc.ctypes.data, n, divisor)
    assert not differences(acc, want)
    out = np.full(n, 1, DTYPES[dtype])
    NARROW(at.narrow)(out.ctypes.data, acc.ctypes.data, n)
    assert not differences(out, narrow)


class KernelPartition:
    """As `codec_reference.PartitionState`, by the kernels, in the fewest passes: encode reads where the error is."""

    def __init__(self, codec: CodecSpec, n: int, dtype: str) -> None:
        self.kernel = Kernels(codec, dtype, n)
        self.codec, self.n, self.wide = codec, n, self.kernel.wide
        self.values, self.momentum = np.zeros(n, self.wide), np.zeros(n, self.wide)

    def push(self, partial: np.ndarray, ratio: float) -> bytes:
        return self._encode(partial, ratio, self.kernel.at.feed, self.codec.momentum)

    def merge(self, frames: list[bytes], divisor: float, ratio: float) -> bytes:
        sums = np.full(self.n, 8, self.wide)
        for i, frame in enumerate(frames):
            assert self.kernel.decode(frame, sums, add=i > 0) == 0
        DIVIDE(self.kernel.at.divide)(sums.ctypes.data, self.n, divisor)
        return self._encode(sums, ratio, self.kernel.at.feed_wide, 0.0)

    def _encode(self, x: np.ndarray, ratio: float, feed: int, mu: float) -> bytes:
        values = self.values.ctypes.data
        has_error = self.codec.error_feedback
        FEED(feed)(values, x.ctypes.data, values if has_error else None, self.momentum.ctypes.data if mu else None,
                   self.n, mu, ratio)
        frame = self.kernel.encode(self.values, self.values if has_error else None)
        assert frame is not None
        return frame


@settings(max_examples=150, deadline=None)
@given(codec=codecs, dtype=dtypes, n=sizes.filter(bool), pattern=patterns, seed=seeds, has_error=st.booleans(),
       momentum=st.sampled_from([0.0, 0.9]), n_nodes=st.integers(1, 3), average=st.booleans())
def test_a_job_by_kernels_is_the_reading(codec, dtype, n, pattern, seed, has_error, momentum, n_nodes, average) -> None:
    """Rounds from partials to what ranks get, with all that is kept between them."""
    codec = msgspec.structs.replace(codec, error_feedback=has_error, momentum=momentum)
    job = codec_reference.ReferenceJob(codec, n, dtype, n_nodes)
    nodes = [KernelPartition(codec, n, dtype) for _ in range(n_nodes)]
    owner = KernelPartition(codec, n, dtype)
    divisor = float(n_nodes) if average else 1.0
    for turn, ratio in enumerate((1.0, 0.5, 1.0)):
        partials = [draw_values(pattern, n, np.dtype(DTYPES[dtype]), seed + turn + 10 * i) for i in range(n_nodes)]
        given_by = [None if turn == 1 and i and (seed + i) % 2 else x for i, x in enumerate(partials)]
        want = job.round(given_by, divisor, ratio)
        frames = [node.push(x, ratio) for node, x in zip(nodes, given_by) if x is not None]
        frame = owner.merge(frames, divisor, ratio)
        out, sums = np.full(n, 1, DTYPES[dtype]), np.full(n, 1, owner.wide)
        assert owner.kernel.decode(frame, sums, add=False) == 0
        NARROW(owner.kernel.at.narrow)(out.ctypes.data, sums.ctypes.data, n)
        assert not differences(out, want)


def test_what_is_not_compressed_has_no_kernels() -> None:
    with pytest.raises(UnsupportedError, match="int32"):
        codec_kernels.addresses(CODECS[0], "int32")


@pytest.mark.parametrize("seed", range(3))
def test_no_frame_makes_a_decoder_touch_what_is_not_its_own(seed: int) -> None:
    """In a process of its own, as it ends where a byte too far is touched."""
    child = subprocess.run([sys.executable, "-m", "tests.support.fuzzed_frames", str(seed), "6000"],
                           capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, (child.returncode, child.stderr[-3000:])
    n_taken, n_refused = (int(part.split()[0]) for part in child.stdout.split(","))
    assert n_taken > 600 and n_refused > 600


def test_elements_that_change_meanwhile_spoil_nothing_but_their_values() -> None:
    """In a process of its own, too: they may be a rank's memory, and the node is everybody's."""
    child = subprocess.run([sys.executable, "-m", "tests.support.changing_values", "500"], capture_output=True,
                           text=True, timeout=120, check=False)
    assert child.returncode == 0, (child.returncode, child.stderr[-3000:])


def test_the_guard_page_is_one() -> None:
    """Else the test above would say nothing."""
    code = ("from tests.support.guarded_memory import GuardedMemory; import ctypes; "
            "last = GuardedMemory(5000).take(5); print(len(last), flush=True); "
            "ctypes.memset(last.ctypes.data, 1, 5); print('inside', flush=True); ctypes.memset(last.ctypes.data, 1, 6)")
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert child.stdout.split() == ["5", "inside"]
    assert child.returncode == -11
