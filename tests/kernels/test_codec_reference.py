"""The NumPy reading of the formats against frames made by hand, and what a job of several nodes does with them."""
from __future__ import annotations

import struct

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.base import dtypes, reference_sum
from bpsfast.kernels.codecs.codec_reference import Generator, PartitionState, ReferenceJob, add, decode, encode
from bpsfast.orchestration.codec import FRAME_NBYTES, CodecSpec, count, frame_nbytes

ONEBIT = CodecSpec(kind="onebit")
LINEAR = CodecSpec(kind="dithering", k=4)
NATURAL = CodecSpec(kind="dithering", k=4, natural=True)


_NUMPY_DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def encoded(codec: CodecSpec, *values: float, dtype: type = np.float32) -> bytes:
    return encode(codec, np.array(values, dtype), Generator(codec.seed))


def test_the_generator_is_xorshift128_plus() -> None:
    generator = Generator(1)
    # t = 1 ^ 1<<23 = 0x800001; ^ >>17 = 0x800041; ^ s ^ s>>26 = 0x800040; sum with s = 1
    assert generator.draw() == 0x800041
    assert generator.words == [1, 0x800040]
    again = Generator((1 << 64) - 1)
    draws = [again.draw() for _ in range(1000)]
    assert all(0 <= each < 1 << 64 for each in draws)
    assert len(set(draws)) == 1000


def test_draws_are_spread_evenly() -> None:
    generator = Generator(12345)
    for _ in range(20):  # a small seed takes some draws to fill the words
        generator.draw()
    found = np.bincount([generator.below(10) for _ in range(20000)], minlength=10)
    assert found.min() > 1800
    assert 5700 < sum(generator.bernoulli(0.3) for _ in range(20000)) < 6300
    assert not any(generator.bernoulli(0.0) for _ in range(100))


def test_onebit_by_hand() -> None:
    frame = encoded(ONEBIT, -1, 2, -0.0, 0, -4, 1)
    assert frame == struct.pack("<If", 0b1000_1000 << 24, 8 / 6)
    assert decode(ONEBIT, frame, 6, "float32").tolist() == (f32(-1, 1, 1, 1, -1, 1) * np.float32(8 / 6)).tolist()
    assert encoded(CodecSpec(kind="onebit", scaled=False), -3, 3) == struct.pack("<If", 1 << 31, 1)
    frame = encoded(ONEBIT, *[1.0] * 63, -1.0, -1.0, dtype=np.float64)
    assert frame == struct.pack("<QQf", 1, 1 << 63, 1)


def test_topk_by_hand() -> None:
    codec = CodecSpec(kind="topk", k=2)
    frame = encoded(codec, 1, -3, 0, 3, 3)
    assert frame == struct.pack("<IfIf", 1, -3, 3, 3)  # of equals the first ones
    assert decode(codec, frame, 5, "float32").tolist() == [0, -3, 0, 3, 0]
    assert encoded(codec, 1, np.inf, 5, np.nan, 9)[8:12] == struct.pack("<I", 3)
    assert encoded(CodecSpec(kind="topk", k=0.9), 1, 2, dtype=np.float64) == struct.pack("<Qd", 1, 2)


def test_randomk_by_hand() -> None:
    codec = CodecSpec(kind="randomk", k=3, seed=9)
    generator = Generator(9)
    places = [generator.below(6) for _ in range(3)]
    values = f32(1, 2, 3, 4, 5, 6)
    frame = encode(codec, values, Generator(9))
    assert frame == b"".join(struct.pack("<If", i, i + 1) for i in places)
    want = np.where(np.isin(np.arange(6), places), values, 0)
    assert decode(codec, frame, 6, "float32").tolist() == want.tolist()


def test_an_element_drawn_twice_counts_once() -> None:
    codec = CodecSpec(kind="randomk", k=2)
    frame = struct.pack("<IfIf", 1, 5, 1, 5)
    assert decode(codec, frame, 4, "float32").tolist() == [0, 5, 0, 0]
    assert add(codec, frame, f32(1, 1, 1, -0.0)).tolist() == [1, 6, 1, 0]
    assert np.signbit(add(codec, frame, f32(1, 1, 1, -0.0))[3])  # left alone


def test_dithering_by_hand() -> None:
    # norm 4, s 4: y = |x|, all whole, so that no draw changes anything
    frame = encoded(LINEAR, 0, 1, 0, -2, -4)
    # gap 2: 0100, +: 0, 1: 1; gap 2: 0100, -: 1, 2: 0100; gap 1: 1, -: 1, 4: 01100
    bits = "0100 0 1 0100 1 0100 1 1 01100".replace(" ", "")
    assert frame == struct.pack("<IIf", int(bits.ljust(32, "0"), 2), len(bits), 4)
    assert decode(LINEAR, frame, 5, "float32").tolist() == [0, 1, 0, -2, -4]
    frame = encoded(NATURAL, 0, 8, 0, dtype=np.float64)  # L = 8, y = 8: f = 4, l = 4, drawn with certainty
    bits = "0100 0 00100000".replace(" ", "")  # 8: length 4 = 100 after two zeros, tail 000
    assert frame == struct.pack("<QQf", int(bits.ljust(64, "0"), 2), len(bits), 8)


