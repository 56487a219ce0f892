"""Hooks: suites are collected by the pytest outside and run by one in the guest, see `suites`.

``BPSTEST_GUEST=off`` skips them; in the guest the variable is 1.
"""
from __future__ import annotations

import faulthandler
import os
from types import ModuleType

import pytest

from bpsfast.hardware.verbs import PROVIDERS, provider
from bpsfast.pyx.verbs import VerbsMissing
from tests.guest.sender import ITEMS, Sender
from tests.guest.suites import Suites
from tests.support.portions import EMULATED

_SLACK_S = 60.0  # the guest's own time limits come first
_TIMEOUT_S = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    if ITEMS in os.environ:
        config.pluginmanager.register(Sender(config))
    elif os.environ.get("BPSTEST_GUEST") != "1":
        config.pluginmanager.register(Outside())


class Outside:
    """The hooks of the pytest outside."""

    def __init__(self) -> None:
        self._suites = Suites()
        self._left: list[pytest.Item] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Put the suites last, so that the guest boots while other tests run."""
        items.sort(key=_is_suite)
        for item in filter(_is_suite, items):
            mark = item.get_closest_marker("timeout")
            item.stash[_TIMEOUT_S] = _SLACK_S + float(mark.args[0] if mark else config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(0), append=False)  # it is the guest's

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._left = [item for item in session.items if _is_suite(item)]
        if self._left and not session.config.option.collectonly:
            self._suites.boot()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not _is_suite(item):
            return None
        faulthandler.cancel_dump_traceback_later()  # what hangs, hangs in the guest
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._suites.run(self._left, item.stash[_TIMEOUT_S]):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        del self._left[0]
        return True

    def pytest_unconfigure(self) -> None:
        self._suites.close()


def _is_suite(item: pytest.Item) -> bool:
    return item.path.name.startswith(EMULATED)


@pytest.fixture(params=PROVIDERS)
def verbs(request: pytest.FixtureRequest) -> ModuleType:
    """Each implementation of verbs in turn."""
    try:
        return provider(request.param)
    except VerbsMissing as exc:
        pytest.skip(str(exc))
