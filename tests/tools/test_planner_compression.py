"""Codecs as people write them, read and shown."""
from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bpsfast.orchestration import codec as codecs
from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.errors import ConfigError, UnsupportedError
from bpsfast.orchestration.placement.shares import Machine
from bpsfast.tools.planner import catalog
from bpsfast.tools.planner.prediction import describe, parse, predict


def test_what_is_written_is_read():
    assert parse("onebit") == CodecSpec(kind="onebit")
    assert parse("onebit:scaled=false") == CodecSpec(kind="onebit", scaled=False)
    assert parse("topk:k=0.01, error_feedback") == CodecSpec(kind="topk", k=0.01, error_feedback=True)
    assert parse("dithering:k=4,natural,l2,seed=7,momentum=0.9") == CodecSpec(
        kind="dithering", k=4, natural=True, l2=True, seed=7, momentum=0.9)


@pytest.mark.parametrize(("text", "words"), [
    ("zip", "there is no kind 'zip'; there are onebit, topk"), ("topk:n=3", "no option 'n'; there are k, scaled"),
    ("topk:k=much", "Expected `float`"), ("topk", "topk of k=0"), ("onebit:scaled=perhaps", "Expected `bool`"),
    ("onebit:auto", "no option 'auto'"), ("int8:momentum=1", "at least 0 and below 1"),
])
def test_what_makes_no_sense_is_an_error_that_lists_what_there_is(text, words):
    with pytest.raises(ConfigError, match=words):
        parse(text)


@given(st.builds(CodecSpec, kind=st.sampled_from(codecs.KINDS), k=st.sampled_from([0.001, 0.25, 3, 20]),
                 scaled=st.booleans(), natural=st.booleans(), l2=st.booleans(), seed=st.integers(1, (1 << 63) - 1),
                 error_feedback=st.booleans(), momentum=st.floats(0, 0.999)))
def test_what_is_shown_is_read_again(codec):
    if codec.kind == "dithering" and codec.k < 1:
        return
    assert parse(describe(codec)) == codec


def test_only_floats_are_compressed():
    with pytest.raises(UnsupportedError, match="tensors of int32 are not compressed"):
        predict(_with_dtype("int32"), [Machine(True, 1e9)] * 2, CodecSpec(kind="int8"), 1e10,
                partition_nbytes=4096000, fusion_nbytes=4096000)


def test_halves_are_compressed_as_what_they_are():
    found = predict(_with_dtype("float16"), [Machine(True, 1e7)] * 2, CodecSpec(kind="float16"), 1e10,
                    partition_nbytes=4096000, fusion_nbytes=4096000)
    assert not found.choice.names and len(found.left) == 62, "there is nothing to gain"


def _with_dtype(dtype):
    from dataclasses import replace

    return replace(catalog.load("resnet18"), dtype=dtype)
