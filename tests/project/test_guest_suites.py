"""Suites that another pytest runs: each of their tests is reported here with the same result.

Instead of a guest, a process of this machine runs the inner pytest, because only the transfer of results is tested.
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_CONFTEST = f"""
import os, subprocess, sys, tempfile
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.guest import conftest, kernel, suites
from tests.guest.conftest import pytest_configure

class Job:
    def __init__(self, command, cwd, environ):
        self.status, self.folder = None, Path(tempfile.mkdtemp(dir=os.environ["JOBS"]))
        self.out = self.folder / "out"
        self.out.mkdir()
        self._files = [(self.folder / name).open("wb") for name in ("stdout", "stderr")]
        environ = {{**os.environ, "BPSTEST_GUEST": "1", "OUT": str(self.out), **environ}}
        self._process = subprocess.Popen(command, cwd=cwd, env=environ, stdout=self._files[0], stderr=self._files[1])
    def wait(self, timeout_s):
        try:
            self.status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True
    def kill(self):
        self._process.kill()
        self.status = self._process.wait()
    def read(self, name):
        return (self.folder / name).read_text()

class Machine:
    def __init__(self):
        if "NO_MACHINE" in os.environ:
            raise kernel.MissingError("no emulator: apt-get install emulator")
        self.job = None
    def start(self, command, cwd, environ):
        self.job = Job(command, cwd, environ)
        return self.job
    def close(self):
        if self.job is not None:
            self.job.kill()

suites.Machine = Machine
conftest._SLACK_S = 5
"""

_SUITES = {
    "suite_a.py": """
import os, time, pytest
def test_passes(): pass
def test_fails():
    print("said before")
    assert 1 == 2
def test_ends_the_process():
    os.abort()
@pytest.mark.skip(reason="not today")
def test_is_skipped(): pass
@pytest.mark.timeout(2)
def test_hangs(): time.sleep(100)
@pytest.fixture
def broken():
    yield
    assert 0, "in teardown"
def test_breaks_at_the_end(broken): pass
@pytest.mark.timeout(1, method="thread")
def test_hangs_for_good(): time.sleep(100)
@pytest.mark.parametrize("x", ["a b", "ü"])
def test_has_parameters(x): pass
""",
    "suite_b.py": """
import os
if os.environ.get("BPSTEST_GUEST") == "1":
    raise RuntimeError("only in there")
def test_is_never_collected(): pass
""",
    "test_c.py": "def test_outside(): import os; assert os.environ.get('BPSTEST_GUEST') != '1'\n",
}


@pytest.fixture
def run(tmp_path):
    """Run the suites; return the status and the output."""
    for name, text in {"conftest.py": _CONFTEST, **_SUITES}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = suite_*.py test_*.py\ntimeout = 20\naddopts = -ra\n")
    (tmp_path / "jobs").mkdir()

    def run(*arguments: str, **environ: str) -> tuple[int, str]:
        values = {name: value for name, value in os.environ.items() if not name.startswith("BPSTEST_")}
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=values | {"JOBS": str(tmp_path / "jobs")} | environ,
                              capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode < 2, done.stdout + done.stderr
        return done.returncode, done.stdout

    return run


def test_every_test_is_reported_as_what_it_was(run):
    status, output = run()
    verdicts = re.findall(r"^(\S+?)::(\S+(?: b\])?) (PASSED|FAILED|SKIPPED|ERROR)", output, re.M)
    assert status == 1 and verdicts == [
        ("test_c.py", "test_outside", "PASSED"),  # the suites come last
        ("suite_a.py", "test_passes", "PASSED"),
        ("suite_a.py", "test_fails", "FAILED"),
        ("suite_a.py", "test_ends_the_process", "FAILED"),
        ("suite_a.py", "test_is_skipped", "SKIPPED"),
        ("suite_a.py", "test_hangs", "FAILED"),
        ("suite_a.py", "test_breaks_at_the_end", "PASSED"),
        ("suite_a.py", "test_breaks_at_the_end", "ERROR"),
        ("suite_a.py", "test_hangs_for_good", "FAILED"),
        ("suite_a.py", "test_has_parameters[a b]", "PASSED"),
        ("suite_a.py", "test_has_parameters[\\xfc]", "PASSED"),
        ("suite_b.py", "test_is_never_collected", "FAILED"),
    ]
    for said in ("assert 1 == 2", "said before", "ended with status -6", "Fatal Python error: Aborted", "not today",
                 "Timeout (>2.0s)", "in teardown", "only in there"):
        assert said in output, said


def test_only_what_is_selected_is_run(run):
    status, output = run("-k", "passes or parameters")
    assert status == 0 and "3 passed" in output


def test_the_reason_why_there_is_no_guest_is_one_line(run):
    status, output = run(NO_MACHINE="1")
    assert status == 0 and "1 passed, 10 skipped" in output
    assert re.findall(r"^SKIPPED .*$", output, re.M) == [
        f"SKIPPED [10] {output.split('SKIPPED [10] ')[1].split(': no guest')[0]}: "
        "no guest with RDMA devices: no emulator: apt-get install emulator"]
    status, output = run(BPSTEST_GUEST="off")
    assert "no guest with RDMA devices: BPSTEST_GUEST=off" in output
