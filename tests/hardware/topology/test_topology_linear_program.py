"""Linear programs by names."""
from __future__ import annotations

import sys

import pytest

from bpsfast.hardware.topology.linear_program import LinearProgram
from bpsfast.orchestration.errors import BpsError, ConfigError


def test_the_second_goal_is_looked_for_among_the_best_of_the_first():
    program = LinearProgram()
    program.equal({"a": 1.0, "b": 1.0, "c": 1.0}, 1.0)
    program.at_most({"a": 1.0}, 0.25)
    found = program.least({"c": 1.0}, {"b": 1.0})
    assert found == pytest.approx({"a": 0.25, "b": 0.75, "c": 0.0}, abs=1e-8)


def test_what_nothing_fulfils_is_said():
    program = LinearProgram()
    program.equal({"a": 1.0}, -1.0)
    with pytest.raises(BpsError, match="no use of the machine's links is possible"):
        program.least({"a": 1.0})


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    program = LinearProgram()
    program.equal({"a": 1.0}, 1.0)
    with pytest.raises(ConfigError, match=r"pip install 'bpsfast\[plan\]'"):
        program.least({"a": 1.0})
