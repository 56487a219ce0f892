"""The page that compares bpsfast.hvd with Horovod: each row has four cells, and names a test that exists.
"""
from __future__ import annotations

import ast
import re

import pytest

from tests.support.doc_pages import ROOT

TESTS = ROOT / "tests"
PAGE = ROOT / "bpsfast" / "docs" / "horovod_semantics.md"
ROWS = [line for line in PAGE.read_text().splitlines()
        if line.startswith("|") and not re.match(r"\|( Behaviour |-)", line)]


def named(function):
    """The names that *function* is decorated with as cases."""
    return [argument.value for decorator in function.decorator_list if isinstance(decorator, ast.Call)
            and isinstance(decorator.func, ast.Name) and decorator.func.id == "case" for argument in decorator.args]


@pytest.fixture(scope="module")
def tests():
    """The tests of each file that the page names, with the ids of cases."""
    found = {}
    for name in {name for row in ROWS for name in re.findall(r"`(test_\w+\.py)::", row)}:
        tree = ast.parse(next(TESTS.rglob(name)).read_text())
        functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
        found[name] = {each.name for each in functions if each.name.startswith("test_")}
        found[name] |= {f"test_case[{case}]" for each in functions for case in named(each)}
    return found


def test_there_are_rows_and_cases(tests):
    assert len(ROWS) > 60
    cases = [test for name in ("test_hvd_suite_ops.py", "test_hvd_suite_training.py") for test in tests[name]
             if test.startswith("test_case[")]
    assert len(set(cases)) == len(cases) >= 103  # so many of Horovod's tests run on CPUs


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip().replace("`", "")[:60])
def test_a_row_names_a_test_that_is_there(tests, row):
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == 4 and all(cells)
    name, _, test = cells[3].strip("`").partition("::")
    assert test in tests[name], f"{name} has no {test}"
