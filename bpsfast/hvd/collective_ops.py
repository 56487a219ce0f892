"""allreduce: one tensor, a group of them, or sparse ones; in place or not, waited for or not; with gradients.

Tensors may be NumPy arrays: results then are, too, and autograd knows nothing of them. A group is reduced as a whole.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..orchestration.errors import ConfigError
from . import allgather_ops
from .compression import Compression, compressed
from .errors import TensorTypeError
from .handle import Handle, begin, like, readable, synchronize, wants_gradient, writable
from .process_sets import ProcessSet, global_process_set
from .reduce_op import Average, ReduceOp, Sum, chosen, factor


def allreduce_async(tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> Handle:
    """Begin to reduce *tensor* over all ranks of *process_set*; `synchronize` of the handle returns a new tensor.

    Parameters
    ----------
    tensor
        Of the same shape and dtype on all ranks; not written until the handle was waited for.
    average
        Horovod's older way to say *op*.
    name
        What makes the calls of different ranks one operation, in whatever order each rank makes its own. None: the
        number of this rank's calls without a name, of this kind and set.
    op
        `Average` (the default), `Sum`, `Min`, `Max` or `Product`. Averages of integers are cut off towards zero.
    prescale_factor, postscale_factor
        What *tensor* and the result are multiplied by; integers are then cut off towards zero.

    Raises
    ------
    ValueError
        If an argument is of a wrong type or kind, *name* is under way on this rank, *process_set* does not count or
        this rank is not in it: nothing is submitted. Its subclasses are TensorTypeError, ConfigError,
        DuplicateNameError, and AdasumError for ``op=Adasum``.
    HorovodInternalError
        If nothing more is executed.
    """
    return _begin([tensor], name, chosen(op, average), prescale_factor, postscale_factor, process_set, grouped=False)


def allreduce_async_(tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
                     prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set) -> Handle:
    """As `allreduce_async`, but the result replaces the contents of *tensor*, which is contiguous."""
    return _begin([tensor], name, chosen(op, average), prescale_factor, postscale_factor, process_set, grouped=False,
                  in_place=True)


def allreduce(tensor: Any, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
              op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return *tensor* reduced over all ranks of *process_set* (see `allreduce_async`). Differentiable.

    The gradient of Average and Sum is the Average or Sum of the ranks' gradients, with the same factors. That of Min
    and Max goes, summed, to the ranks that had the value, in equal parts; that of Product is multiplied by what the
    others had. (Horovod reduces gradients of these by Min, Max and Product.)
    """
    return _reduced([tensor], name, compression, chosen(op, average), prescale_factor, postscale_factor, process_set,
                    grouped=False)[0]


