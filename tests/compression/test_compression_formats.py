"""What users write is a choice that can be, or an error in words."""
from __future__ import annotations

import pkgutil

import pytest

import bpsfast
from bpsfast import compression
from bpsfast.orchestration.codec import KINDS, CodecSpec, check
from bpsfast.orchestration.errors import ConfigError


def test_there_is_a_function_for_every_kind():
    needed = {"topk": (0.1,), "randomk": (5,), "dithering": (7,)}
    for kind in KINDS:
        codec = getattr(compression, kind)(*needed.get(kind, ()), error_feedback=True, momentum=0.9)
        check(codec)
        assert (codec.kind, codec.error_feedback, codec.momentum) == (kind, True, 0.9)
        assert not getattr(compression, kind)(*needed.get(kind, ())).has_state, "nothing is kept unless asked for"


def test_what_belongs_to_one_format():
    assert compression.onebit().scaled and not compression.onebit(scaled=False).scaled
    assert compression.randomk(0.5, seed=9) == CodecSpec(kind="randomk", k=0.5, seed=9)
    natural = compression.dithering(3, partition="natural", normalize="l2", seed=2)
    assert natural == CodecSpec(kind="dithering", k=3, natural=True, l2=True, seed=2)
    assert not compression.dithering(3).natural and not compression.dithering(3).l2


def test_a_codec_may_be_left_out_where_it_does_not_pay():
    codec = compression.topk(0.01, error_feedback=True)
    assert not codec.auto
    assert compression.where_it_pays(codec) == CodecSpec(kind="topk", k=0.01, error_feedback=True, auto=True)
    with pytest.raises(ConfigError, match="k=0"):
        compression.where_it_pays(CodecSpec(kind="topk"))
    with pytest.raises(ConfigError, match=r"momentum=0\.9: tensors that stay exact would have none"):
        compression.where_it_pays(compression.topk(0.01, momentum=0.9))
    with pytest.raises(ConfigError, match=r"where_it_pays\('topk'\): expected a codec"):
        compression.where_it_pays("topk")


@pytest.mark.parametrize(("make", "words"), [
    (lambda: compression.topk(0), "topk of k=0"),
    (lambda: compression.topk(-3), "k=-3"),
    (lambda: compression.topk(1.5), "k=1.5"),
    (lambda: compression.topk(float("nan")), "k=nan: expected a finite number"),
    (lambda: compression.randomk(float("inf")), "k=inf"),
    (lambda: compression.topk("all"), "k='all': expected float or int, got str"),
    (lambda: compression.topk(True), "k=True"),
    (lambda: compression.randomk(5, seed=0), "seed=0: 1 to"),
    (lambda: compression.randomk(5, seed=1.5), "seed=1.5: expected int, got float"),
    (lambda: compression.dithering(0), "levels"),
    (lambda: compression.dithering(31, partition="natural"), "1 to 30"),
    (lambda: compression.dithering(7, partition="log"), "partition='log': expected 'linear' or 'natural'"),
    (lambda: compression.dithering(7, normalize="l1"), "normalize='l1': expected 'max' or 'l2'"),
    (lambda: compression.onebit("no"), "scaled='no': expected bool"),
    (lambda: compression.int8(momentum=1.0), "momentum=1"),
    (lambda: compression.float16(error_feedback=1), "error_feedback=1: expected bool"),
])
def test_nonsense_is_refused_where_it_is_written(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_the_package_has_it_as_an_attribute():
    assert bpsfast.compression is compression and "compression" in bpsfast.__all__


def test_no_module_of_the_package_has_the_name_of_a_format():
    modules = {module.name for module in pkgutil.iter_modules(compression.__path__)}
    assert not modules & set(compression.__all__), "importing it would take the function's place"
