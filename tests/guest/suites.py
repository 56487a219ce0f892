"""Run the suites of this folder in a guest, and hand their tests' reports to the pytest that collected them here.

The pytest outside collects the files ``suite_*.py`` like any other, then has each of their tests run by a second pytest
in one guest (`conftest` gives both their hooks). That one is started with the list of tests that are left and answers
with JSON lines (see `sender`). A test that ends it fails with its last words; the next test starts another one.
"""
from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.guest import kernel
from tests.guest.machine import GuestDiedError, Job, Machine
from tests.guest.sender import ITEMS

#: Names the folder that gets what coverage.py and gcov count in the guest; its ``coveragerc`` lies beside it.
COVERAGE = "BPSTEST_COVERAGE"
_COUNTED = 'mkdir -p "$OUT/python"; COVERAGE_FILE="$OUT/python/data" GCOV_PREFIX="$OUT/native" exec "$@"'
_COUNTED_END_S = 300.0
START_TIMEOUT_S = 240.0  # for the boot, and for the inner pytest to import everything, on a busy machine
_TAIL = 6000


class Suites:
    """A guest that runs tests. Owner thread only; `close` ends it."""

    def __init__(self) -> None:
        self._machine: Machine | None = None
        self._job: Job | None = None
        self._missing: str | None = None
        self._uncollected: dict[str, str] = {}
        self._read = 0

    def boot(self) -> None:
        """Start the guest, which boots while its owner does something else; `run` waits for it."""
        try:
            if os.environ.get("BPSTEST_GUEST") == "off":
                raise kernel.MissingError("BPSTEST_GUEST=off")
            self._machine = Machine()
        except kernel.MissingError as exc:
            self._missing = f"no guest with RDMA devices: {exc}"

    def run(self, left: Sequence[pytest.Item], timeout_s: float) -> list[pytest.TestReport]:
        """Return the reports of the first item of *left*, which has *timeout_s* seconds; the others come next.

        Without a guest it is skipped. Whatever happens to the guest is a failed report.
        """
        item = left[0]
        found: list[pytest.TestReport] = []
        try:
            if self._machine is None and self._missing is None:
                self.boot()
            if self._missing is not None:
                return [skipped(item, self._missing)]
            if self._job is None:
                self._start(left)
            if item.nodeid in self._uncollected:
                return [failed(item, self._uncollected[item.nodeid])]
            deadline = time.monotonic() + timeout_s
            while (message := self._next(deadline)) != {"finished": item.nodeid}:
                report = item.config.hook.pytest_report_from_serializable(config=item.config, data=message)
                if report.skipped and isinstance(report.longrepr, list):
                    report.longrepr = tuple(report.longrepr)  # JSON knows no tuples
                found.append(report)
        except EOFError as exc:
            self._keep_counts()
            self._job = None
            found.append(failed(item, str(exc)))
        except GuestDiedError as exc:
            if self._job is None:
                self._missing = "no guest with RDMA devices: it did not start for an earlier test"
            self.close()
            found.append(failed(item, str(exc)))
        return found

    def close(self) -> None:
        """End the guest. Idempotent."""
        if self._machine is not None:
            if COVERAGE in os.environ and self._job is not None and self._machine.alive:
                self._job.wait(_COUNTED_END_S)
            self._keep_counts()
            self._machine.close()
        self._machine = self._job = None

    def _keep_counts(self) -> None:
        """Copy what was counted in the job, before its folder goes with the guest."""
        if (counts := os.environ.get(COVERAGE)) is not None and self._job is not None:
            shutil.copytree(self._job.out, Path(counts) / str(len(list(Path(counts).iterdir()))))

    def _start(self, left: Sequence[pytest.Item]) -> None:
        """Start the inner pytest for the tests in *left*, and wait until it collected them."""
        assert self._machine is not None
        root = left[0].config.rootpath
        files = dict.fromkeys(str(item.path) for item in left)
        # of the plugins only those that the settings need: every one costs seconds in there
        command = ["-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--continue-on-collection-errors",
                   *files]
        if (counts := os.environ.get(COVERAGE)) is not None:
            rcfile = Path(counts).parent / "coveragerc"
            counted = ["sh", "-c", _COUNTED, "sh", sys.executable, "-m", "coverage", "run", f"--rcfile={rcfile}"]
        else:
            counted = [sys.executable]
        environ = {ITEMS: "\n".join(item.nodeid for item in left), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        self._job, self._read = self._machine.start([*counted, *command], cwd=root, environ=environ), 0
        self._uncollected = self._next(time.monotonic() + START_TIMEOUT_S)["uncollected"]

    def _next(self, deadline: float) -> dict[str, Any]:
        """Return the next line; EOFError, with its last words, if the inner pytest ended or *deadline* passed."""
        assert self._job is not None
        while True:
            ended = self._job.status is not None  # all it wrote is there then
            line = _line_at(self._job.out / "reports", self._read)
            if line:
                self._read += len(line)
                return json.loads(line)
            if ended:
                self._give_up(f"ended with status {self._job.status}")
            if time.monotonic() > deadline:
                self._job.kill()
                self._give_up("was killed: no report came in time")
            self._job.wait(0.05)

    def _give_up(self, what: str) -> NoReturn:
        assert self._job is not None
        said = "\n".join(f"its {name} ended with:\n{text[-_TAIL:]}" for name in ("stdout", "stderr")
                         if (text := self._job.read(name).strip()))
        raise EOFError(f"the pytest in the guest {what}\n{said}")


def _line_at(path: Path, offset: int) -> bytes:
    """Return the whole line at *offset*, nothing if it is not there yet."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        line = file.readline()
        return line if line.endswith(b"\n") else b""


def failed(item: pytest.Item, text: str) -> pytest.TestReport:
    """Return the report of a test that the guest did not bring to its end."""
    return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, "call")


def skipped(item: pytest.Item, reason: str) -> pytest.TestReport:
    """Return the report of a test that cannot be run here."""
    where = (__file__, 1, f"Skipped: {reason}")  # one place for all, so that pytest shows one line for all
    return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "skipped", where, "setup")
