"""BytePS's spellings of a choice of compression."""
from __future__ import annotations

import pytest

from bpsfast import compression
from bpsfast.compression import from_byteps
from bpsfast.orchestration.errors import ConfigError

TOP = compression.topk(0.01, error_feedback=True, momentum=0.9)


@pytest.mark.parametrize("keywords", [
    {"compressor_type": "topk", "compressor_k": "0.01", "ef_type": "vanilla", "momentum_type": "nesterov",
     "momentum_mu": "0.9"},
    {"byteps_compressor_type": "topk", "byteps_compressor_k": "0.01", "byteps_ef_type": "vanilla",
     "byteps_momentum_type": "nesterov", "byteps_momentum_mu": "0.9"},
    {"compressor": "topk", "k": 0.01, "ef": "vanilla", "momentum": "nesterov", "momentum_mu": 0.9},
])
def test_all_spellings_are_one(keywords):
    assert from_byteps(keywords) == TOP


@pytest.mark.parametrize(("keywords", "codec"), [
    ({"compressor": "onebit"}, compression.onebit(scaled=False)),
    ({"compressor": "OneBit", "scaling": True, "k": 1, "ef": "", "fp16": False}, compression.onebit()),
    ({"compressor_type": "onebit", "compressor_onebit_scaling": "true"}, compression.onebit()),
    ({"compressor": "randomk", "k": 32, "seed": str(2**63 + 1)}, compression.randomk(32, seed=2**63 + 1)),
    ({"compressor_type": "dithering", "compressor_k": "4", "dithering_partition": "1", "dithering_normalize": "1"},
     compression.dithering(4, partition="natural", normalize="l2")),
    ({"compressor": "dithering", "k": 8, "partition": "linear", "normalize": "max"}, compression.dithering(8)),
    ({"fp16": True}, compression.float16()),
    ({}, None),
    ({"compressor": "", "ef": None, "momentum": "", "scaling": False, "k": 1, "fp16": False}, None),
])
def test_what_the_keywords_mean(keywords, codec):
    assert from_byteps(keywords) == codec


@pytest.mark.parametrize(("keywords", "words"), [
    ({"compresor": "topk"}, "'compresor' is no keyword of BytePS's compression; there are compressor_type"),
    ({"compressor": "zip"}, "compressor='zip' is unknown to BytePS's compression; there is onebit, topk"),
    ({"compressor": "topk"}, "'topk' needs k: elements"),
    ({"compressor": "dithering"}, "'dithering' needs k: the number of levels"),
    ({"compressor": "dithering", "k": 0.5}, "k=0.5: k is the number of levels"),
    ({"compressor": "topk", "k": "many"}, "k='many' of BytePS's compression is no number"),
    ({"compressor": "dithering", "k": "nan"}, "k='nan' of BytePS's compression is no number"),
    ({"compressor": "randomk", "k": 5, "seed": "x"}, "seed='x' of BytePS's compression is no whole number"),
    ({"compressor": "topk", "k": -1}, "topk of k=-1"),
    ({"compressor": "onebit", "ef": "chocolate"}, "ef='chocolate' is unknown.* there is vanilla"),
    ({"compressor": "onebit", "momentum": "heavy"}, "momentum='heavy' is unknown"),
    ({"compressor": "onebit", "momentum": "nesterov"}, "needs momentum_mu"),
    ({"compressor": "onebit", "scaling": "maybe"}, "scaling='maybe'"),
    ({"compressor": "onebit", "fp16": True}, "leave fp16 out"),
    ({"compressor": "topk", "compressor_type": "onebit", "k": 1}, "compressor='topk' and compressor_type='onebit'"),
    ({"compressor": "dithering", "k": 4, "partition": 2}, "partition=2 is unknown"),
    ({"compressor": "randomk", "k": 4, "seed": 0}, "seed=0"),
])
def test_what_cannot_be_is_named(keywords, words):
    with pytest.raises(ConfigError, match=words):
        from_byteps(keywords)


def test_what_is_no_mapping_is_named():
    for given in (None, "topk"):
        with pytest.raises(ConfigError, match=r"from_byteps\(.*\): expected a mapping of BytePS's keywords"):
            from_byteps(given)
