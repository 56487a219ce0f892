"""The coordinator's end of one contestant: starts its processes, asks all of them for the same thing, ends them."""
from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from bpsfast import launch, settings
from bpsfast.cluster import Cluster, CpuMeter
from bpsfast.daemons import clean_environment, end, reserve_port, tethered
from bpsfast.orchestration.errors import PeerLostError, StallError
from bpsfast.supervisor import Kind

START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 15.0
_LOOPBACK = "127.0.0.1"
_PORTS = {"gloo": 7801, "raw": 7802, "bpsfast": 7803}  # in a cluster's namespaces every port is free


@dataclass(frozen=True)
class Start:
    """One process to start; `via` runs a command in some place (a network namespace) and becomes it."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    via: Sequence[str] = ()


@dataclass(frozen=True)
class Turn:
    """One turn of one contestant: seconds per operation of the slowest rank, wrong elements, the busy share of all
    cores, and the contestant's own CPU seconds per operation."""

    samples_s: list[float]
    n_wrong: int
    cpu_busy: float
    cpu_s: float


class Group:
    """The processes of one contestant, from construction until `close`. Owner thread only.

    Raises
    ------
    PeerLostError
        If one of them ends before it was asked to.
    StallError
        If one does not join in time.
    """

    def __init__(self, name: str, starts: Sequence[Start], size: int, folder: Path) -> None:
        self.name, self.size = name, size
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(str(folder / "socket"))
            server.listen(size)
            server.settimeout(0.5)
            try:
                for start in starts:
                    self._processes.append(subprocess.Popen(
                        [*start.via, *tethered(start.argv)], env=dict(start.environ), stdin=subprocess.DEVNULL, stdout=2))
                self._connections = self._join(server)
            except BaseException:
                self.close()
                raise

    def _join(self, server: socket.socket) -> list[Connection]:
        found: dict[int, Connection] = {}
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(found) < self.size:
            try:
                connection = Connection(server.accept()[0].detach())
            except TimeoutError:
                self._check()
                if time.monotonic() >= deadline:
                    raise StallError(f"{self.size - len(found)} of {self.size} processes of {self.name} did not join the "
                                     f"bench within {START_TIMEOUT_S:g} s") from None
                continue
            found[connection.recv()] = connection
        return [connection for _, connection in sorted(found.items())]

    def ask(self, name: str, *arguments: Any, timeout_s: float = 120.0, only: Iterable[int] | None = None) -> list[Any]:
        """Let every process (or *only* these ranks) do *name* at once; return the answers by rank.

        Raises
        ------
        PeerLostError
            If one fails; the text is its traceback.
        """
        chosen = [self._connections[rank] for rank in (range(self.size) if only is None else only)]
        for connection in chosen:
            connection.send((name, arguments))
        answers = []
        for connection in chosen:
            if not connection.poll(timeout_s):
                raise StallError(f"{self.name} did not answer {name}{arguments} within {timeout_s:g} s")
            try:
                well, answer = connection.recv()
            except EOFError:
                raise PeerLostError(f"a process of {self.name} ended during {name}{arguments}; see its output") from None
            if not well:
                raise PeerLostError(f"{self.name} failed in {name}{arguments}:\n{answer}")
            answers.append(answer)
        return answers

    def measure(self, variant: str, nbytes: int, n_warmup: int, n: int) -> Turn:
        """Let all processes do *variant* on *nbytes* bytes *n* times."""
        before_s = self.cpu_s()
        with CpuMeter() as meter:
            answers = self.ask("measure", variant, nbytes, n_warmup, n)
        slowest = [max(samples) for samples in zip(*(answer["samples_s"] for answer in answers))]
        return Turn(samples_s=slowest, n_wrong=sum(answer["n_wrong"] for answer in answers), cpu_busy=meter.busy,
                    cpu_s=(self.cpu_s() - before_s) / (n_warmup + n))

    def cpu_s(self) -> float:
        """Return the CPU seconds of all threads of all processes of this contestant, node and scheduler included."""
        return sum(_cpu_s(pid) for process in self._processes if process.poll() is None for pid in _family(process.pid))

    def _check(self) -> None:
        for process in self._processes:
            if process.poll():
                raise PeerLostError(f"{self.name}: {process.args} ended with {process.returncode}; see its output")

    def close(self) -> None:
        """Hang up and wait until all have ended. Idempotent."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + _END_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                end(process)


def _family(pid: int) -> list[int]:
    """Return *pid* and its descendants (mpirun starts the ranks itself)."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _cpu_s(pid: int) -> float:
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):  # in ns, where /proc/PID/stat counts ticks
        with contextlib.suppress(OSError):  # the thread has just ended
            total_ns += int(path.read_text().split()[0])
    return total_ns / 1e9


