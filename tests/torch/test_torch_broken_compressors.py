"""Errors name a user's compressor that breaks its contract, and no wrong sum is formed."""
from __future__ import annotations

import pytest
import torch

import bpsfast.torch as bps


class Longer(bps.Compressor):
    """Returns a tensor of another shape for every gradient."""

    n = 0

    @classmethod
    def compress(cls, tensor):
        cls.n += 1
        return torch.zeros(cls.n), None


class Loses(bps.Compressor):
    """Returns only a part of the gradient."""

    @staticmethod
    def decompress(tensor, context):
        return tensor[:1]


class Integer(bps.Compressor):
    """Returns no tensor."""

    @staticmethod
    def compress(tensor):
        return 1, None


def wrong(compression):
    p = torch.nn.Parameter(torch.zeros(2))
    named = [(f"wrong {compression}", p)]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), named, globals()[compression])
    p.sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("compression", "error", "text"), [
    ("Longer", "MismatchError", "(2,)"), ("Loses", "MismatchError", "decompress"),
    ("Integer", "UnsupportedError", "int"), ("pytest", "ConfigError", "no functions compress"),
])
def test_compressors_that_break_their_word(two, compression, error, text):
    for outcome in two.attempt(wrong, compression):
        assert outcome.error == error and text in outcome.text, outcome