@pytest.mark.parametrize("value", [3, 17, 255, 256, 65535, 1 << 20])
def test_elias_codes_of_long_gaps_come_back(value: int) -> None:
    values = np.zeros(value + 1, np.float32)
    values[value] = -2
    codec = CodecSpec(kind="dithering", k=1000)
    frame = encode(codec, values, Generator(1))
    assert decode(codec, frame, value + 1, "float32").tolist() == values.tolist()


def test_natural_levels_are_the_two_powers_about_y() -> None:
    codec = CodecSpec(kind="dithering", k=5, natural=True, seed=3)  # L = 16
    values = np.tile(f32(16, 11, 2.5, 0.75), 500)
    levels = decode(codec, encode(codec, values, Generator(3)), values.size, "float32").reshape(500, 4)
    assert [sorted(set(column)) for column in levels.T.tolist()] == [[16], [8, 16], [2, 4], [0, 1]]
    assert abs(levels.mean(axis=0) - values[:4]).max() < 0.6  # right on average


@pytest.mark.parametrize("codec", [LINEAR, NATURAL, CodecSpec(kind="dithering", k=9, l2=True)], ids=str)
def test_dithering_is_right_on_average(codec: CodecSpec) -> None:
    values = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    generator = Generator(77)
    mean = np.mean([decode(codec, encode(codec, values, generator), 64, "float32") for _ in range(2000)], axis=0)
    assert abs(mean - values).max() < 0.3


def test_casts_by_hand() -> None:
    assert encoded(CodecSpec(kind="float16"), 1, 2049, 1e6, 6e-8) == struct.pack("<4H", 0x3C00, 0x6800, 0x7C00, 1)
    assert encoded(CodecSpec(kind="bfloat16"), 1, -1.00390625, 1.01171875) == struct.pack("<3H", 0x3F80, 0xBF80, 0x3F82)


def test_int8_by_hand() -> None:
    codec = CodecSpec(kind="int8")
    values = np.zeros(258, np.float32)
    values[:4] = 127, -127, 2.5, -3.5
    values[256:] = 0, 0
    frame = encode(codec, values, Generator(1))
    assert frame[:8] == struct.pack("<ff", 1, 0)
    assert frame[8:12] == struct.pack("<4b", 127, -127, 2, -4)
    assert frame[12:] == bytes(254)
    assert decode(codec, frame, 258, "float32").tolist() == [127, -127, 2, -4] + [0] * 254


@pytest.mark.parametrize("kind", ["onebit", "topk", "dithering", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_seen(kind: str, bad: float) -> None:
    codec = CodecSpec(kind=kind, k=3, error_feedback=True, momentum=0.9)
    sender = PartitionState(codec, 300, "float32")
    values = np.ones(300, np.float32)
    values[7] = bad
    frame = sender.push(values)
    assert not np.isfinite(decode(codec, frame, 300, "float32")[7])
    assert np.isfinite(sender.error).all() and np.isfinite(sender.momentum).all()
    assert np.isfinite(decode(codec, sender.push(np.ones(300, np.float32)), 300, "float32")).all()


def test_onebit_that_is_not_scaled_shows_what_is_not_finite() -> None:
    codec = CodecSpec(kind="onebit", scaled=False)
    assert np.isnan(decode(codec, encoded(codec, 1, np.nan), 2, "float32")).all()
    assert decode(codec, encoded(codec, 1, -np.inf), 2, "float32").tolist() == [np.inf, -np.inf]
    assert decode(codec, encoded(codec, 1e308, -1e308, dtype=np.float64), 2, "float64").tolist() == [1, -1]


def test_randomk_sends_what_is_not_finite_whatever_it_draws() -> None:
    codec = CodecSpec(kind="randomk", k=2, error_feedback=True)
    sender, other = PartitionState(codec, 1000, "float32"), PartitionState(codec, 1000, "float32")
    values = np.ones(1000, np.float32)
    drawn = np.frombuffer(other.push(values), "<u4")[::2]
    values[[5, 7, 9]] = np.nan, -np.inf, np.inf
    pairs = np.frombuffer(sender.push(values), [("index", "<u4"), ("value", "<f4")])
    assert not {5, 7, 9} & set(drawn.tolist()) and pairs["index"].tolist() == [5, 7]
    assert np.isnan(pairs["value"][0]) and pairs["value"][1] == -np.inf
    assert sender.error[[5, 7, 9]].tolist() == [0, 0, 0] and sender.error.sum() == 997
    assert sender.generator.words == other.generator.words


_KINDS = st.sampled_from([
    CodecSpec(kind="onebit"), CodecSpec(kind="onebit", scaled=False), CodecSpec(kind="topk", k=3),
    CodecSpec(kind="topk", k=0.1), CodecSpec(kind="randomk", k=1, seed=5), CodecSpec(kind="randomk", k=0.05, seed=6),
    CodecSpec(kind="dithering", k=4, seed=7), CodecSpec(kind="dithering", k=6, natural=True, l2=True, seed=8),
    CodecSpec(kind="float16"), CodecSpec(kind="bfloat16"), CodecSpec(kind="int8")])


@settings(deadline=None)
@given(_KINDS, st.sampled_from(["float32", "float64", "float16", "bfloat16"]), st.booleans(),
       st.sampled_from([0.0, 0.9]), st.integers(1, 600), st.integers(1, 3), st.data())
def test_no_codec_swallows_what_a_node_pushes(codec, dtype, error_feedback, momentum, n, n_nodes, data) -> None:
    codec = msgspec.structs.replace(codec, error_feedback=error_feedback, momentum=momentum)
    job = ReferenceJob(codec, n, dtype, n_nodes)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))

    def partials() -> list[np.ndarray]:
        return [rng.uniform(-1, 1, n).astype(_NUMPY_DTYPES[dtype]) for _ in range(n_nodes)]

    for _ in range(data.draw(st.integers(0, 2))):
        job.round(partials())
    pushed = partials()
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5, unique=True))
    for place in places:
        pushed[data.draw(st.integers(0, n_nodes - 1))][place] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    found = np.isfinite(job.round(pushed, divisor=n_nodes).astype(np.float64))
    if codec.kind in ("topk", "randomk"):  # as many as there is room for, and nothing else
        assert set(np.flatnonzero(~found)) <= set(places)
        assert np.count_nonzero(~found) == min(len(places), count(codec, n))
    else:
        assert not found[places].any()
    if codec.kind in ("float16", "bfloat16"):
        assert np.count_nonzero(~found) == len(places)
    for kept in (*job.nodes, job.owner):
        assert np.isfinite(kept.error).all() and np.isfinite(kept.momentum).all()
    for _ in range(2):  # nothing of it comes back
        assert np.isfinite(job.round(partials()).astype(np.float64)).all()


