"""What people are told of the best strategy."""
from __future__ import annotations

import pytest

from bpsfast.topology.advice import advise
from tests.gpu_machines import dgx1, switched


def test_the_busiest_come_first():
    advice = advise(dgx1(), 0.75)
    names = [name for _, name, _ in advice.busiest()]
    assert names[0] == "nic0 on the wire" and {"switch0 - socket0", "nic0 - switch0"} == set(names[1:3])
    assert advice.busiest()[0][0] == pytest.approx(advice.chosen.loads.time)
    assert len(names) == 5


def test_lines_hold_the_numbers():
    said = "\n".join(advise(switched(wire_rate=1e15)).lines())
    assert "122 ms for each GB of gradient; at least 122 ms on any way, 133 ms by the rule of the paper" in said


def test_a_card_of_unknown_rate_is_not_called_busy():
    assert not any("wire" in name for _, name, _ in advise(switched(wire_rate=0.0)).busiest())
