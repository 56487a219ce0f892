"""What a choice of compression may be, and that the room it asks for is never too small."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.kernels.codecs import codec_reference
from bpsfast.orchestration.codec import FRAME_NBYTES, CodecSpec, check, count, elias_bits, frame_nbytes, width_of
from bpsfast.orchestration.errors import ConfigError, UnsupportedError


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"kind": "zip"}, "'zip' is unknown; there are onebit"),
        ({"kind": "topk"}, "k=0"),
        ({"kind": "topk", "k": 1.5}, "k=1.5"),
        ({"kind": "randomk", "k": -1}, "k=-1"),
        ({"kind": "dithering", "k": 0}, "1 to 1048576"),
        ({"kind": "dithering", "k": 31, "natural": True}, "1 to 30"),
        ({"kind": "dithering", "k": 2.5}, "k=2.5"),
        ({"kind": "onebit", "seed": 0}, "seed=0"),
        ({"kind": "onebit", "seed": 1 << 64}, "seed="),
        ({"kind": "onebit", "momentum": 1.0}, "momentum=1"),
        ({"kind": "onebit", "momentum": -0.1}, "momentum=-0.1"),
    ],
)
def test_what_is_not_possible_is_said(wrong, text) -> None:
    with pytest.raises(ConfigError, match=text):
        check(CodecSpec(**wrong))


def test_only_floats_are_compressed() -> None:
    assert [width_of(name) for name in ("float32", "float64", "float16", "bfloat16")] == [4, 8, 4, 4]
    with pytest.raises(UnsupportedError, match="int64"):
        frame_nbytes(CodecSpec(kind="onebit"), 10, "int64")


def test_k_is_a_number_or_a_fraction_and_half_at_most() -> None:
    topk = [count(CodecSpec(kind="topk", k=k), n) for k, n in ((0.01, 1000), (0.01, 10), (7, 1000), (7, 10), (7, 1))]
    assert topk == [10, 1, 7, 5, 1]
    assert count(CodecSpec(kind="dithering", k=12), 3) == 12


def test_elias_bits_are_those_of_the_code() -> None:
    assert [elias_bits(value) for value in (1, 2, 3, 4, 8, 16, 1 << 20)] == [1, 4, 4, 5, 8, 9, 29]


codecs = st.one_of(
    st.builds(CodecSpec, kind=st.sampled_from(["onebit", "float16", "bfloat16", "int8"])),
    st.builds(CodecSpec, kind=st.sampled_from(["topk", "randomk"]), k=st.floats(0.001, 0.999) | st.integers(1, 500)),
    st.builds(CodecSpec, kind=st.just("dithering"), k=st.integers(1, 30), natural=st.just(True), l2=st.booleans()),
    st.builds(CodecSpec, kind=st.just("dithering"), k=st.sampled_from([1, 2, 3, 4, 15, 16, 127, 1 << 20]),
              l2=st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(codec=codecs, dtype=st.sampled_from(["float32", "float64"]), n=st.integers(0, 600),
       share=st.sampled_from([0.0, 0.02, 0.5, 0.9, 1.0]), flat=st.booleans(), seed=st.integers(0, 1 << 32))
def test_no_frame_is_longer_than_its_room(codec, dtype, n, share, flat, seed) -> None:
    """dithering's is longest where every element has the highest level, or where few have: both are drawn."""
    check(codec)
    rng = np.random.default_rng(seed)
    values = (np.ones(n) if flat else rng.standard_normal(n)) * (rng.random(n) < share)
    generator = codec_reference.Generator(seed + 1)
    frame = codec_reference.encode(codec, values.astype(codec_reference.wide_dtype(dtype)), generator)
    assert FRAME_NBYTES + len(frame) <= frame_nbytes(codec, n, dtype)


def test_the_longest_frames_fill_their_room() -> None:
    """Else a test that it is never too small would say little."""
    values = np.ones(640, np.float32)
    for codec in (CodecSpec(kind="dithering", k=1 << 20), CodecSpec(kind="dithering", k=30, natural=True),
                  CodecSpec(kind="topk", k=0.5), CodecSpec(kind="onebit"), CodecSpec(kind="int8")):
        frame = codec_reference.encode(codec, values, codec_reference.Generator(1))
        assert FRAME_NBYTES + len(frame) == frame_nbytes(codec, 640, "float32"), codec
