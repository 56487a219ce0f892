"""alltoall: each rank sends some rows to every rank, and gets some of every rank."""
from __future__ import annotations

from operator import index
from typing import Any

import numpy as np
import torch

from ..orchestration.errors import ConfigError
from . import runtime
from .handle import Handle, begin, like, readable, synchronize, wants_gradient
from .process_sets import ProcessSet, global_process_set


def alltoall_async(tensor: Any, splits: Any = None, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> Handle:
    """Begin to send rows of *tensor* to all ranks of *process_set*, in their order.

    `synchronize` of the handle returns a new tensor, of what came in the order of the ranks, and how many rows came
    from each: a tensor like *splits*, else int32.

    Parameters
    ----------
    splits
        How many rows go to each rank: a list or an array of integers, or a 1-D tensor of 32-bit integers. None: equally
        many.

    Other parameters and errors: `allreduce_async`. All dimensions but the first are the same on all ranks.
    """
    source = readable(tensor, False)
    service = runtime.service_of(process_set, "alltoall")
    rows = _rows(splits, source, len(service.ranks))
    kind = splits if isinstance(splits, torch.Tensor) else None

    def give(result: tuple[list[torch.Tensor], list[int]]) -> Any:
        outputs, received = result
        counts = torch.tensor(received, dtype=torch.int32 if kind is None else kind.dtype)
        return like(tensor)(outputs[0]), like(tensor)(counts)

    return begin(process_set, "alltoall", name, [source], (), give, splits=tuple(rows))


def alltoall(tensor: Any, splits: Any = None, name: str | None = None,
             process_set: ProcessSet = global_process_set) -> Any:
    """Return the rows that all ranks of *process_set* have sent to this one; with *splits*, also how many each sent.

    Differentiable: gradients go back to where the rows came from. Parameters: `alltoall_async`.
    """
    if wants_gradient(tensor):
        output, received = _Exchange.apply(tensor, splits, name, process_set)
    else:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
    return output if splits is None else (output, received)


def _rows(splits: Any, tensor: torch.Tensor, n_ranks: int) -> list[int]:
    """Return how many rows go to each rank, or raise `ConfigError`, in Horovod's words, why that cannot be."""
    n_rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if n_rows % n_ranks:
            raise ConfigError("splits not provided, but first dimension of tensor is not an even multiple of the "
                              f"number of workers. ({n_rows} rows, {n_ranks} ranks)")
        return [n_rows // n_ranks] * n_ranks
    if isinstance(splits, torch.Tensor | np.ndarray):
        if len(splits.shape) != 1:
            raise ConfigError("alltoall expects a 1D splits tensor")
        if splits.dtype != torch.int32 and not (isinstance(splits, np.ndarray) and splits.dtype.kind in "iu"):
            raise ConfigError(f"alltoall expects splits to contain 32-bit integer elements. (got {splits.dtype})")
        splits = splits.tolist()
    try:
        rows = [index(n) for n in splits]
    except TypeError as exc:
        raise ConfigError(f"splits={splits!r}: expected an integer for each rank ({exc})") from None
    if not rows:
        return _rows(None, tensor, n_ranks)
    if len(rows) != n_ranks:
        raise ConfigError("Number of entries in splits does not equal number of workers. "
                          f"({len(rows)} entries, {n_ranks} ranks)")
    if min(rows) < 0:
        raise ConfigError(f"splits {rows} has negative entries")
    if sum(rows) > n_rows:
        raise ConfigError("Sum of splits entries is greater than the first dimension of tensor. "
                          f"({sum(rows)} of {n_rows} rows)")
    return rows


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None,
                process_set: ProcessSet) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.n_rows, ctx.received, ctx.process_set = tensor.shape[0], received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back, _ = synchronize(alltoall_async(gradients[0], ctx.received.int(), process_set=ctx.process_set))
        unsent = ctx.n_rows - back.shape[0]
        if unsent:  # rows beyond the sum of splits went nowhere
            back = torch.cat([back, back.new_zeros((unsent, *back.shape[1:]))])
        return back, None, None, None
