"""Fixtures: `job` starts real jobs, `shared_job` keeps them for a module; `no_leaks` counts, `pidfd_of` watches an end;
`recorded_machine` unpacks a tree of tests/sysfs_trees; `golden` compares text with a file of tests/golden.

    def mean_of_ranks():                      # runs on every rank, in its own process
        return bpsfast.push_pull(np.full(4, bpsfast.rank(), "f4"), name="x")

    def test_mean(job):
        for result in job(ranks=(2, 1)).run(mean_of_ranks): ...
"""
from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bpsfast.base import logs
from tests.support.every_shape import SHAPES, SturdyJob
from tests.support.forked import start_server
from tests.support.jobs import Job
from tests.support.portions import (  # noqa: F401 - hooks and a fixture
    pytest_collection_modifyitems,
    pytest_report_header,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    takes_all,
)
from tests.sysfs_trees.machine import Machine


@pytest.fixture(autouse=True)
def unconfigured_logging() -> None:
    """Undo what a test before has done to bpsfast's loggers in this process: `caplog` would hear nothing."""
    logger = logging.getLogger("bpsfast")
    logger.setLevel(logging.NOTSET)
    logger.propagate, logger.disabled = True, False
    if logs._handler is not None:
        logger.removeHandler(logs._handler)
        logs._handler = None
    logs._formatter.__init__()


def uses_torch(module: Any) -> bool:
    """Whether the tests of *module* import torch, and so do their ranks."""
    return hasattr(module, "torch")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what ranks are forked from before any test counts descriptors."""
    if any(uses_torch(getattr(item, "module", None)) for item in session.items):
        start_server()


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Callable[..., Job]]:
    """Start jobs: ``job(ranks=(2, 1), helpers=0, transport="tcp", **settings)``. They are ended after the test.

    A test that breaks its job on purpose kills it: ``job(...).kill()``.
    """
    started: list[Job] = []

    def start(*arguments: Any, **values: Any) -> Job:
        started.append(Job(*arguments, **{"forked": uses_torch(request.module)} | values))
        return started[-1]

    yield start
    _end(started)


@pytest.fixture(scope="module")
def shared_job(request: pytest.FixtureRequest) -> Iterator[Callable[..., Job]]:
    """As `job`, but jobs of the same arguments are started once in a module. Tests must use names of their own."""
    started: dict[str, Job] = {}

    def start(*arguments: Any, **values: Any) -> Job:
        key = repr((arguments, sorted(values.items())))
        if key not in started:
            started[key] = Job(*arguments, **{"forked": uses_torch(request.module)} | values)
        return started[key]

    yield start
    _end(list(started.values()))


@pytest.fixture(scope="module")
def keras_on_tensorflow() -> Iterator[None]:
    """Let Keras compute with TensorFlow in what this module starts, whichever backend other modules have asked for."""
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    yield
    if before is None:
        del os.environ["KERAS_BACKEND"]
    else:
        os.environ["KERAS_BACKEND"] = before


@pytest.fixture(scope="module")
def torch_ranks() -> Iterator[Callable[..., Any]]:
    """Up to four ranks that make their groups themselves: ``torch_ranks(4, nodes=2)``; see `tests.support.torch_ranks`.

    Their processes stay for a module; where one has died, or has not answered, all are started anew.
    """
    from tests.support.torch_ranks import Processes, TorchRanks

    started: list[Processes] = []

    def start(size: int, nodes: int = 1) -> TorchRanks:
        if not started or started[-1].is_spoilt:
            for each in started:
                each.kill()
            started[:] = [Processes(4)]
        return TorchRanks(started[0], size, nodes)

    yield start
    _end(list(started))


@pytest.fixture
def two(shared_job: Callable[..., Job]) -> Job:
    """Two ranks of one machine."""
    return shared_job(ranks=(2,), transport="auto")


@pytest.fixture
def three(shared_job: Callable[..., Job]) -> Job:
    """Two ranks of one node and one of another, over tcp."""
    return shared_job(ranks=(2, 1), transport="tcp")


@pytest.fixture(scope="session", params=SHAPES, ids=lambda ranks: "+".join(map(str, ranks)))
def everywhere(request: pytest.FixtureRequest) -> Iterator[SturdyJob]:
    """Each of the shapes of jobs in turn, for all tests that want it: see `tests.support.every_shape`."""
    job = SturdyJob(lambda: Job(ranks=request.param, forked=True), request.param)
    yield job
    job.close()


def _end(jobs: list[Job]) -> None:
    failures = []
    for each in jobs:
        try:
            if any(process.returncode is None for process in each.ranks):  # not killed by its test
                each.close()
        except Exception as exc:
            failures.append(exc)
        finally:
            each.kill()
    if failures:
        raise failures[0]


def counts() -> tuple[int, int]:
    """Return the descriptors and the threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail if the test leaves descriptors or threads behind in this process."""
    before = counts()
    yield
    assert counts() == before, "descriptors, threads"


@pytest.fixture
def pidfd_of() -> Iterator[Callable[[int], int]]:
    """Open pidfds for the test: readable when the process has ended."""
    with contextlib.ExitStack() as stack:

        def open_pidfd(pid: int) -> int:
            fd = os.pidfd_open(pid)
            stack.callback(os.close, fd)
            return fd

        yield open_pidfd


@pytest.fixture
def recorded_machine(tmp_path: Path) -> Callable[[str], Machine]:
    """Unpack the tree of that name, each time anew; see `tests.sysfs_trees`."""
    number = itertools.count()
    return lambda name: Machine(name, tmp_path / f"{next(number)}.{name}")


def pytest_configure() -> None:
    with contextlib.suppress(ImportError):  # tests of a GPU's machine are run with what is there
        from hypothesis import HealthCheck, settings

        # how long an example takes on a machine that others use, too, tells nothing
        settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("shared machine")
    # A shell that started the tests with `&` ignores Ctrl-C for them, and for every process they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    parser.addoption("--thorough", action="store_true",
                     help="run all cases of all tests (see tests/support/portions.py)")
    parser.addoption("--write-golden", action="store_true",
                     help="write tests/golden/* from what the code says now; read the difference before you commit it")
    parser.addoption("--strangers-messages", type=int, default=3000,
                     help="how many messages strangers say to each kind of listening socket of a job")


@pytest.fixture
def n_strangers_messages(request: pytest.FixtureRequest) -> int:
    """How many messages strangers say to each kind of socket."""
    return request.config.getoption("--strangers-messages")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare text with tests/golden/NAME, or write that file if --write-golden was given."""
    folder = Path(__file__).with_name("golden")

    def compare(name: str, text: str) -> None:
        if request.config.getoption("--write-golden"):
            (folder / name).write_text(text)
        assert (folder / name).exists(), f"no golden file {name}: python -m pytest --write-golden makes it"
        assert text == (folder / name).read_text(), f"differs from golden/{name}; if it should: --write-golden"

    return compare


@pytest.fixture
def engine_node():
    """Return a factory of engine nodes (`tests.support.engine_node`), all closed at the end."""
    from tests.support.engine_node import EngineNode

    made = []

    def make(*args, **kwargs):
        made.append(EngineNode(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()
