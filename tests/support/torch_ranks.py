"""Ranks like those of torchrun: processes with torch's variables and none of bpsfast's, which run functions of tests.

    def total():                                  # runs on every rank, in its own process, inside a process group
        x = torch.ones(3)
        dist.all_reduce(x)
        return x.tolist()

    def test_total(torch_ranks):
        for gloo, ours in torch_ranks(4, nodes=2).compare(total): ...
"""
from __future__ import annotations

import contextlib
import datetime
import inspect
import itertools
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support import rank_process
from tests.support.forked import ForkedRank
from tests.support.jobs import Job, Outcome, RankError

#: Timeout of a call, shorter than a test's.
LIMIT_S = 40.0
_kept: list[Any] = []


class Processes(Job):
    """*n* processes without a job: daemons exist only while they have a group."""

    def __init__(self, n: int) -> None:
        self.ranks: list[ForkedRank] = []
        self.daemons: dict[str, subprocess.Popen] = {}
        self.lost: set[int] = set()
        self.is_spoilt = False
        self._forked = True
        self._pipes = []
        self._attached = False
        self._ports = [socket.socket()]  # reserves the port of a job, without listening
        self._folder = tempfile.TemporaryDirectory(prefix="bpsfast-torch-")
        self._numbers = itertools.count()
        for rank in range(n):
            self._start_rank([], {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank)})

    def new_path(self) -> str:
        """Return the path of a file or folder that does not exist yet."""
        return str(Path(self._folder.name) / str(next(self._numbers)))

    def _outcome(self, rank: int, deadline: float) -> Outcome:
        try:
            outcome = super()._outcome(rank, deadline)
        except RankError:
            self.is_spoilt = True
            raise
        self.is_spoilt |= outcome.error == "died"
        return outcome

    def close(self) -> None:
        """End the ranks, which must exit by themselves with code 0."""
        super().close()
        self._folder.cleanup()

    def kill(self) -> None:
        """End everything at once. Idempotent."""
        super().kill()
        self._folder.cleanup()


class TorchRanks:
    """The first *size* of *processes* as ranks on *nodes* nodes, all on this machine."""

    def __init__(self, processes: Processes, size: int, nodes: int = 1) -> None:
        self.size, self.nodes = size, nodes
        self.new_path = processes.new_path
        self._processes = processes

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start *function*, a top-level function of a test module, on every rank, and return at once."""
        self._processes.begin(placed, self.size, self.nodes, inspect.getsourcefile(function), function.__name__,
                              arguments, only=tuple(range(self.size)))

    def outcomes(self, timeout_s: float, only: Sequence[int] | None = None) -> list[Outcome]:
        """Wait for the function of `begin`; return its outcomes."""
        return self._processes.outcomes(timeout_s, only=tuple(range(self.size)) if only is None else tuple(only))

    def attempt(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 90.0) -> list[Outcome]:
        """Run *function* on every rank; return the outcomes."""
        self.begin(function, *arguments)
        return self.outcomes(timeout_s)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 90.0) -> list[Any]:
        """Like `attempt`, but return the results; an error fails the test."""
        return self._processes._values(self.attempt(function, *arguments, timeout_s=timeout_s))

    def attempt_grouped(self, function: Callable[..., Any], *arguments: Any, backend: str = "bpsfast",
                        timeout_s: float = 90.0) -> list[Outcome]:
        """As `attempt`, inside a default group of *backend*."""
        return self.attempt(in_group, backend, self.new_path(), inspect.getsourcefile(function), function.__name__,
                            arguments, timeout_s=timeout_s)

    def grouped(self, function: Callable[..., Any], *arguments: Any, backend: str = "bpsfast",
                timeout_s: float = 90.0) -> list[Any]:
        """As `run`, inside a default group of *backend*."""
        return self._processes._values(
            self.attempt_grouped(function, *arguments, backend=backend, timeout_s=timeout_s))

    def compare(self, function: Callable[..., Any], *arguments: Any,
                timeout_s: float = 90.0) -> list[tuple[Any, Any]]:
        """Return, by rank, what *function* returns inside a group of gloo, and of bpsfast."""
        return list(zip(*(self.grouped(function, *arguments, backend=backend, timeout_s=timeout_s)
                          for backend in ("gloo", "bpsfast"))))


def placed(size: int, nodes: int, path: str, name: str, arguments: Sequence[Any]) -> Any:
    """On a rank: run a function of the module at *path* with the variables of torchrun."""
    rank, local_size = int(os.environ["RANK"]), -(-size // nodes)
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % local_size), "LOCAL_WORLD_SIZE": str(local_size),
                   "BPSFAST_NODE_ID": f"node{rank // local_size}"}  # tells nodes of one machine apart
    return getattr(_module(path), name)(*arguments)


def in_group(backend: str, store: str, path: str, name: str, arguments: Sequence[Any]) -> Any:
    """On a rank: run a function of the module at *path* inside a default group made by the file *store*."""
    with world(backend, store):
        return getattr(_module(path), name)(*arguments)


@contextlib.contextmanager
def world(backend: str, store: str, timeout_s: float = LIMIT_S) -> Iterator[None]:
    """A default group of all ranks."""
    import torch.distributed as dist

    import bpsfast.torch.backend  # noqa: F401

    dist.init_process_group(backend, init_method=f"file://{store}", rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]), timeout=datetime.timedelta(seconds=timeout_s))
    keep_gloo()
    try:
        yield
    finally:
        dist.destroy_process_group()


def keep_gloo() -> None:
    """Keep gloo's default group until the next one is made, or the process ends.

    Its threads run the callbacks of futures and release their Python objects. If the last reference to the group is
    dropped meanwhile, its threads are joined: by one of themselves, which kills the process, or by the holder of the
    GIL for which they wait, which is a deadlock.
    """
    import torch.distributed as dist

    if dist.get_backend() == "gloo":
        _kept[:] = [dist.group.WORLD]


def _module(path: str) -> Any:
    return rank_process.load(path)
