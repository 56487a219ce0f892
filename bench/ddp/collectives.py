"""The collectives that `bench ddp` times: how they are called, and the expected results."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Call(NamedTuple):
    """One collective on tensors of its own: `given` is written before it, `found` read after it."""

    given: torch.Tensor
    found: torch.Tensor
    run: Callable[[], object]


def _all_reduce(n: int) -> Call:
    import torch
    import torch.distributed as dist

    x = torch.zeros(n)
    return Call(x, x, lambda: dist.all_reduce(x))


def _broadcast(n: int) -> Call:
    import torch
    import torch.distributed as dist

    x = torch.zeros(n)
    return Call(x, x, lambda: dist.broadcast(x, 0))


def _all_gather(n: int) -> Call:
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    x, out = torch.zeros(n // size), torch.zeros(n // size * size)
    outs = list(out.chunk(size))
    return Call(x, out, lambda: dist.all_gather(outs, x))


def _reduce_scatter(n: int) -> Call:
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    x, out = torch.zeros(n // size * size), torch.zeros(n // size)
    xs = list(x.chunk(size))
    return Call(x, out, lambda: dist.reduce_scatter(out, xs))


def _all_to_all(n: int) -> Call:
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    x, out = torch.zeros(n // size * size), torch.zeros(n // size * size)
    return Call(x, out, lambda: dist.all_to_all_single(out, x))


def _send_recv(n: int) -> Call:
    """To the next rank and from the one before, at once."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    x, out = torch.zeros(n), torch.zeros(n)

    def run() -> None:
        works = [dist.irecv(out, (rank - 1) % size), dist.isend(x, (rank + 1) % size)]
        for work in works:
            if work is not None:  # None: not of the group, which no rank here is
                work.wait()

    return Call(x, out, run)


#: By name: makes a call on *n* float32 elements; each side of all_gather and the like has the ranks' parts together.
COLLECTIVES: dict[str, Callable[[int], Call]] = {
    "all_reduce": _all_reduce, "broadcast": _broadcast, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all, "send/recv": _send_recv}


def expected(operation: str, call: Call, rank: int, size: int) -> torch.Tensor:
    """Return what *call* must find on *rank* if each rank r gave i mod 251 + r as its i-th element."""
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