class Hall:
    """Makes groups of one bench and closes them all at its end. A context manager.

    Parameters
    ----------
    n_ranks, n_nodes
        The job's shape; peers have as many ranks.
    largest_nbytes
        What each process holds memory for.
    cluster
        Machines node0, node1, ...; None: everything on this machine.
    """

    def __init__(self, n_ranks: int, n_nodes: int, largest_nbytes: int, cluster: Cluster | None = None) -> None:
        self._shape = launch.shape_of(n_ranks, n_nodes, 0)
        self._options = {"largest_nbytes": largest_nbytes}
        self._cluster = cluster
        self._groups: list[Group] = []
        self._folder = tempfile.TemporaryDirectory(prefix="bpsfast-bench-")  # only this user may enter it

    def __enter__(self) -> Hall:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for group in self._groups:
            group.close()
        self._folder.cleanup()

    def bpsfast(self, **values: Any) -> Group:
        """Start a job of ours with settings *values*."""
        program, folder = self._program("bpsfast", {})
        loaded = settings.load(values, {name: value for name, value in os.environ.items() if name == "BPSFAST_LOG_LEVEL"})
        with reserve_port(_LOOPBACK) as reserved:
            scheduler = (self._cluster.hub.address, _PORTS["bpsfast"] + len(self._groups)) if self._cluster else reserved.getsockname()
            commands = launch.plan(self._shape, program, loaded, os.environ, scheduler, secrets.token_hex(32), self._cluster)
            commands.sort(key=lambda command: command.kind is Kind.RANK)
            return self._start("bpsfast", [Start(c.argv, c.environ, c.via) for c in commands], folder)

    def gloo(self) -> Group:
        """Start gloo's ranks, over loopback or the cluster's links."""
        program, folder = self._program("gloo", {})
        with reserve_port(_LOOPBACK) as reserved:
            host, port = self._place(0, reserved.getsockname()[1], "gloo")
        environ = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(sum(self._shape.ranks)),
                   "GLOO_SOCKET_IFNAME": "eth0" if self._cluster else "lo"}
        starts = [Start(program, self._environ() | environ | {"RANK": str(rank)}, self._via(node))
                  for rank, node in enumerate(self._nodes())]
        return self._start("gloo", starts, folder)

    def mpi(self) -> Group:
        """Start Open MPI's ranks, on this machine only."""
        program, folder = self._program("mpi", {})
        argv = ["mpirun", "--oversubscribe", "-n", str(sum(self._shape.ranks)), *program]
        if os.geteuid() == 0:
            argv.insert(1, "--allow-run-as-root")
        return self._start("mpi", [Start(argv, self._environ())], folder)

    def raw(self) -> Group:
        """Start the two ends of a plain exchange: what the network gives."""
        with reserve_port(_LOOPBACK) as reserved:
            host, port = self._place(1, reserved.getsockname()[1], "raw")
        starts = []
        folder = self._new_folder()
        for rank in range(2):
            program, _ = self._program("raw", {"rank": rank, "host": host, "port": port}, folder)
            starts.append(Start(program, self._environ(), self._via(rank)))
        return self._start("raw", starts, folder, size=2)

    # -- innards ---------------------------------------------------------------------------------------------------

    def _start(self, kind: str, starts: Sequence[Start], folder: Path, size: int | None = None) -> Group:
        group = Group(kind, starts, sum(self._shape.ranks) if size is None else size, folder)
        self._groups.append(group)
        return group

    def _program(self, kind: str, options: dict[str, Any], folder: Path | None = None) -> tuple[list[str], Path]:
        folder = self._new_folder() if folder is None else folder
        text = json.dumps(self._options | options)
        return [sys.executable, "-m", "bpsfast.bench.contestant", kind, str(folder / "socket"), text], folder

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder.name))

    def _nodes(self) -> list[int]:
        return [node for node, n_local in enumerate(self._shape.ranks) for _ in range(n_local)]

    def _via(self, node: int) -> Sequence[str]:
        return self._cluster[f"node{node}"].via() if self._cluster else ()

    def _place(self, node: int, free_port: int, kind: str) -> tuple[str, int]:
        return (self._cluster[f"node{node}"].address, _PORTS[kind]) if self._cluster else (_LOOPBACK, free_port)

    @staticmethod
    def _environ() -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"} | clean_environment(os.environ)