def test_momentum_and_error_feedback_by_hand() -> None:
    codec = CodecSpec(kind="topk", k=1, error_feedback=True, momentum=0.5)
    sender = PartitionState(codec, 3, "float32")
    # m = g, v = 1.5 g: the largest is sent, the rest is the error
    assert decode(codec, sender.push(f32(4, 2, 0)), 3, "float32").tolist() == [6, 0, 0]
    assert sender.error.tolist() == [0, 3, 0]
    # m = 0.5 m + g = 2, 2, 0; v = g + 0.5 m + 2 e
    assert decode(codec, sender.push(f32(0, 1, 0), ratio=2.0), 3, "float32").tolist() == [0, 8, 0]
    assert sender.error.tolist() == [1, 0, 0]
    assert sender.momentum.tolist() == [2, 2, 0]


def test_owners_feed_back_what_they_did_not_send() -> None:
    codec = CodecSpec(kind="topk", k=1, error_feedback=True)
    job = ReferenceJob(codec, 3, "float32", n_nodes=2)
    assert job.round([f32(4, 0, 0), f32(0, 6, 0)], divisor=2).tolist() == [0, 3, 0]
    assert job.owner.error.tolist() == [2, 0, 0]
    assert job.round([f32(0, 0, 2), None], divisor=2).tolist() == [2, 0, 0]
    assert job.owner.error.tolist() == [0, 0, 1]
    assert job.nodes[1].error.tolist() == [0, 0, 0]


def test_without_loss_a_job_is_the_sum_of_its_nodes() -> None:
    rng = np.random.default_rng(5)
    partials = [rng.standard_normal(100).astype(ml_dtypes.bfloat16) for _ in range(3)]
    job = ReferenceJob(CodecSpec(kind="bfloat16"), 100, "bfloat16", n_nodes=3)
    want = reference_sum.reduce([[each] for each in partials], average=True)
    assert job.round(partials, divisor=3).tobytes() == want.tobytes()


@settings(max_examples=100, deadline=None)
@given(
    codec=st.sampled_from([ONEBIT, LINEAR, NATURAL, CodecSpec(kind="topk", k=0.1), CodecSpec(kind="randomk", k=0.1),
                           CodecSpec(kind="int8"), CodecSpec(kind="float16")]),
    dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
    n=st.integers(2, 300),
    seed=st.integers(0, 1 << 32),
)
def test_nothing_is_lost_over_rounds(codec, dtype, n, seed) -> None:
    """What was sent, and the error that is left, come to what was put in; a frame is never longer than it may be."""
    rng = np.random.default_rng(seed)
    fed = CodecSpec(kind=codec.kind, k=codec.k, natural=codec.natural, error_feedback=True)
    sender = PartitionState(fed, n, dtype)
    put_in = np.zeros(n, np.float64)
    sent = np.zeros(n, np.float64)
    for _ in range(5):
        partial = rng.standard_normal(n).astype(dtypes.lookup(dtype).numpy)
        put_in += partial.astype(np.float64)
        frame = sender.push(partial)
        assert len(frame) <= frame_nbytes(fed, n, dtype) - FRAME_NBYTES
        sent += decode(fed, frame, n, dtype)
    assert np.allclose(sent + sender.error, put_in, atol=1e-3)
