"""broadcast: one rank's tensor on all of them."""
from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch

from ..orchestration.errors import ConfigError
from . import runtime
from .collective_ops import allreduce
from .handle import Handle, begin, like, readable, synchronize, wants_gradient, writable
from .process_sets import ProcessSet, global_process_set
from .reduce_op import Average


def broadcast_async(tensor: Any, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> Handle:
    """Begin to send *tensor* of job rank *root_rank* to all ranks of *process_set*; the result is a new tensor.

    Of the same shape and dtype on all ranks. *name* and errors: `allreduce_async`.
    """
    source = readable(tensor, False)
    return _begin([source], [torch.empty_like(source)], root_rank, name, process_set,
                  lambda outputs: like(tensor)(outputs[0]))


def broadcast_async_(tensor: Any, root_rank: int, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Handle:
    """As `broadcast_async`, but what is sent replaces the contents of *tensor*, which is contiguous."""
    target = writable(tensor, False)
    return _begin([target], [target], root_rank, name, process_set, lambda _: tensor)


def broadcast(tensor: Any, root_rank: int, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return *tensor* of job rank *root_rank* on all ranks of *process_set*. Differentiable.

    The gradient is, as Horovod's, the mean of the ranks' gradients on the root, and zero elsewhere.
    """
    if wants_gradient(tensor):
        return _Broadcast.apply(tensor, root_rank, name, process_set)
    return synchronize(broadcast_async(tensor, root_rank, name, process_set))


def broadcast_(tensor: Any, root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> Any:
    """Replace *tensor* by that of job rank *root_rank*, on all ranks of *process_set*, and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast_group_(tensors: Sequence[torch.Tensor], root_rank: int, label: str,
                     names: Sequence[str] | None = None) -> None:
    """Replace all *tensors*, which need not be contiguous, by those of job rank *root_rank*: one operation.

    Fails on all ranks if their *names* differ, or how many there are; there may be none. *label*: as of `begin`.
    """
    sources = [readable(tensor, False) for tensor in tensors]
    _begin(sources, sources, root_rank, None, global_process_set, lambda _: None, grouped=True, label=label,
           names=names).wait()
    with torch.no_grad():
        for tensor, source in zip(tensors, sources):
            if source.data_ptr() != tensor.data_ptr():
                tensor.copy_(source)


def broadcast_bytes(data: bytes | None, root_rank: int, name: str | None, process_set: ProcessSet,
                    label: str) -> bytes:
    """Return the *data* of job rank *root_rank*, None elsewhere, on all ranks: of any length. *label*: as of `begin`.
    """
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    shape = None if data is None else tuple(source.shape)
    return bytes(_begin([source], [], root_rank, name, process_set, lambda outputs: outputs[0].numpy().tobytes(),
                        shapes=[shape], label=label).wait())


def _begin(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], root_rank: int, name: str | None,
           process_set: ProcessSet, give: Any, **more: Any) -> Handle:
    try:
        root = index(root_rank)
    except TypeError:
        raise ConfigError(f"root_rank={root_rank!r} is a {type(root_rank).__name__}, expected the number of a rank"
                          ) from None
    if root not in runtime.service_of(process_set, "broadcast").ranks:
        raise ConfigError(f"broadcast received invalid root rank {root} for provided process set")
    return begin(process_set, "broadcast", name, inputs, outputs, give, root=root, **more)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None,
                process_set: ProcessSet) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        found: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mean = allreduce(gradients[0], op=Average, process_set=ctx.process_set)
        is_root = runtime.current().rank == ctx.root_rank
        return (mean if is_root else torch.zeros_like(mean)), None, None, None
