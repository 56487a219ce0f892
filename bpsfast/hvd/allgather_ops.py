"""allgather: the tensors of all ranks, concatenated along the first dimension, which may differ."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .handle import Handle, begin, like, readable, synchronize, wants_gradient
from .process_sets import ProcessSet, global_process_set
from .reduce_op import Average


def allgather_async(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begin to concatenate *tensor* of all ranks of *process_set*; `synchronize` of the handle returns a new tensor.

    All dimensions but the first are the same on all ranks. *name* and errors: `allreduce_async`.
    """
    return begin_group([tensor], name, process_set, grouped=False)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return *tensor* of all ranks of *process_set*, concatenated in their order. Differentiable.

    The gradient is, as Horovod's, the mean of the ranks' gradients where this rank's rows are.
    """
    if wants_gradient(tensor):
        return _Gather.apply(name, process_set, False, tensor)[0]
    return synchronize(allgather_async(tensor, name, process_set))


def grouped_allgather_async(tensors: Sequence[Any], name: str | None = None,
                            process_set: ProcessSet = global_process_set) -> Handle:
    """As `allgather_async` of each of *tensors*, but none is gathered before all are there on all ranks."""
    return begin_group(tensors, name, process_set)


def grouped_allgather(tensors: Sequence[Any], name: str | None = None,
                      process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return each of *tensors* of all ranks, concatenated, as a group. Differentiable as `allgather`."""
    if wants_gradient(*tensors):
        return list(_Gather.apply(name, process_set, True, *tensors))
    return list(synchronize(grouped_allgather_async(tensors, name, process_set)))


def begin_group(tensors: Sequence[Any], name: str | None, process_set: ProcessSet, grouped: bool = True,
                rows: list[tuple[int, ...]] | None = None, label: str = "") -> Handle:
    """Begin to gather; *rows* gets the first dimensions of each tensor on the ranks. *label*: as of `begin`."""
    tensors = list(tensors)
    inputs = [readable(tensor, False) for tensor in tensors]

    def give(result: tuple[list[torch.Tensor], tuple[tuple[int, ...], ...]]) -> Any:
        outputs, counts = result
        if rows is not None:
            rows.extend(counts)
        given = [like(tensor)(output) for tensor, output in zip(tensors, outputs)]
        return given if grouped else given[0]

    return begin(process_set, "allgather", name, inputs, (), give, grouped=grouped, label=label)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, grouped: bool,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.rows, ctx.process_set, ctx.grouped = [], process_set, grouped
        results = synchronize(begin_group(tensors, name, process_set, grouped, ctx.rows))
        return tuple(results) if grouped else (results,)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from .collective_ops import grouped_allreduce

        means = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
        me = ctx.process_set.rank()
        return (None, None, None, *(mean.narrow(0, sum(rows[:me]), rows[me]) for mean, rows in zip(means, ctx.rows)))
