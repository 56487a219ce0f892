"""bench autotune: refused options and the report. Its runs test themselves: weights must agree."""
from __future__ import annotations

import pytest

from bpsfast.bench import autotune
from bpsfast.bench.autotune import Found, Run
from bpsfast.launch.namespaces import netns
from bpsfast.orchestration.errors import ConfigError, PeerLostError


@pytest.mark.parametrize("starts", ["", "64k", "64000,100"])
def test_starts_that_are_no_partition_sizes_are_refused(starts):
    with pytest.raises(ConfigError, match="expected partition sizes in bytes"):
        autotune.run({"starts": starts})


def test_without_namespaces_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(netns, "missing", lambda: "network namespaces need root")
    with pytest.raises(ConfigError, match="links of their own: network namespaces need root"):
        autotune.run({})


def test_training_that_fails_is_told_with_its_words(tmp_path):
    with pytest.raises(PeerLostError, match=r"(?s)training with .*'transport': 'pigeon'.*ended with [1-9].*pigeon"):
        autotune.train(tmp_path, 1, transport="pigeon")


def test_the_report_sets_what_was_chosen_beside_the_best():
    default = Run("abc", [0.2] * 10, {})
    grid = {point: Run("abc", [0.3 - 0.01 * i] * 10, {}) for i, point in enumerate(autotune.GRID)}
    tuned = Run("abc", [0.3] * 6 + [0.38, 0.2], {"chosen": {"partition_nbytes": 1}, "n_steps": 60})
    found = Found(64_000, tuned, autotune.GRID[-1], [{"chosen": 0.21, "best": 0.2}, {"chosen": 0.22, "best": 0.2}])
    text = autotune.report(default, grid, [found])
    assert "after 60 steps, +7.5 % beside the best" in text and "slowest step 1.90 times the defaults'" in text
    assert "the same, bit for bit" in text
    grid[autotune.GRID[0]] = Run("def", [0.1] * 10, {})
    assert "DIFFER" in autotune.report(default, grid, [found])
