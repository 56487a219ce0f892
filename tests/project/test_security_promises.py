"""SECURITY.md names a test for each of its promises; all of them exist."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "SECURITY.md").read_text()
#: (file, beginning of a test's name or ""), as in `file`: `test one`, `test two`.
NAMED = [(file, name) for file, names in re.findall(r"`(test_\w+)`(?:: ((?:`\w+(?:\.\.\.)?`(?:, )?)+))?", TEXT)
         for name in re.findall(r"`(\w+)", names) or [""]]


def test_promises_are_found():
    assert len(NAMED) > 20


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_the_test_that_shows_it_is_there(file, name):
    assert f"def test_{name}" in next(TESTS.rglob(f"{file}.py")).read_text()
