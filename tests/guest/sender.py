"""What the pytest in the guest tells the one outside (`suites`), and which tests it is asked for."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

#: The variable that names the wanted tests: node ids, one a line.
ITEMS = "BPSTEST_ITEMS"


class Sender:
    """A plugin that runs the wanted tests only, and writes lines to ``$OUT/reports``.

    First {"uncollected": {node id: why}}, of those wanted; then for each test its reports as pytest serialises them,
    and {"finished": node id}.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.wanted = list(dict.fromkeys(os.environ[ITEMS].split("\n")))
        self._config = config
        self._broken: dict[str, str] = {}
        self._file = Path(os.environ["OUT"], "reports").open("a", buffering=1)

    def _send(self, message: dict[str, Any]) -> None:
        self._file.write(json.dumps(message) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken[report.nodeid] = report.longreprtext

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        there = {item.nodeid: item for item in items}
        items[:] = [there[name] for name in self.wanted if name in there]
        self._send({"uncollected": {
            name: self._broken.get(name.partition("::")[0], "this test was not found in the guest")
            for name in self.wanted if name not in there
        }})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._send({"finished": nodeid})
