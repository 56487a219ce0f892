"""Ranks as torchrun starts them: processes with torch's variables and none of bpsfast's, which run functions of tests.

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
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tests.conftest import Job, Outcome, RankError

_RANK_PROGRAM = str(Path(__file__).with_name("rank_process.py"))
#: Of a call. Longer than any test takes, shorter than its deadline.
LIMIT_S = 40.0


class TorchRanks(Job):
    """*size* processes on *nodes* nodes, all on this machine. They make a group for each call, and stay.

    Not a job of `bpsfast run`: there is no daemon until a group is made, and none once it is destroyed.
    """

    def __init__(self, size: int, nodes: int = 1, environ: Mapping[str, str] | None = None) -> None:
        self.ranks: list[subprocess.Popen] = []
        self.daemons: dict[str, subprocess.Popen] = {}
        self._pipes = []
        self._attached = False
        self._folder = tempfile.TemporaryDirectory(prefix="bpsfast-torch-")
        self._numbers = itertools.count()
        self.is_spoilt = False
        local_size = -(-size // nodes)
        for rank in range(size):
            ours, theirs = Pipe()
            with theirs:
                place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % local_size,
                         "LOCAL_WORLD_SIZE": local_size, "BPSTEST_FD": theirs.fileno()}
                self.ranks.append(subprocess.Popen(
                    [sys.executable, _RANK_PROGRAM], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "BPSFAST_NODE_ID": f"node{rank // local_size}",
                         **(environ or {}), **{name: str(value) for name, value in place.items()}}))
            self._pipes.append(ours)

    def new_path(self) -> str:
        """Return the name of a file or folder that is not there yet, for all ranks."""
        return str(Path(self._folder.name) / str(next(self._numbers)))

    def grouped(self, function: Callable[..., Any], *arguments: Any, backend: str = "bpsfast",
                timeout_s: float = 90.0) -> list[Any]:
        """Run *function* on every rank inside a default group of *backend*; return the results by rank."""
        return self.run(in_group, backend, self.new_path(), str(Path(sys.modules[function.__module__].__file__ or "")),
                        function.__name__, arguments, timeout_s=timeout_s)

    def attempt_grouped(self, function: Callable[..., Any], *arguments: Any, backend: str = "bpsfast",
                        timeout_s: float = 90.0) -> list[Outcome]:
        """As `grouped`, but return what became of it on each rank."""
        return self.attempt(in_group, backend, self.new_path(),
                            str(Path(sys.modules[function.__module__].__file__ or "")), function.__name__, arguments,
                            timeout_s=timeout_s)

    def compare(self, function: Callable[..., Any], *arguments: Any,
                timeout_s: float = 90.0) -> Sequence[tuple[Any, Any]]:
        """Return, by rank, what *function* returns inside a group of gloo, and of bpsfast."""
        return list(zip(*(self.grouped(function, *arguments, backend=backend, timeout_s=timeout_s)
                          for backend in ("gloo", "bpsfast"))))

    def _outcome(self, rank: int, deadline: float) -> Outcome:
        try:
            outcome = super()._outcome(rank, deadline)
        except RankError:
            self.is_spoilt = True
            raise
        self.is_spoilt |= outcome.error == "died"
        return outcome

    def close(self) -> None:
        """End the ranks, which must end by themselves, with exit code 0."""
        super().close()
        self._folder.cleanup()

    def kill(self) -> None:
        """End everything at once. Idempotent."""
        super().kill()
        self._folder.cleanup()


def in_group(backend: str, store: str, path: str, name: str, arguments: Sequence[Any]) -> Any:
    """On a rank: run a function of the test module at *path* inside a default group made by the file *store*."""
    import __main__  # rank_process.py

    with world(backend, store):
        return getattr(__main__.load(path), name)(*arguments)


@contextlib.contextmanager
def world(backend: str, store: str, timeout_s: float = LIMIT_S) -> Iterator[None]:
    """A default group of all ranks, ended in order unless an error ends it."""
    import torch.distributed as dist

    import bpsfast.torch.backend  # noqa: F401

    dist.init_process_group(backend, init_method=f"file://{store}", rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]), timeout=datetime.timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.destroy_process_group()
