"""Which tensor is compressed how."""
from __future__ import annotations

import pytest

from bpsfast.compression import CodecSpec, bfloat16, chosen, from_byteps, onebit, topk
from bpsfast.compression.choice import check_choice
from bpsfast.orchestration.errors import BpsError, ConfigError, UnsupportedError

SHAPE = (100, 100)
TOP = topk(0.01)


def found(choice, name="x", shape=SHAPE, dtype="float32", least_nbytes=0, **how):
    return chosen(choice, name, shape, dtype, least_nbytes, **how)


def test_one_codec_is_for_all():
    assert found(onebit()) == onebit() and found(None) is None


def test_the_first_pattern_that_fits_counts_and_a_name_before_all_patterns():
    choice = {"*.bias": None, "fc*": TOP, "fc2.weight": bfloat16(), "*": onebit()}
    assert [found(choice, name) for name in ("fc.bias", "fc.weight", "fc2.weight", "conv")] == [
        None, TOP, bfloat16(), onebit()]
    assert found({"fc*": TOP}, "conv") is None


def test_a_function_is_told_name_shape_and_dtype():
    told = []
    assert found(lambda *kind: told.append(kind) or TOP, "a", (7, 9), "float64") == TOP
    assert told == [("a", (7, 9), "float64")]
    assert found(lambda name, shape, dtype: None) is None


@pytest.mark.parametrize("nbytes", [3999, 4000, 4001])
def test_small_tensors_are_left_alone_whoever_chose(nbytes):
    wanted = TOP if nbytes <= 4000 else None
    for choice in (TOP, {"x": TOP}, {"*": TOP}, lambda name, shape, dtype: TOP):
        assert found(choice, shape=(1000,), least_nbytes=nbytes) == wanted
    assert found(TOP, shape=(0, 5)) is None, "nothing to compress, though no limit says so"


def test_integers_are_left_alone_by_a_choice_for_all_and_refused_by_one_for_them():
    assert found(TOP, dtype="int32") is None and found({"*": TOP}, dtype="int32") is None
    for choice, how in ((TOP, {"is_alone": True}), ({"x": TOP}, {}), (lambda name, shape, dtype: TOP, {})):
        with pytest.raises(UnsupportedError, match="'topk' was chosen for tensor 'x': tensors of int32 are not"):
            found(choice, dtype="int32", **how)
    assert found({"x": None}, dtype="int32") is None


@pytest.mark.parametrize(("choice", "words"), [
    ("onebit", "'onebit' is not a choice: expected a codec"),
    (5, "5 is not a choice"),
    ({"*": "onebit"}, r"compression\['\*'\] is 'onebit'"),
    ({5: TOP}, "has the key 5"),
    (onebit, r"the function onebit itself: call it, as in bpsfast.compression.onebit\(\.\.\.\)"),
    (topk, "the function topk itself"),
    (from_byteps, "the function from_byteps itself"),
    ({"*": topk}, r"compression\['\*'\] is <function topk"),
    ({"never": CodecSpec(kind="topk", k=-1.0)}, "k=-1"),
    (CodecSpec(kind="topk", k=0.5, momentum="fast"), "momentum='fast': expected float or int, got str"),
    (CodecSpec(kind="zip"), "'zip' is unknown; there are onebit"),
])
def test_what_is_no_choice_is_refused_before_any_tensor_is_seen(choice, words):
    with pytest.raises(ConfigError, match=words):
        check_choice(choice)
    with pytest.raises(ConfigError, match=words):
        found(choice)


def test_what_a_function_makes_is_checked_too():
    check_choice(lambda name, shape, dtype: "onebit")
    with pytest.raises(BpsError, match="returned for 'x' is 'onebit': expected a codec"):
        found(lambda name, shape, dtype: "onebit")
