"""Simulated time runs forwards, and events of one moment keep the order they were planned in."""
from __future__ import annotations

import math

import pytest

from bpsfast.tools.simulator.network import Clock


def test_events_happen_by_time_then_in_the_order_they_were_planned() -> None:
    clock, seen = Clock(), []
    for time_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        clock.at(time_s, lambda name=name: seen.append((clock.now, name)))
    clock.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]
    assert clock.n_events == 4


@pytest.mark.parametrize("time_s", [-1.0, math.nan])
def test_nothing_is_planned_for_the_past(time_s: float) -> None:
    with pytest.raises(ValueError, match="time does not run backwards"):
        Clock().at(time_s, print)
