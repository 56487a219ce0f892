"""bench overhead: refused options, the table, and one short run of the real program."""
from __future__ import annotations

import sys

import pytest

from bpsfast.bench import overhead
from bpsfast.orchestration.errors import ConfigError, PeerLostError


def test_an_interpreter_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"--against /nowhere/python: expected the path of a Python interpreter"):
        overhead.run({"against": "/nowhere/python"})


def test_the_table_names_versions_and_units():
    measured = {"samples_s": [2e-5], "median_s": 2e-5, "calls": 12.25, "locks": 1.0}
    text = overhead.report([{"section": "overhead", "chosen": {"version": "this", "n_tensors": 161},
                             "measured": measured}])
    assert text.splitlines()[0].split() == ["tensors", "version", "us", "per", "tensor", "Python", "calls", "locks"]
    assert text.splitlines()[1].split() == ["161", "this", "20.00", "12.2", "1.0"]


def test_a_run_measures_and_counts():
    pytest.importorskip("torch", reason="torch is not installed")
    found = overhead.measure(sys.executable, 8, 256, 2, counts=True)
    assert len(found["samples_s"]) == 2 and found["calls"] > 1 and found["locks"] >= 0


def test_a_program_that_fails_is_an_error_with_its_output():
    with pytest.raises(PeerLostError, match="ended with"):
        overhead.measure(sys.executable, 0, 256, 1)
