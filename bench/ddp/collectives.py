"""The collectives that `bench ddp` times, and their expected results."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Call(NamedTuple):
    """One collective with its tensors: the caller writes `given` before it, and reads `found` after it."""

    given: torch.Tensor
    found: torch.Tensor
    run: Callable[[], object]


COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send/recv")


def call(operation: str, n: int) -> Call:
    """Return one of `COLLECTIVES` on *n* float32 elements; if each rank has a part, *n* is the size of all parts."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    part, whole = n // size, n // size * size
    if operation == "all_reduce":
        x = torch.zeros(n)
        return Call(x, x, lambda: dist.all_reduce(x))
    if operation == "broadcast":
        x = torch.zeros(n)
        return Call(x, x, lambda: dist.broadcast(x, 0))
    if operation == "all_gather":
        x, out = torch.zeros(part), torch.zeros(whole)
        outs = list(out.chunk(size))
        return Call(x, out, lambda: dist.all_gather(outs, x))
    if operation == "reduce_scatter":
        x, out = torch.zeros(whole), torch.zeros(part)
        xs = list(x.chunk(size))
        return Call(x, out, lambda: dist.reduce_scatter(out, xs))
    if operation == "all_to_all":
        x, out = torch.zeros(whole), torch.zeros(whole)
        return Call(x, out, lambda: dist.all_to_all_single(out, x))
    x, out = torch.zeros(n), torch.zeros(n)

    def run() -> None:
        """Send to the next rank and at the same time receive from the previous one."""
        works = [dist.irecv(out, (rank - 1) % size), dist.isend(x, (rank + 1) % size)]
        for work in works:
            if work is not None:  # None only for processes outside the group
                work.wait()

    return Call(x, out, run)


def expected(operation: str, call: Call, rank: int, size: int) -> torch.Tensor:
    """Return the result of *call* on *rank* if the i-th element of each rank r was i mod 251 + r."""
    import torch

    n = len(call.given)
    ramp = (torch.arange(n) % 251).float()
    if operation == "all_reduce":
        return ramp * size + size * (size - 1) // 2
    if operation == "broadcast":
        return ramp
    if operation == "all_gather":
        return torch.cat([ramp + each for each in range(size)])
    own = slice(rank * n // size, (rank + 1) * n // size)
    if operation == "reduce_scatter":
        return ramp[own] * size + size * (size - 1) // 2
    if operation == "all_to_all":
        return torch.cat([ramp[own] + each for each in range(size)])
    return ramp + (rank - 1) % size
