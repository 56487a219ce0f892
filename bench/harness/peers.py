"""The peers that bpsfast is compared with: gloo's all_reduce (torch.distributed) and Open MPI's Allreduce (mpi4py).

Each size has separate memory, allocated as in a program with a gradient of that size.
"""
from __future__ import annotations

import importlib.util
import shutil
from typing import Any

import numpy as np

from bpsfast.bench.harness import pattern
from bpsfast.bench.harness.contestant import GroupMember, Operation
from bpsfast.bench.post import ping_pong

PIECE_NBYTES = 4 << 20
#: Operations of each peer; pieces are used for more than one piece only.
VARIANTS = {"gloo": ("gloo",), "mpi": ("mpi", "mpi 4 MB", "mpi 4 MB async")}


def missing(name: str) -> str | None:
    """Return in one line why peer *name* cannot be measured here, or None."""
    if name == "gloo":
        return None if importlib.util.find_spec("torch") else "gloo is left out: torch is not installed"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi is left out: mpi4py is not installed (pip install mpi4py)"
    return None if shutil.which("mpirun") else "mpi is left out: no mpirun on the PATH (apt install openmpi-bin)"


class Gloo(GroupMember):
    """One rank of a torch.distributed gloo group."""

    def __init__(self) -> None:
        import torch

        super().__init__("gloo")
        self._torch = torch

    def operation(self, variant: str, nbytes: int) -> Operation:
        """Return an in-place sum, or a round trip of a message."""
        if variant == ping_pong.VARIANT:
            message = self._torch.zeros(nbytes, dtype=self._torch.uint8)
            return ping_pong.operation(self.rank, message.numpy(), lambda to: self._dist.send(message, to),
                                       lambda source: self._dist.recv(message, source))
        tensor = self._torch.zeros(nbytes // 4, dtype=self._torch.float32)
        array = tensor.numpy()
        return pattern.operation(lambda: self._dist.all_reduce(tensor), array, self.rank, self.size)


class Mpi:
    """One rank of MPI_COMM_WORLD."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        self._arrays: dict[int, Any] = {}

    def operation(self, variant: str, nbytes: int) -> Operation:
        """Return an in-place sum: whole, or in pieces of 4 MB, one after another or all at once."""
        array = self._arrays.setdefault(nbytes, np.zeros(nbytes // 4, np.float32))
        step = array.size if variant == "mpi" else PIECE_NBYTES // 4
        pieces = [array[i : i + step] for i in range(0, array.size, step)]
        run = self._all_at_once if variant == "mpi 4 MB async" else self._one_by_one
        return pattern.operation(lambda: run(pieces), array, self.rank, self.size)

    def _one_by_one(self, pieces: list[Any]) -> None:
        for piece in pieces:
            self._world.Allreduce(self._mpi.IN_PLACE, piece)

    def _all_at_once(self, pieces: list[Any]) -> None:
        self._mpi.Request.Waitall([self._world.Iallreduce(self._mpi.IN_PLACE, piece) for piece in pieces])

    def barrier(self) -> None:
        """Wait for the other ranks."""
        self._world.Barrier()

    def close(self) -> None:
        """Do nothing, because mpi4py finalizes at exit."""