def allreduce_(tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> Any:
    """Replace *tensor* by its reduction over all ranks of *process_set*, and return it."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(tensors: Sequence[Any], average: bool | None = None, name: str | None = None,
                            op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> Handle:
    """As `allreduce_async` of each of *tensors*, but none is reduced before all are there on all ranks."""
    return _begin(tensors, name, chosen(op, average), prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(tensors: Sequence[Any], average: bool | None = None, name: str | None = None,
                             op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> Handle:
    """As `grouped_allreduce_async`, in place."""
    return _begin(tensors, name, chosen(op, average), prescale_factor, postscale_factor, process_set, in_place=True)


def grouped_allreduce(tensors: Sequence[Any], average: bool | None = None, name: str | None = None,
                      compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
                      postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return *tensors* reduced, as a group. Differentiable as `allreduce`."""
    return _reduced(tensors, name, compression, chosen(op, average), prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(tensors: Sequence[Any], average: bool | None = None, name: str | None = None,
                       op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> list[Any]:
    """Replace *tensors* by their reductions, as a group, and return them."""
    return list(synchronize(grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor,
                                                     process_set)))


def sparse_allreduce_async(tensor: torch.Tensor, name: str, op: int,
                           process_set: ProcessSet = global_process_set) -> Callable[[], torch.Tensor]:
    """Begin to add up the sparse *tensor* of all ranks of *process_set*: what the handle returns has all their entries.

    The handle is called, or given to `synchronize`. *op*: `Sum` or `Average`; others are refused, where Horovod sums.
    """
    reduction = chosen(op)
    if reduction not in (Average, Sum):
        raise ConfigError(f"op={reduction.name}: sparse tensors are reduced by Average or Sum; use tensor.to_dense()")
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        raise TensorTypeError(f"expected a sparse COO tensor, got a {kind}: use allreduce_async")
    entries_of = allgather_ops.begin_group(
        [tensor._values(), tensor._indices().t().contiguous()], name, process_set, label="sparse_allreduce")

    def handle() -> torch.Tensor:
        entries, places = synchronize(entries_of)
        if reduction is Average:
            entries = entries / process_set.size()
        return torch.sparse_coo_tensor(places.t(), entries, tensor.size(), dtype=tensor.dtype, check_invariants=False)

    return handle


def _begin(tensors: Sequence[Any], name: str | None, op: ReduceOp, prescale: float, postscale: float,
           process_set: ProcessSet, grouped: bool = True, in_place: bool = False) -> Handle:
    tensors = list(tensors)
    before, after = factor("prescale_factor", prescale), factor("postscale_factor", postscale)
    inputs = [(writable if in_place else readable)(tensor, True) for tensor in tensors]
    outputs = inputs if in_place else [torch.empty_like(tensor) for tensor in inputs]

    def give(results: Sequence[torch.Tensor]) -> Any:
        given = tensors if in_place else [like(tensor)(result) for tensor, result in zip(tensors, results)]
        return given if grouped else given[0]

    return begin(process_set, "allreduce", name, inputs, outputs, give, grouped=grouped, op=op.name, prescale=before,
                 postscale=after)


def _reduced(tensors: Sequence[Any], name: str | None, compression: Any, op: ReduceOp, prescale: float,
             postscale: float, process_set: ProcessSet, grouped: bool = True) -> list[Any]:
    """Reduce, and wait; with gradients, where autograd follows."""
    narrow, back = compressed(tensors, compression)
    arguments = name, op, prescale, postscale, process_set, grouped
    if not wants_gradient(*narrow):
        results: Sequence[Any] = _waited(arguments, narrow)
    elif op in (Average, Sum):
        results = _Mean.apply(arguments, *narrow)
    else:
        before, after = factor("prescale_factor", prescale), factor("postscale_factor", postscale)
        scaled = [_times(tensor, before) for tensor in narrow]
        results = [_times(result, after)
                   for result in _Choice.apply((name, op, 1.0, 1.0, process_set, grouped), *scaled)]
    return [bring(result) for bring, result in zip(back, results)]


def _times(tensor: torch.Tensor, by: float) -> torch.Tensor:
    """Return *tensor* times *by*, for autograd; integers, in a group with others, are cut off towards zero."""
    return tensor * by if tensor.is_floating_point() else (tensor.double() * by).to(tensor.dtype)


def _waited(arguments: tuple[Any, ...], tensors: Sequence[Any]) -> tuple[Any, ...]:
    results = synchronize(_begin(tensors, *arguments))
    return tuple(results) if arguments[-1] else (results,)


class _Mean(torch.autograd.Function):
    """Average or Sum: linear, so its gradient is that of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (None, *arguments[1:])  # forward and backward are different operations
        return _waited(arguments, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *_waited(ctx.arguments, gradients))


class _Choice(torch.autograd.Function):
    """Min, Max or Product, without factors."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.arguments = arguments
        results = _waited(arguments, tensors)
        ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, op, *_, process_set, _ = ctx.arguments
        n = len(gradients)
        inputs, results = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        sums = grouped_allreduce(gradients, op=Sum, process_set=process_set)
        if op is ReduceOp.Product:
            return (None, *(total * _product_of_others(x, process_set) for total, x in zip(sums, inputs)))
        masks = [(x == y).to(x.dtype) for x, y in zip(inputs, results)]
        counts = grouped_allreduce(masks, op=Sum, process_set=process_set)
        return (None, *(total * mask / count for total, mask, count in zip(sums, masks, counts)))


def _product_of_others(x: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    every = allgather_ops.allgather(x.detach().unsqueeze(0), process_set=process_set)
    every[process_set.rank()] = 1
    return every.prod(0)
