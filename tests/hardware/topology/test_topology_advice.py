"""What people are told of the best strategy."""
from __future__ import annotations

import pytest

from bpsfast.base.settings import Settings
from bpsfast.hardware.topology.decision import report_strategy
from tests.support.gpu_machines import GIGA, dgx1, switched


def test_the_busiest_come_first():
    advice = report_strategy(dgx1(), 0.75)
    names = [name for _, name, _ in advice.busiest()]
    assert names[0] == "nic0 on the wire" and {"switch0 - socket0", "nic0 - switch0"} == set(names[1:3])
    assert advice.busiest()[0][0] == pytest.approx(advice.chosen.loads.time)
    assert len(names) == 5


def test_lines_hold_the_numbers():
    said = "\n".join(report_strategy(switched(wire_rate=1e15)).lines())
    assert "122 ms for each GB of gradient; at least 122 ms with any strategy, 133 ms with the paper's rule" in said


def test_a_card_of_unknown_rate_is_not_called_busy():
    assert not any("wire" in name for _, name, _ in report_strategy(switched(wire_rate=0.0)).busiest())


def test_what_is_forced_stands_beside_what_is_best():
    advice = report_strategy(dgx1(wire_rate=1e15), 0.75, Settings(reduce_roots="0"))
    said = "\n".join(advice.lines())
    assert "100% from gpu2 to socket0" in said or "from gpu3" in said
    assert "But forced by reduce_roots = 0:" in said and "100% from gpu0 to socket0" in said and "57.1 % more" in said
    assert advice.busiest()[0][1:] == ("switch0 - socket0", pytest.approx(2.75))
    told = advice.as_dict()["forced"]
    assert told["by"] == "reduce_roots = 0" and told["seconds_per_byte"] == pytest.approx(2.75 / (13 * GIGA))
    assert told["ways"][0]["copied"] == [{"root": "gpu0", "socket": "socket0", "part": pytest.approx(1.0)}]


def test_nothing_is_forced_without_a_setting():
    advice = report_strategy(dgx1())
    assert advice.forced is None and advice.as_dict()["forced"] is None and "forced" not in "".join(advice.lines())


def test_who_could_send_straight_is_told_and_done_if_asked():
    off, on = report_strategy(dgx1(), 0.75), report_strategy(dgx1(), 0.75, Settings(gpu_direct=True))
    assert "Directly to a network card (gpu_direct, off; never measured):" in off.lines()
    assert "  gpu0 can, to nic0" in off.lines() and any(line.startswith("  gpu2 cannot: it") for line in off.lines())
    assert "directly to nic0" in on.lines()[2] and "(gpu_direct, on; " in "\n".join(on.lines())
    told = on.as_dict()
    assert told["ways"][0]["copied"][0]["card"] == "nic0" and told["gpu_direct"]["on"]
    assert [pair["gpu"] for pair in told["gpu_direct"]["pairs"] if not pair["reason"]] == ["gpu0", "gpu1"]


def test_of_a_machine_without_gpus_nothing_is_said_of_them():
    assert "Directly" not in "".join(report_strategy(switched((), (0,))).lines())
