"""One process of a contestant (a library that is measured): joins its peers, then executes the coordinator's commands.

    python -m bpsfast.bench.harness.contestant KIND SOCKET JSON

KIND is a key of `KINDS`; SOCKET a Unix socket's path (reachable from every network namespace); JSON the contestant's
options. The process lives through the whole bench and sleeps while others are measured, so that samples of all
contestants can alternate within one run.
"""
from __future__ import annotations

import importlib
import json
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

#: Kind -> module and class. Imported by the contestant alone: a bench without MPI needs no mpi4py.
KINDS = {
    "bpsfast": ("harness.bpsfast_rank", "BpsfastRank"),
    "gloo": ("harness.peers", "Gloo"),
    "mpi": ("harness.peers", "Mpi"),
    "trainer": ("schedule.trainer", "Trainer"),
    "training": ("training.rank", "TrainingRank"),
    "ddp": ("ddp.member", "Member"),
    "device": ("device.rank", "DeviceRank"),
    "raw": ("harness.raw_sockets", "RawSockets"),
}


@dataclass(frozen=True)
class Operation:
    """One thing to time: `run` does it once; `fill` writes known inputs, after which `n_wrong` counts bad results."""

    run: Callable[[], object]
    fill: Callable[[bool], None]
    n_wrong: Callable[[], int]


class Contestant(Protocol):
    """The interface of a kind's class. `operation` may allocate memory; the operation that it returns must not."""

    rank: int

    def operation(self, variant: str, nbytes: int) -> Operation:
        """Return the operation called *variant* on *nbytes* bytes per rank."""

    def barrier(self) -> None:
        """Wait until all processes of the contestant have called this."""

    def close(self) -> None:
        """Leave the peers."""


class JobMember:
    """A rank of a job, from construction until `close`.

    *library* has init, rank, size, barrier and shutdown, as `bpsfast`, `bpsfast.torch` and `horovod.torch` have.
    """

    def __init__(self, library: Any) -> None:
        library.init()
        self._library = library
        self.rank, self.size = library.rank(), library.size()

    def barrier(self) -> None:
        """Wait for the other ranks."""
        self._library.barrier()

    def close(self) -> None:
        """Leave the job."""
        self._library.shutdown()


class GroupMember:
    """A rank of torch's default process group, by any *backend*; the rendezvous is in the environment."""

    def __init__(self, backend: str) -> None:
        import torch.distributed as dist

        dist.init_process_group(backend)
        self._dist = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        """Wait for the other ranks."""
        self._dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        self._dist.destroy_process_group()


class Timer:
    """Measures operations of one contestant; keeps each of them, and checks its results once."""

    def __init__(self, contestant: Contestant) -> None:
        self._contestant = contestant
        self._operations: dict[tuple[str, int], tuple[Operation, int]] = {}

    def measure(self, variant: str, nbytes: int, n_warmup: int, n: int) -> dict[str, Any]:
        """Return seconds of *n* operations one after another, and how many elements were wrong the first time."""
        self.prepare(variant, nbytes)
        operation, n_wrong = self._operations[variant, nbytes]
        operation.fill(False)
        self._contestant.barrier()
        for _ in range(n_warmup):
            operation.run()
        samples_s = []
        before = time.perf_counter()
        for _ in range(n):
            operation.run()
            now = time.perf_counter()
            samples_s.append(now - before)
            before = now
        return {"samples_s": samples_s, "n_wrong": n_wrong}

    def prepare(self, variant: str, nbytes: int) -> None:
        """Make an operation and check its results, if that has not been done."""
        if (variant, nbytes) in self._operations:
            return
        operation = self._contestant.operation(variant, nbytes)
        operation.fill(True)
        self._contestant.barrier()
        operation.run()
        self._operations[variant, nbytes] = operation, operation.n_wrong()


def main(arguments: list[str]) -> int:
    """Run one process of a contestant until the coordinator closes the connection."""
    kind, path, options = arguments[0], arguments[1], json.loads(arguments[2])
    module, name = KINDS[kind]
    contestant: Any = getattr(importlib.import_module(f"bpsfast.bench.{module}"), name)(**options)
    timer = Timer(contestant)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    with Connection(sock.detach()) as coordinator:
        coordinator.send(contestant.rank)
        while True:
            try:
                name, positional = coordinator.recv()
            except (EOFError, ConnectionResetError):
                break
            try:
                target = getattr(timer if name in ("prepare", "measure") else contestant, name)
                answer = (True, target(*positional))
            except Exception:
                answer = (False, traceback.format_exc())
            coordinator.send(answer)
    contestant.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
