"""A strategy in words and by roots."""
from __future__ import annotations

from bpsfast.hardware.topology.loads import Loads
from bpsfast.hardware.topology.strategy_solver import Strategy, StrategyShare


def test_a_roots_part_is_that_of_all_its_copies():
    way = StrategyShare(1.0, (("a", "b"),), {("a", "s"): 0.25, ("a", "t"): 0.25, ("b", "t"): 0.5})
    assert way.roots() == {"a": 0.5, "b": 0.5}


def test_words():
    ways = (StrategyShare(0.75, (("a", "b"), ("c",)), {("a", "s"): 1.0, ("c", "s"): 1.0}),
            StrategyShare(0.25, (("s",),), {("s", "s"): 1.0}))
    assert Strategy(ways, Loads({}, {}, {}, 0.0)).lines() == [
        "75.0% of the gradient: summed in {a, b}; 100% from a to s, 100% from c to s",
        "25.0% of the gradient: by each for itself; added in memory, where it is"]
