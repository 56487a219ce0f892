"""PyTorch training with tuning has the same weights. (`bpsfast bench autotune` measures its speed.)"""
from __future__ import annotations

import pytest

from bpsfast.bench.autotune import train

pytest.importorskip("torch", reason="torch")


@pytest.mark.parametrize("crosses", [False, True])
def test_weights_are_those_of_an_untuned_run(tmp_path, crosses):
    place = "--set", "transport=tcp"
    before = train(tmp_path, 75, place=place, width=256, crosses=crosses)
    after = train(tmp_path, 75, tune=True, place=place, width=256, crosses=crosses, partition_bytes=64_000,
                  fusion_bytes=8192)
    assert after.weights == before.weights
    assert after.found["is_over"] and len(after.found["trials"]) > 1
