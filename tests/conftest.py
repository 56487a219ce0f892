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
import inspect
import itertools
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from bpsfast import logs, settings
from bpsfast.launch import daemons, job as launch
from bpsfast.launch.supervisor import Kind
from tests.every_shape import SHAPES, SturdyJob
from tests.forked import ForkedRank, start_server
from tests.sysfs_trees.machine import Machine
from tests.thirds import pytest_collection_modifyitems, pytest_report_header, takes_all  # noqa: F401 - hooks

_RANK_PROGRAM = str(Path(__file__).with_name("rank_process.py"))


class RankError(AssertionError):
    """A function raised on a rank; the text holds its traceback."""


class Outcome:
    """What became of a function on one rank: `value`, or the `error`'s class name and `text`."""

    def __init__(self, kind: str, *fields: Any) -> None:
        self.value = fields[0] if kind == "value" else None
        self.error, self.text, self.traceback = fields if kind == "error" else ("", "", "")

    def __repr__(self) -> str:
        return f"<{self.error}: {self.text}>" if self.error else f"<{self.value!r}>"


class Job:
    """A real job on this machine: one scheduler, a node and its ranks for each entry of *ranks*, helpers.

    The ranks' processes live as long as the job and run what `run` sends them. All processes are this object's
    children; `close` ends the job in order and fails if something had to be killed. *forked*: see `tests.forked`.
    """

    def __init__(self, ranks: tuple[int, ...] = (2,), helpers: int = 0, transport: str = "auto", attach: bool = True,
                 key: bytes = b"", forked: bool = False, **values: Any) -> None:
        values = {"start_timeout_s": 40, "timeout_s": 40, "transport": transport} | values
        shape = launch.Shape(ranks=tuple(ranks), n_helpers=helpers)
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.key = key or secrets.token_bytes(32)
        self._port = daemons.reserve_port("127.0.0.1")
        self.ranks: list[subprocess.Popen | ForkedRank] = []
        self.daemons: dict[str, subprocess.Popen] = {}
        self._forked = forked
        self._pipes: list[Connection] = []
        self._commands: dict[str, Any] = {}
        try:
            commands = launch.plan(shape, [sys.executable, _RANK_PROGRAM], settings.load(values, {}), environ,
                                   self._port.getsockname(), self.key.hex())
            self._helpers = {command.name: command for command in commands if command.kind is Kind.HELPER}
            for command in commands:
                self._start(command, values)
            if attach:
                self.call("init")
        except BaseException:
            self.kill()
            raise
        self._attached = attach

    def _start(self, command: Any, values: dict[str, Any]) -> None:
        self._commands[command.name] = command
        if command.kind is not Kind.RANK:
            self.daemons[command.name] = subprocess.Popen(command.argv, env=command.environ, stdin=subprocess.DEVNULL)
            return
        self._start_rank(command.argv, command.environ)

    def _start_rank(self, argv: list[str], environ: dict[str, str]) -> None:
        ours, theirs = Pipe()
        with theirs:
            self.ranks.append(ForkedRank(environ, theirs) if self._forked else subprocess.Popen(
                argv, env={**environ, "BPSTEST_FD": str(theirs.fileno())}, stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()]))
        self._pipes.append(ours)

    # -- what tests do ---------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run *function*, a top-level function of a test module, on every rank; return the results by rank."""
        return self._values(self.attempt(function, *arguments, timeout_s=timeout_s))

    def attempt(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Outcome]:
        """As `run`, but return what became of it on each rank; a rank that died has the error "died"."""
        self.begin(function, *arguments)
        return self.outcomes(timeout_s)

    def begin(self, function: Callable[..., Any], *arguments: Any, only: tuple[int, ...] | None = None) -> None:
        """Start *function* on every rank (or on *only* these) and return at once."""
        self._send(inspect.getsourcefile(function), function.__name__, arguments, only)

    def outcomes(self, timeout_s: float = 60.0, only: tuple[int, ...] | None = None) -> list[Outcome]:
        """Wait for what `begin` started."""
        deadline = time.monotonic() + timeout_s
        chosen = range(self.size) if only is None else only
        return [self._outcome(rank, deadline) for rank in chosen]

    def call(self, name: str, *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call ``bpsfast.<name>`` on every rank."""
        self._send(None, name, arguments, None)
        return self._values(self.outcomes(timeout_s))

    def kill_rank(self, rank: int) -> None:
        """``kill -9`` one rank."""
        self.ranks[rank].kill()
        self.ranks[rank].wait(10)

    def kill_daemon(self, name: str) -> None:
        """``kill -9`` "scheduler", "node 1" or "helper 0"."""
        self.daemons[name].kill()
        self.daemons[name].wait(10)

    def lose(self, *names: str) -> None:
        """``kill -9`` daemons that the job goes on without: how they ended is not looked at in the end."""
        lost = [self.daemons.pop(name) for name in names]
        for process in lost:
            process.kill()
        for process in lost:
            process.wait(10)

    def restart(self, name: str) -> None:
        """Start a daemon that was killed again, as it was started first."""
        Job._start(self, self._commands[name], {})  # a subclass has put in it what it puts there

    def add(self, *names: str, **environ: str) -> None:
        """Start helpers while the job runs: lost ones again, or others like the first, with *environ* besides."""
        for name in names:
            like = self._helpers.get(name, next(iter(self._helpers.values())))
            place = {"BPSFAST_NODE_ID": name.replace(" ", ""), "BPSFAST_NODE_INDEX": "-1"}
            self.daemons[name] = subprocess.Popen(like.argv, env={**like.environ, **place, **environ},
                                                  stdin=subprocess.DEVNULL)

    # -- innards ---------------------------------------------------------------------------------------------------

    def _send(self, path: str | None, name: str, arguments: tuple[Any, ...], only: tuple[int, ...] | None) -> None:
        for rank in range(self.size) if only is None else only:
            self._pipes[rank].send_bytes(pickle.dumps((path, name, arguments)))

    def _outcome(self, rank: int, deadline: float) -> Outcome:
        pipe = self._pipes[rank]
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return Outcome(*pickle.loads(pipe.recv_bytes()))
        except (EOFError, OSError):  # also in the midst of an answer
            return Outcome("error", "died", f"rank {rank} ended with {self.ranks[rank].wait(5)}", "")
        raise RankError(f"rank {rank} did not answer in time")

    @staticmethod
    def _values(outcomes: list[Outcome]) -> list[Any]:
        for rank, outcome in enumerate(outcomes):
            if outcome.error:
                raise RankError(f"on rank {rank}: {outcome.traceback or outcome.text}")
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """End the job in order; everything must end by itself, with exit code 0."""
        try:
            if self._attached:
                self.call("shutdown", timeout_s=20)
            for pipe in self._pipes:
                pipe.close()
            everything = {f"rank {rank}": process for rank, process in enumerate(self.ranks)} | self.daemons
            codes = {name: process.wait(15) for name, process in everything.items()}
        finally:
            self.kill()
        assert not any(codes.values()), f"exit codes after an orderly end: {codes}"

    def kill(self) -> None:
        """End everything at once. Idempotent."""
        self._port.close()
        for pipe in self._pipes:
            pipe.close()
        for process in [*self.ranks, *self.daemons.values()]:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(10)


@pytest.fixture(autouse=True)
def unconfigured_logging() -> None:
    """Undo what a test before has done to bpsfast's loggers in this process: `caplog` would hear nothing."""
    logger = logging.getLogger("bpsfast")
    logger.setLevel(logging.NOTSET)
    logger.propagate, logger.disabled = True, False
    if logs._handler is not None:
        logger.removeHandler(logs._handler)
        logs._handler = None


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
def torch_ranks() -> Iterator[Callable[..., Any]]:
    """Up to four ranks that make their groups themselves: ``torch_ranks(4, nodes=2)``; see `tests.torch_ranks`.

    Their processes stay for a module; where one has died, or has not answered, all are started anew.
    """
    from tests.torch_ranks import Processes, TorchRanks

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
    """Each of the shapes of jobs in turn, for all tests that want it: see `tests.every_shape`."""
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
    # A shell that started the tests with `&` ignores Ctrl-C for them, and for every process they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    parser.addoption("--thorough", action="store_true", help="run all cases of all tests (see tests/thirds.py)")
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
def vertex():
    """Return a factory of vertices (`tests.vertex`), all closed at the end."""
    from tests.vertex import Vertex

    made = []

    def make(*args, **kwargs):
        made.append(Vertex(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()
