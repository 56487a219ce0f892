"""The list of slow tests is read as it is written, and names only existing tests."""
from __future__ import annotations

from pathlib import Path

from tests.support.costs import COSTLY_S, function_of, main, read

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_long[1-2]" time="9.0"/>
<testcase classname="tests.test_a" name="test_long[a::b]" time="1.0"/>
<testcase classname="tests.test_a.TestClass" name="test_as_long" time="{limit}"/>
<testcase classname="tests.test_a" name="test_quick" time="0.9"/>
<testcase classname="tests.project.test_layers" name="test_of_the_tree" time="9.0"/>
<testcase classname="tests.test_a" name="test_skipped" time="9"><skipped/></testcase>
<testcase classname="" name="tests.test_broken" time="9"><error/></testcase>
</testsuite></testsuites>"""


def test_functions_whose_cases_take_long_on_average(tmp_path):
    older, report, out = tmp_path / "older.xml", tmp_path / "junit.xml", tmp_path / "costly.txt"
    older.write_text("<testsuite><testcase classname='tests.test_a' name='test_quick' time='9'/></testsuite>")
    report.write_text(REPORT.format(limit=COSTLY_S))
    assert main([str(older), str(report), "--out", str(out)]) == 0
    assert read(out) == {"tests/test_a.py::test_long", "tests/test_a.py::TestClass::test_as_long"}


def test_what_is_listed_is_there():
    """A renamed test would always run, unnoticed."""
    texts = {path.name: path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py")}
    missing = []
    for name in read():
        path, *parts = name.split("::")
        text = texts.get(path.rpartition("/")[2], "")
        if not all(part in text or part == "runTest" for part in parts):  # the one test of hypothesis's state machines
            missing.append(name)
    assert missing == []


def test_a_case_is_of_its_function():
    assert function_of("tests/test_a.py::test[a::b[0]]") == "tests/test_a.py::test"
