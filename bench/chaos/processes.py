"""For `bench chaos`, `helpers` and `soak`: starts a job's processes on this machine, and kills or stops single ones."""
from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from bpsfast.base import settings
from bpsfast.launch import daemons, local_job
from bpsfast.launch.namespaces import FaultyLink
from bpsfast.launch.processes import Command, Kind

#: The scheduler's port where it has a machine of its own, on which every port is free.
LINK_PORT = 7700


class Processes:
    """Scheduler, nodes, helpers and ranks by name ("helper 0"). A context manager, which ends all of them.

    They run on this machine, or on the two machines of *link*: the scheduler on "a", other processes as *machine_of*
    says. Each rank runs ``python -m program FILE *arguments``, where FILE is its `path`; outputs are also in *folder*.
    *values*: settings of the job. *absent*: processes that the job expects and that are not started. *moves*: the
    scheduler has a second address (`start_next_scheduler`). `scheduler` is the scheduler's address, `key` the job's key
    in hex.
    """

    def __init__(self, folder: Path, ranks: tuple[int, ...], n_helpers: int, values: Mapping[str, object],
                 program: str, *arguments: object, link: FaultyLink | None = None,
                 machine_of: Callable[[str], str] = lambda name: "a", absent: Collection[str] = (),
                 moves: bool = False) -> None:
        self._folder, self._link, self._machine_of = folder, link, machine_of
        self._popen: dict[str, subprocess.Popen[bytes]] = {}
        shape = local_job.JobShape(ranks=ranks, n_helpers=n_helpers)
        self._commands: dict[str, Command] = {}
        self._reserved = [daemons.reserve_port(host) for host in ("127.0.0.1", "127.0.0.2")[:1 + moves]]
        try:
            self.scheduler: tuple[str, int] = self._reserved[0].getsockname()[:2]
            self.key = secrets.token_hex(32)
            n_ranks = 0
            for command in local_job.plan(shape, [sys.executable, "-m", program], settings.load(dict(values), {}),
                                          {**os.environ, "OMP_NUM_THREADS": "1"}, self.scheduler, self.key,
                                          next_schedulers=[each.getsockname()[:2] for each in self._reserved[1:]]):
                argv = list(command.argv)
                if command.kind is Kind.RANK:
                    argv += [str(self.path(n_ranks)), *map(str, arguments)]
                    n_ranks += 1
                if command.name not in absent:
                    self._start(command, argv)
        except BaseException:
            self._end()
            raise

    def path(self, rank: int) -> Path:
        """Return the file that *rank* writes."""
        return self._folder / f"rank_{rank}.jsonl"

    def __getitem__(self, name: str) -> subprocess.Popen[bytes]:
        return self._popen[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._popen)

    def restart(self, name: str) -> None:
        """Start a daemon that was killed again."""
        self._popen[name].wait()
        self._start(self._commands[name], list(self._commands[name].argv))

    def start_next_scheduler(self) -> None:
        """Start a scheduler at the second address, in place of the first one."""
        command = msgspec.structs.replace(local_job.next_scheduler(self._commands["scheduler"], 1), name="scheduler 1")
        self._start(command, list(command.argv))

    def wait(self, deadline: float) -> dict[str, int | None]:
        """Return the exit codes by name, None of those that have not ended by *deadline* (monotonic seconds)."""
        codes: dict[str, int | None] = {}
        for name, process in self._popen.items():
            try:
                codes[name] = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                codes[name] = None
        return codes

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _start(self, command: Command, argv: list[str]) -> None:
        self._commands[command.name] = command
        environ = dict(command.environ)
        if self._link is not None:
            machine = self._link[self._machine_of(command.name)]
            argv = [*machine.via(), *argv]
            environ |= {"BPSFAST_SCHEDULER": f"{self._link['a'].address}:{LINK_PORT}",
                        "BPSFAST_NODE_HOST": machine.address}
        with (self._folder / f"{command.name.replace(' ', '_')}.log").open("ab") as log:
            self._popen[command.name] = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=log,
                                                         stderr=subprocess.STDOUT)

    def _end(self) -> None:
        for each in self._reserved:
            each.close()
        for process in self._popen.values():
            if process.poll() is None:
                process.kill()
            process.wait()
