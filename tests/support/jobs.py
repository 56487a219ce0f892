"""Real jobs on this machine, whose ranks run functions of test modules; started by the fixtures of conftest."""
from __future__ import annotations

import inspect
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from bpsfast.base import settings
from bpsfast.launch import daemons, local_job as launch
from bpsfast.launch.supervisor import Kind
from tests.support.forked import ForkedRank
from tests.support.loopback import LOOPBACK

_RANK_PROGRAM = str(Path(__file__).with_name("rank_process.py"))


class RankError(AssertionError):
    """A function raised on a rank; the text has its traceback."""


class Outcome:
    """Result of a function on one rank: `value`, or the class name in `error` and the message in `text`."""

    def __init__(self, kind: str, *fields: Any) -> None:
        self.value = fields[0] if kind == "value" else None
        self.error, self.text, self.traceback = fields if kind == "error" else ("", "", "")

    def __repr__(self) -> str:
        return f"<{self.error}: {self.text}>" if self.error else f"<{self.value!r}>"


class Job:
    """A real job on this machine: one scheduler, a node and its ranks for each entry of *ranks*, helpers.

    The ranks' processes live as long as the job and run the functions from `run`. All processes are children of this
    process; `close` ends the job in order and fails if a process had to be killed. *forked*: see `forked`.
    *local_ranks*: the local ranks of some, which follow from their order otherwise. *host*: its address here.
    *next_hosts*: addresses at which another scheduler may take over, "scheduler 1", "scheduler 2" for `restart`.
    """

    def __init__(self, ranks: tuple[int, ...] = (2,), helpers: int = 0, transport: str = "auto", attach: bool = True,
                 key: bytes = b"", forked: bool = False, local_ranks: Mapping[int, int] = MappingProxyType({}),
                 host: str = LOOPBACK, next_hosts: Sequence[str] = (), **values: Any) -> None:
        values = {"start_timeout_s": 40, "timeout_s": 40, "transport": transport} | values
        shape = launch.JobShape(ranks=tuple(ranks), n_helpers=helpers)
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.key = key or secrets.token_bytes(32)
        self._ports = [daemons.reserve_port(each) for each in (host, *next_hosts)]
        self.ranks: list[subprocess.Popen | ForkedRank] = []
        self.daemons: dict[str, subprocess.Popen] = {}
        self.lost: set[int] = set()  # ranks without which the job goes on
        self._forked = forked
        self._pipes: list[Connection] = []
        self._commands: dict[str, Any] = {}
        try:
            first, *further = [port.getsockname()[:2] for port in self._ports]
            commands = launch.plan(shape, [sys.executable, _RANK_PROGRAM], settings.load(values, {}), environ,
                                   first, self.key.hex(), next_schedulers=further)
            self._commands |= {f"scheduler {index}": msgspec.structs.replace(
                launch.next_scheduler(commands[0], index), name=f"scheduler {index}")
                for index in range(1, len(self._ports))}
            self._helpers = {command.name: command for command in commands if command.kind is Kind.HELPER}
            self._node_0 = next(command for command in commands if command.name == "node 0")
            of_ranks = [command for command in commands if command.kind is Kind.RANK]
            for rank, local_rank in local_ranks.items():
                of_ranks[rank].environ.update(dict.fromkeys(("BPSFAST_LOCAL_RANK", "LOCAL_RANK"), str(local_rank)))
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

    # -- for tests ------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def remaining(self) -> list[int]:
        """The ranks that the test has not lost."""
        return [rank for rank in range(self.size) if rank not in self.lost]

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run *function*, a top-level function of a test module, on every rank; return the results by rank."""
        return self._values(self.attempt(function, *arguments, timeout_s=timeout_s))

    def attempt(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Outcome]:
        """Like `run`, but return the outcome on each rank; the error of a dead rank is "died"."""
        self.begin(function, *arguments)
        return self.outcomes(timeout_s)

    def begin(self, function: Callable[..., Any], *arguments: Any, only: tuple[int, ...] | None = None) -> None:
        """Start *function* on every rank (or on *only* these) and return at once."""
        self._send(inspect.getsourcefile(function), function.__name__, arguments, only)

    def outcomes(self, timeout_s: float = 60.0, only: tuple[int, ...] | None = None) -> list[Outcome]:
        """Wait for the function of `begin`; return its outcomes."""
        deadline = time.monotonic() + timeout_s
        chosen = self.remaining if only is None else only
        return [self._outcome(rank, deadline) for rank in chosen]

    def call(self, name: str, *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call ``bpsfast.<name>`` on every rank."""
        self._send(None, name, arguments, None)
        return self._values(self.outcomes(timeout_s))

    def kill_rank(self, rank: int) -> None:
        """``kill -9`` one rank."""
        self.ranks[rank].kill()
        self.ranks[rank].wait(10)

    def lose_ranks(self, *ranks: int, by: int = signal.SIGKILL) -> None:
        """End ranks, by a signal, without which the job goes on; functions run on the others from now on."""
        self.lost.update(ranks)
        for rank in ranks:
            self.ranks[rank].send_signal(by)

    def kill_daemon(self, name: str) -> None:
        """``kill -9`` "scheduler", "node 1" or "helper 0"."""
        self.daemons[name].kill()
        self.daemons[name].wait(10)

    def lose(self, *names: str) -> None:
        """``kill -9`` daemons without which the job continues; `close` ignores their exit codes."""
        lost = [self.daemons.pop(name) for name in names]
        for process in lost:
            process.kill()
        for process in lost:
            process.wait(10)

    def restart(self, name: str) -> None:
        """Start a killed daemon again with the same command."""
        Job._start(self, self._commands[name], {})  # a subclass has already added its part

    def add(self, *names: str, **environ: str) -> None:
        """Start helpers while the job runs: lost ones again, or others like the first, with *environ* added."""
        for name in names:
            like = self._helpers.get(name, next(iter(self._helpers.values()), self._node_0))
            place = {"BPSFAST_NODE_ID": name.replace(" ", ""), "BPSFAST_NODE_INDEX": "-1", "BPSFAST_LOCAL_SIZE": "0"}
            self.daemons[name] = subprocess.Popen(like.argv, env={**like.environ, **place, **environ},
                                                  stdin=subprocess.DEVNULL)

    # -- internal --------------------------------------------------------------------------------------------------

    def _send(self, path: str | None, name: str, arguments: tuple[Any, ...], only: tuple[int, ...] | None) -> None:
        for rank in self.remaining if only is None else only:
            self._pipes[rank].send_bytes(pickle.dumps((path, name, arguments)))

    def _outcome(self, rank: int, deadline: float) -> Outcome:
        pipe = self._pipes[rank]
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return Outcome(*pickle.loads(pipe.recv_bytes()))
        except (EOFError, OSError):  # even in the middle of an answer
            return Outcome("error", "died", f"rank {rank} ended with {self.ranks[rank].wait(5)}", "")
        raise RankError(f"rank {rank} did not answer in time")

    def _values(self, outcomes: list[Outcome]) -> list[Any]:
        for rank, outcome in zip(self.remaining, outcomes):
            if outcome.error:
                raise RankError(f"on rank {rank}: {outcome.traceback or outcome.text}")
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """End the job in order; all processes must end by themselves, with exit code 0."""
        try:
            if self._attached:
                self.call("shutdown", timeout_s=20)
            for pipe in self._pipes:
                pipe.close()
            everything = {f"rank {rank}": self.ranks[rank] for rank in self.remaining} | self.daemons
            codes = {name: process.wait(60) for name, process in everything.items()}
        finally:
            self.kill()
        assert not any(codes.values()), f"exit codes after an orderly end: {codes}"

    def kill(self) -> None:
        """End everything at once. Idempotent."""
        for port in self._ports:
            port.close()
        for pipe in self._pipes:
            pipe.close()
        for process in [*self.ranks, *self.daemons.values()]:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(10)
