"""Selects the tests of a run, so that it ends in time on a small machine; it leaves out most slow tests.

    pytestmark = pytest.mark.matrix     # a twelfth of the cases of each test with three or more, chosen by the commit
    @pytest.mark.thorough               # no case

A twelfth of the other tests in the list of slow tests (see `tests.support.costs`) is run. In the emulated machine all
tests are slow, and a sixth is run.

Hooks of pytest, for conftest. ``--thorough`` (make test-thorough) runs all tests, and so does naming tests with ``::``.
"""
from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.guest.sender import ITEMS
from tests.support.costs import function_of, read

#: This many runs together have all cases, and those of the emulated machine twice.
N_PORTIONS = 12
N_EMULATED = 6
#: Names of files whose tests run in the emulated machine.
EMULATED = "suite_"
_FEW = 3
_N_LEFT_OUT = pytest.StashKey[int]()


def chosen(cases: Collection[str], portion: int, n_portions: int = N_PORTIONS) -> set[str]:
    """Return one of *n_portions* of *cases*: some of each file, in an order that is independent of the matrix axes."""
    ordered = sorted(cases, key=lambda case: (case.partition("::")[0], zlib.crc32(case.encode()), case))
    return set(ordered[portion % min(n_portions, len(ordered) or 1)::n_portions])


def portion_of_commit() -> int:
    """Return 0 to 11 by the commit of this working tree; 0 if there is none."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True,
                          check=False)
    return int(done.stdout.strip() or "0", 16) % N_PORTIONS


def left_out(names: Sequence[tuple[str, bool, bool]], portion: int, costly: Collection[str] = (),
             emulated: Collection[str] = ()) -> set[int]:
    """Return the indices of omitted *names*: (node id, whether thorough, whether of a matrix).

    *costly* and *emulated* are test functions. Other marks of emulated ones have no effect, and cases of a matrix are
    selected only by the matrix.
    """
    matrices: dict[str, list[str]] = {}
    long_ones, in_guest = [], []
    for name, is_thorough, in_matrix in names:
        function = function_of(name)
        if is_thorough:
            continue
        if function in emulated:
            in_guest.append(name)
        elif in_matrix and "[" in name:
            matrices.setdefault(function, []).append(name)
        elif function in costly:
            long_ones.append(name)
    large = [cases for cases in matrices.values() if len(cases) >= _FEW]
    thinned = {*long_ones, *in_guest, *(case for cases in large for case in cases)}
    drawn = chosen(long_ones, portion) | chosen(in_guest, portion, N_EMULATED)
    drawn = drawn.union(*(chosen(cases, portion) for cases in large))
    return {index for index, (name, is_thorough, _) in enumerate(names)
            if is_thorough or (name in thinned and name not in drawn)}


def _takes_all(config: pytest.Config) -> bool:
    """Return whether all tests run, as in the emulated machine, which gets the names of its tests."""
    return config.getoption("--thorough") or ITEMS in os.environ or any("::" in each for each in config.args)


@pytest.fixture
def takes_all(request: pytest.FixtureRequest) -> bool:
    """Return whether all tests run."""
    return _takes_all(request.config)


def pytest_report_header(config: pytest.Config) -> str:
    """Return a line about the selected tests."""
    if _takes_all(config):
        return "all cases"
    portion = f"portion {portion_of_commit() + 1} of {N_PORTIONS}"
    return f"{portion} of each matrix and of what takes long, drawn by the commit; --thorough takes all cases"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that this run leaves out."""
    if _takes_all(config):
        return
    emulated = {function_of(item.nodeid) for item in items if item.path.name.startswith(EMULATED)}
    out = left_out([(item.nodeid, item.get_closest_marker("thorough") is not None,
                     item.get_closest_marker("matrix") is not None) for item in items],
                   portion_of_commit(), read(), emulated)
    config.hook.pytest_deselected(items=[items[index] for index in sorted(out)])
    config.stash[_N_LEFT_OUT] = len(out)
    items[:] = [item for index, item in enumerate(items) if index not in out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a process of xdist, report the number of omitted tests to the main process."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["n_left_out"] = session.config.stash.get(_N_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive that report; all processes of xdist collect the same tests."""
    node.config.stash[_N_LEFT_OUT] = getattr(node, "workeroutput", {}).get("n_left_out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the number of omitted tests and how to run them."""
    if n := config.stash.get(_N_LEFT_OUT, 0):
        terminalreporter.write_line(
            f"left out: {n} tests, of large matrices and of what takes long all but a portion (drawn by the commit). "
            "`make test-thorough` or `pytest --thorough FILE` runs all; `pytest FILE::TEST` runs one whole test")
