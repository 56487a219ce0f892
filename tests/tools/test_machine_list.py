"""Machines as people write them."""
from __future__ import annotations

import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.placement.shares import Machine
from bpsfast.tools.planner import machine_list

G = 1e9 / 8


@pytest.mark.parametrize(("text", "machines"), [
    ("3", [Machine(True, 25 * G)] * 3),
    ("2x25,10", [Machine(True, 25 * G)] * 2 + [Machine(True, 10 * G)]),
    ("7x10, 2.5", [Machine(True, 10 * G)] * 7 + [Machine(True, 2.5 * G)]),
    ("25/8,2x1e1/0.5", [Machine(True, 25 * G, 8 * G)] + [Machine(True, 10 * G, 0.5 * G)] * 2),
    ("1x25", [Machine(True, 25 * G)])])
def test_counts_and_rates(text, machines):
    assert machine_list.parse(text, True, 25.0) == machines


def test_no_helper_is_a_number_of_them():
    assert machine_list.parse("0", False, 25.0) == []


@pytest.mark.parametrize("text", ["", "x", "8x", "x25", "4x25,", "4x25,,3", "25//8", "25/0", "0x25", "-1x25", "4x-25",
                                  "inf", "4x20000", "4097", "4097x25", "99999999999999999999x25"])
def test_anything_else_is_an_error(text):
    with pytest.raises(ConfigError, match=r"^--helpers"):
        machine_list.parse(text, False, 25.0)


def test_descriptions_name_runs():
    machines = machine_list.parse("7x10,2.5,25/8", True, 25.0)
    assert machine_list.describe(machines, "worker") == (
        "7 workers at 10 Gbit/s, 1 worker at 2.5 Gbit/s, 1 worker at 25 Gbit/s (sums 8 Gbit/s)")
    assert machine_list.describe([], "helper") == "no helpers"
