"""Controls the processes of a contestant (a measured library): starts them, sends all the same commands, ends them."""
from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from bpsfast.launch.daemons import terminate, tie_to_parent
from bpsfast.launch.namespaces import CpuMeter
from bpsfast.orchestration.errors import PeerLostError, StallError

START_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 15.0
#: Timeout of one step. The first measurement has one more, which checks the sums.
_STEP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Start:
    """One process to start. `via`: a command that executes another one, in a network namespace for instance."""

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

    Raises `PeerLostError` if one of them ends before it is asked to, `StallError` if one does not join in time.
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
                    argv = [*start.via, *tie_to_parent(start.argv)]
                    self._processes.append(
                        subprocess.Popen(argv, env=dict(start.environ), stdin=subprocess.DEVNULL, stdout=2))
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
                    raise StallError(f"{self.size - len(found)} of {self.size} processes of {self.name} did not join "
                                     f"the bench within {START_TIMEOUT_S:g} s") from None
                continue
            found[connection.recv()] = connection
        return [connection for _, connection in sorted(found.items())]

    def ask(self, name: str, *arguments: Any, timeout_s: float = 120.0, only: Iterable[int] | None = None) -> list[Any]:
        """Call *name* in every process (or *only* these ranks) at once; return the answers by rank.

        Raises `PeerLostError` with a traceback as soon as one process fails, although others may still wait, and
        `StallError` if not all have answered within *timeout_s*.
        """
        chosen = [self._connections[rank] for rank in (range(self.size) if only is None else only)]
        for connection in chosen:
            try:
                connection.send((name, arguments))
            except OSError as exc:
                raise PeerLostError(f"a process of {self.name} ended before {name}{arguments}: {exc}") from None
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(chosen):
            missing = [connection for connection in chosen if connection not in answers]
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise StallError(f"{len(missing)} of {len(chosen)} processes of {self.name} did not answer "
                                 f"{name}{arguments} within {timeout_s:g} s")
            for connection in missing:
                if connection in ready:
                    answers[connection] = self._answer(connection, f"{name}{arguments}")
        return [answers[connection] for connection in chosen]

    def _answer(self, connection: Connection, what: str) -> Any:
        try:
            well, answer = connection.recv()
        except (EOFError, ConnectionResetError):
            raise PeerLostError(f"a process of {self.name} ended during {what}") from None
        if not well:
            raise PeerLostError(f"{self.name} failed in {what}:\n{answer}")
        return answer

    def prepare(self, variant: str, nbytes: int) -> None:
        """Let all processes make *variant* on *nbytes* bytes and check its sums; `measure` does it if nobody has."""
        self.ask("prepare", variant, nbytes, timeout_s=START_TIMEOUT_S)

    def measure(self, variant: str, nbytes: int, n_warmup: int, n: int) -> Turn:
        """Let all processes run *variant* on *nbytes* bytes *n* times; return the times."""
        before_s = self.cpu_s()
        with CpuMeter() as meter:
            answers = self.ask("measure", variant, nbytes, n_warmup, n, timeout_s=_STEP_TIMEOUT_S * (1 + n_warmup + n))
        slowest = [round(max(samples), 9) for samples in zip(*(answer["samples_s"] for answer in answers))]
        return Turn(samples_s=slowest, n_wrong=sum(answer["n_wrong"] for answer in answers), cpu_busy=meter.busy,
                    cpu_s=(self.cpu_s() - before_s) / (n_warmup + n))

    def cpu_s(self) -> float:
        """Return the CPU seconds of all threads of all processes of this contestant, node and scheduler included."""
        return sum(cpu_s_of(pid) for pid in self.pids())

    def pids(self) -> list[int]:
        """Return the processes that are alive."""
        return [pid for process in self._processes if process.poll() is None for pid in _family(process.pid)]

    def _check(self) -> None:
        for process in self._processes:
            if process.poll():
                raise PeerLostError(f"{self.name}: {process.args!r} ended with {process.returncode}; see its output")

    def close(self) -> None:
        """Hang up and wait until all have ended. Idempotent."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + _END_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                terminate(process)


def _family(pid: int) -> list[int]:
    """Return *pid* and its descendants (mpirun starts the ranks itself)."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def cpu_s_of(pid: int) -> float:
    """Return the CPU seconds of all threads that a process has."""
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):  # in ns, where /proc/PID/stat counts ticks
        with contextlib.suppress(OSError):  # the thread has just ended
            total_ns += int(path.read_text().split()[0])
    return total_ns / 1e9
