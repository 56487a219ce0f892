"""Portions of the tests: each has some cases of every matrix, and all together have all cases."""
from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given, strategies as st

from tests.support.portions import N_EMULATED, N_PORTIONS, chosen, left_out

ROOT = Path(__file__).resolve().parents[2]
PORTIONS = range(N_PORTIONS)
CASES = [f"a.py::test[{row}-{column}]" for row in range(4) for column in range(N_PORTIONS)]


@given(st.sets(st.text(), min_size=1))
def test_each_case_is_in_a_portion_and_no_portion_is_empty(cases):
    portions = [chosen(cases, portion) for portion in PORTIONS]
    assert all(portions) and set().union(*portions) == cases


@given(st.sets(st.text(), min_size=N_PORTIONS))
def test_cases_that_suffice_are_run_once(cases):
    assert sum(len(chosen(cases, portion)) for portion in PORTIONS) == len(cases)


def test_no_portion_is_one_column():
    """Every sixth case in the order of the matrix would be one column."""
    for portion in PORTIONS:
        assert len({case[-2] for case in chosen(CASES, portion)}) > 1


def test_each_portion_has_its_part_of_each_file():
    cases = [f"{file}.py::test_{n}" for file in "abc" for n in range(2 * N_PORTIONS)]
    for portion in PORTIONS:
        assert [case[0] for case in sorted(chosen(cases, portion))] == list("aabbcc")


def kept(names, portion):
    out = left_out(names, portion)
    return [name for index, (name, *_) in enumerate(names) if index not in out]


def test_only_large_matrices_are_thinned():
    others = [("a.py::alone", False, True), ("a.py::two[0]", False, True), ("a.py::two[1]", False, True),
              *((f"b.py::no_matrix[{n}]", False, False) for n in range(6))]
    names = [*others, *((case, False, True) for case in CASES)]
    for portion in PORTIONS:
        here = kept(names, portion)
        assert [name for name, *_ in others] == here[:len(others)] and len(here) == len(others) + 4


def test_tests_of_one_name_in_two_files_are_two_matrices():
    names = [(f"{file}.py::test[{n}]", False, True) for file, n in itertools.product("ab", PORTIONS)]
    for portion in PORTIONS:
        assert len([name for name in kept(names, portion) if name[0] == "a"]) == 1


def test_nothing_thorough_is_run():
    assert kept([("a.py::test", True, False), ("a.py::other[1]", True, True)], 0) == []


def test_of_what_takes_long_each_run_takes_some_and_all_runs_all():
    quick = [("a.py::quick", False, False)]
    long_ones = [(f"{file}.py::long{case}", False, False) for file in "abcdef" for case in ("", "[0]", "[1]", "[2]")]
    costly = {f"{file}.py::long" for file in "abcdef"}
    runs = []
    for portion in PORTIONS:
        out = left_out(quick + long_ones, portion, costly)
        runs.append({index for index in range(len(quick + long_ones)) if index not in out})
    assert all(0 in run and len(run) == 1 + len(long_ones) // N_PORTIONS for run in runs)
    assert set().union(*runs) == set(range(len(quick + long_ones)))


def test_a_matrix_is_not_thinned_twice():
    names = [(case, False, True) for case in CASES]
    for portion in PORTIONS:
        assert left_out(names, portion, {"a.py::test"}) == left_out(names, portion)


def test_of_the_emulated_machine_each_run_takes_a_sixth():
    names = [(f"suite_{file}.py::test_{n}", False, n > 3) for file in "ab" for n in range(N_EMULATED)]
    functions = {name for name, *_ in names}
    for portion in PORTIONS:
        out = left_out([*names, ("suite_a.py::hours", True, False)], portion, (), {*functions, "suite_a.py::hours"})
        assert len(out) == 1 + len(names) - 2 and len(names) in out


def outcome(folder, *arguments):
    return output(folder, *arguments)[-1].rpartition(" in ")[0]


def output(folder, *arguments):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=folder, env=environ, text=True,
                          capture_output=True, timeout=60)
    return done.stdout.splitlines()


def test_what_is_named_is_run(tmp_path):
    (tmp_path / "conftest.py").write_text("""
from tests.support.portions import pytest_collection_modifyitems, pytest_report_header
from tests.support.portions import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown
def pytest_addoption(parser): parser.addoption("--thorough", action="store_true")
""")
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = *.py\nmarkers =\n    matrix\n    thorough\n")
    (tmp_path / "suite_emulated.py").write_text("".join(f"def test_{n}(): pass\n" for n in range(N_PORTIONS)))
    (tmp_path / "test_few.py").write_text("""
import pytest
@pytest.mark.matrix
@pytest.mark.parametrize("n", range(6))
def test(n): pass
@pytest.mark.thorough
def test_long(): pass
""")
    assert outcome(tmp_path) == "3 passed, 16 deselected"
    assert outcome(tmp_path, "--thorough") == "19 passed"
    assert outcome(tmp_path, "test_few.py::test", "test_few.py::test_long") == "7 passed"
    for processes in ((), ("--numprocesses=2",)):
        assert any(line.startswith("left out: 16 tests, ") for line in output(tmp_path, *processes))
        assert not any("left out" in line for line in output(tmp_path, "--thorough", *processes))
