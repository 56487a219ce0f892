"""Horovod's operations on torch tensors: allreduce, allgather, reducescatter, alltoall, broadcast, barrier and join.

Tensors may be NumPy arrays; results are then arrays, without autograd. The tensors of a group are executed together.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any, Literal

import numpy as np
import torch

from ..orchestration.errors import ConfigError
from ..orchestration.priority.negotiation import Request
from ..torch.compression import Compression, check_compressor
from . import runtime
from .errors import TensorTypeError, internal
from .handle import Handle, begin, like, like_each, readable, synchronize, wants_gradient, writable
from .reduce_op import Average, ReduceOp, Sum, chosen, factor
from .runtime import ProcessSet, global_process_set
from .service import Operation

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
]


def allreduce_async(tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> Handle:
    """Begin to reduce *tensor* over all ranks of *process_set*; `synchronize` of the handle returns a new tensor.

    Parameters
    ----------
    tensor
        Of the same shape and dtype on all ranks. It must not be written before `synchronize` returns.
    average
        Horovod's older form of *op*: True is Average, False is Sum.
    name
        The calls of all ranks with the same name are one operation, in whatever order each rank makes its calls. None:
        the call is numbered among those of its kind in the set.
    op
        `Average` (the default), `Sum`, `Min`, `Max` or `Product`. Averages of integers are truncated towards zero.
    prescale_factor, postscale_factor
        Factors of *tensor* and of the result; integers are truncated towards zero.

    Raises
    ------
    ValueError
        If an argument is of a wrong type, *name* is under way on this rank, *process_set* was not added to the job, or
        this rank is not in it; nothing is submitted. Subclasses: TensorTypeError, ConfigError, DuplicateNameError, and
        AdasumError for ``op=Adasum``.
    HorovodInternalError
        If the set's service is closed or has failed.
    """
    return _begin_reduction("allreduce", [tensor], name, chosen(op, average), prescale_factor, postscale_factor,
                            process_set, grouped=False)


def allreduce_async_(tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
                     prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set) -> Handle:
    """As `allreduce_async`, but the result replaces the contents of *tensor*, which is contiguous."""
    return _begin_reduction("allreduce", [tensor], name, chosen(op, average), prescale_factor, postscale_factor,
                            process_set, grouped=False, in_place=True)


def allreduce(tensor: Any, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
              op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return *tensor* reduced over all ranks of *process_set* (see `allreduce_async`). Differentiable.

    The gradient of Average and Sum is the Average or Sum of the ranks' gradients, with the same factors. For Min and
    Max the sum of the gradients is divided equally among the ranks that had the value; for Product it is multiplied by
    the product of the other ranks' values. (Horovod reduces these gradients by Min, Max and Product.)
    """
    return _reduced("allreduce", [tensor], name, compression, chosen(op, average), prescale_factor, postscale_factor,
                    process_set, grouped=False)[0]


def allreduce_(tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> Any:
    """Replace *tensor* by its reduction over all ranks of *process_set*, and return it."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(tensors: Sequence[Any], average: bool | None = None, name: str | None = None,
                            op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> Handle:
    """As `allreduce_async` of each of *tensors*. None is reduced before all are submitted on all ranks."""
    return _begin_reduction("allreduce", tensors, name, chosen(op, average), prescale_factor, postscale_factor,
                            process_set)


def grouped_allreduce_async_(tensors: Sequence[Any], average: bool | None = None, name: str | None = None,
                             op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> Handle:
    """As `grouped_allreduce_async`, in place."""
    return _begin_reduction("allreduce", tensors, name, chosen(op, average), prescale_factor, postscale_factor,
                            process_set, in_place=True)


def grouped_allreduce(tensors: Sequence[Any], average: bool | None = None, name: str | None = None,
                      compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
                      postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return *tensors* reduced, as a group. Differentiable as `allreduce`."""
    return _reduced("allreduce", tensors, name, compression, chosen(op, average), prescale_factor, postscale_factor,
                    process_set)


def grouped_allreduce_(tensors: Sequence[Any], average: bool | None = None, name: str | None = None,
                       op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> list[Any]:
    """Replace *tensors* by their reductions, as a group, and return them."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return list(synchronize(handle))


def sparse_allreduce_async(tensor: torch.Tensor, name: str, op: int,
                           process_set: ProcessSet = global_process_set) -> Callable[[], torch.Tensor]:
    """Begin to sum the sparse *tensor* over all ranks of *process_set*. The result has the entries of all ranks.

    Call the handle, or give it to `synchronize`. *op*: `Sum` or `Average`; others are refused (Horovod sums).
    """
    reduction = chosen(op)
    if reduction not in (Average, Sum):
        raise ConfigError(f"op={reduction.name}: sparse tensors are reduced by Average or Sum; use tensor.to_dense()")
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        raise TensorTypeError(f"expected a sparse COO tensor, got a {kind}: use allreduce_async")
    entries_of = begin_allgather(
        [tensor._values(), tensor._indices().t().contiguous()], name, process_set, label="sparse_allreduce")

    def handle() -> torch.Tensor:
        entries, places = synchronize(entries_of)
        if reduction is Average:
            entries = entries / process_set.size()
        return torch.sparse_coo_tensor(places.t(), entries, tensor.size(), dtype=tensor.dtype, check_invariants=False)

    return handle


def _begin_reduction(kind: Literal["allreduce", "reducescatter"], tensors: Sequence[Any], name: str | None,
                     op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet, grouped: bool = True,
                     in_place: bool = False) -> Handle:
    scatters = kind == "reducescatter"
    if scatters and op not in (Average, Sum):
        raise internal(ConfigError(f"Reducescatter currently only supports AVERAGE and SUM. (op={op.name})"))
    tensors = list(tensors)
    before, after = factor("prescale_factor", prescale), factor("postscale_factor", postscale)
    inputs = [(writable if in_place else readable)(tensor, True) for tensor in tensors]
    if scatters and any(not tensor.dim() for tensor in inputs):
        raise ConfigError("Reducescatter does not support scalar inputs")
    outputs = inputs if in_place else [] if scatters else [torch.empty_like(tensor) for tensor in inputs]

    def give(results: Sequence[torch.Tensor]) -> Any:
        if in_place:
            return tensors if grouped else tensors[0]
        return like_each(tensors, results, grouped)

    return begin(process_set, kind, name, inputs, outputs, give, grouped=grouped, op=op.name, prescale=before,
                 postscale=after)


def _reduced(kind: Literal["allreduce", "reducescatter"], tensors: Sequence[Any], name: str | None, compression: Any,
             op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet,
             grouped: bool = True) -> list[Any]:
    """Reduce and wait; autograd records it if one of *tensors* requires a gradient."""
    sent, restored = compressed(tensors, compression)
    arguments = kind, name, op, prescale, postscale, process_set, grouped
    if op not in (Average, Sum) and wants_gradient(*sent):
        before, after = factor("prescale_factor", prescale), factor("postscale_factor", postscale)
        results = _SelectingAllreduce.apply((kind, name, op, 1.0, 1.0, process_set, grouped),
                                            *[_times(tensor, before) for tensor in sent])
        return restored([_times(result, after) for result in results])

    def back(*gradients: torch.Tensor) -> Sequence[torch.Tensor]:
        if kind == "allreduce":  # without the name, as forward and backward are different operations
            return _reduce_now((kind, None, *arguments[2:]), *gradients)
        share = prescale * postscale * (process_set.size() or 1 if op is Sum else 1)
        return grouped_allgather([gradient * share for gradient in gradients], process_set=process_set)

    return restored(_differentiable(partial(_reduce_now, arguments), back, sent))


def _differentiable(run: Callable[..., Sequence[Any]], back: Callable[..., Sequence[torch.Tensor]],
                    tensors: Sequence[Any]) -> Sequence[Any]:
    """Return *run* of *tensors*; if autograd records it, its gradient is *back* of the results' gradients."""
    found: Sequence[Any] = _Operation.apply(run, back, *tensors) if wants_gradient(*tensors) else run(*tensors)
    return found


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Sequence[torch.Tensor]], back: Callable[..., Sequence[torch.Tensor]],
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.back = back
        return tuple(run(*tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.back(*gradients))


def _times(tensor: torch.Tensor, by: float) -> torch.Tensor:
    """Return *tensor* times *by*, for autograd; integers are truncated towards zero."""
    return tensor * by if tensor.is_floating_point() else (tensor.double() * by).to(tensor.dtype)


def _reduce_now(arguments: tuple[Any, ...], *tensors: Any) -> tuple[Any, ...]:
    kind, *others = arguments
    results = synchronize(_begin_reduction(kind, tensors, *others))
    return tuple(results) if arguments[-1] else (results,)


class _SelectingAllreduce(torch.autograd.Function):
    """Min, Max or Product, without factors."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.arguments = arguments
        results = _reduce_now(arguments, *tensors)
        ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, _, op, *_, process_set, _ = ctx.arguments
        n = len(gradients)
        inputs, results = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        sums = grouped_allreduce(gradients, op=Sum, process_set=process_set)
        if op is ReduceOp.Product:
            return (None, *(total * _product_of_others(x, process_set) for total, x in zip(sums, inputs)))
        masks = [(x == y).to(x.dtype) for x, y in zip(inputs, results)]
        counts = grouped_allreduce(masks, op=Sum, process_set=process_set)
        return (None, *(total * mask / count for total, mask, count in zip(sums, masks, counts)))


def _product_of_others(x: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    every = allgather(x.detach().unsqueeze(0), process_set=process_set)
    every[process_set.rank()] = 1
    return every.prod(0)


def allgather_async(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begin to concatenate *tensor* of all ranks of *process_set*; `synchronize` of the handle returns a new tensor.

    All dimensions but the first are the same on all ranks. *name* and errors: `allreduce_async`.
    """
    return begin_allgather([tensor], name, process_set, grouped=False)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return *tensor* of all ranks of *process_set*, concatenated in their order. Differentiable.

    The gradient is, as Horovod's, the mean of the ranks' gradients of this rank's rows.
    """
    return _gathered([tensor], name, process_set, grouped=False)[0]


def grouped_allgather_async(tensors: Sequence[Any], name: str | None = None,
                            process_set: ProcessSet = global_process_set) -> Handle:
    """As `allgather_async` of each of *tensors*. None is gathered before all are submitted on all ranks."""
    return begin_allgather(tensors, name, process_set)


def grouped_allgather(tensors: Sequence[Any], name: str | None = None,
                      process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return each of *tensors* of all ranks, concatenated, as a group. Differentiable as `allgather`."""
    return _gathered(tensors, name, process_set)


def begin_allgather(tensors: Sequence[Any], name: str | None, process_set: ProcessSet, grouped: bool = True,
                    rows: list[tuple[int, ...]] | None = None, label: str = "") -> Handle:
    """Begin to gather. *rows*: a list to extend by each tensor's first dimension on each rank. *label*: see `begin`."""
    tensors = list(tensors)
    inputs = [readable(tensor, False) for tensor in tensors]

    def give(result: tuple[list[torch.Tensor], tuple[tuple[int, ...], ...]]) -> Any:
        outputs, counts = result
        if rows is not None:
            rows.extend(counts)
        return like_each(tensors, outputs, grouped)

    return begin(process_set, "allgather", name, inputs, (), give, grouped=grouped, label=label)


def _gathered(tensors: Sequence[Any], name: str | None, process_set: ProcessSet, grouped: bool = True) -> list[Any]:
    """Gather and wait; autograd records it if one of *tensors* requires a gradient."""
    rows: list[tuple[int, ...]] = []

    def run(*given: Any) -> list[Any]:
        results = synchronize(begin_allgather(given, name, process_set, grouped, rows))
        return list(results) if grouped else [results]

    def back(*gradients: torch.Tensor) -> list[torch.Tensor]:
        means = grouped_allreduce(gradients, op=Average, process_set=process_set)
        me = process_set.rank() or 0
        return [mean.narrow(0, sum(counts[:me]), counts[me]) for mean, counts in zip(means, rows)]

    return list(_differentiable(run, back, tensors))


def reducescatter_async(tensor: Any, name: str | None = None, op: int = Average,
                        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0) -> Handle:
    """Begin to reduce *tensor* over all ranks of *process_set*; `synchronize` of the handle returns this rank's rows.

    The first dimension is divided as evenly as possible, with the remainder on the first ranks. *op*: `Average` or
    `Sum`. Other parameters and errors: `allreduce_async`.
    """
    return _begin_reduction("reducescatter", [tensor], name, chosen(op), prescale_factor, postscale_factor, process_set,
                            grouped=False)


def reducescatter(tensor: Any, name: str | None = None, compression: Any = Compression.none, op: int = Average,
                  process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> Any:
    """Return this rank's rows of *tensor* reduced over all ranks of *process_set*. Differentiable.

    The gradient is, as Horovod's, that of all ranks' rows, for Sum times the number of ranks.
    """
    return _reduced("reducescatter", [tensor], name, compression, chosen(op), prescale_factor, postscale_factor,
                    process_set, grouped=False)[0]


def grouped_reducescatter_async(tensors: Sequence[Any], name: str | None = None, op: int = Average,
                                process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> Handle:
    """As `reducescatter_async` of each of *tensors*. None is reduced before all are submitted on all ranks."""
    return _begin_reduction("reducescatter", tensors, name, chosen(op), prescale_factor, postscale_factor, process_set)


def grouped_reducescatter(tensors: Sequence[Any], name: str | None = None, compression: Any = Compression.none,
                          op: int = Average, process_set: ProcessSet = global_process_set,
                          prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> list[Any]:
    """Return this rank's rows of each of *tensors*, reduced as a group. Differentiable as `reducescatter`."""
    return _reduced("reducescatter", tensors, name, compression, chosen(op), prescale_factor, postscale_factor,
                    process_set)


def alltoall_async(tensor: Any, splits: Any = None, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> Handle:
    """Begin to send rows of *tensor* to all ranks of *process_set*, in their order.

    `synchronize` of the handle returns a new tensor of the rows received, in the order of the ranks, and how many came
    from each rank: a tensor of the dtype of *splits*, else int32.

    Parameters
    ----------
    splits
        How many rows go to each rank: a list or an array of integers, or a 1-D tensor of 32-bit integers. None: the
        same number.

    Other parameters and errors: `allreduce_async`. All dimensions but the first are the same on all ranks.
    """
    source = readable(tensor, False)
    service = runtime.current().service(process_set, "alltoall")
    rows = _split_rows(splits, source, len(service.ranks))
    kind = splits if isinstance(splits, torch.Tensor) else None

    def give(result: tuple[list[torch.Tensor], list[int]]) -> Any:
        outputs, received = result
        counts = torch.tensor(received, dtype=torch.int32 if kind is None else kind.dtype)
        return like(tensor, outputs[0]), like(tensor, counts)

    return begin(process_set, "alltoall", name, [source], (), give, splits=tuple(rows))


def alltoall(tensor: Any, splits: Any = None, name: str | None = None,
             process_set: ProcessSet = global_process_set) -> Any:
    """Return the rows that all ranks of *process_set* have sent to this one; with *splits*, also how many each sent.

    Differentiable: gradients return to the ranks that sent the rows. Parameters: `alltoall_async`.
    """
    if wants_gradient(tensor):
        output, received = _AllToAll.apply(tensor, splits, name, process_set)
    else:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
    return output if splits is None else (output, received)


def _split_rows(splits: Any, tensor: torch.Tensor, n_ranks: int) -> list[int]:
    """Return how many rows go to each rank; raises `ConfigError` with Horovod's texts."""
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
        return _split_rows(None, tensor, n_ranks)
    if len(rows) != n_ranks:
        raise ConfigError("Number of entries in splits does not equal number of workers. "
                          f"({len(rows)} entries, {n_ranks} ranks)")
    if min(rows) < 0:
        raise ConfigError(f"splits {rows} has negative entries")
    if sum(rows) > n_rows:
        raise ConfigError("Sum of splits entries is greater than the first dimension of tensor. "
                          f"({sum(rows)} of {n_rows} rows)")
    return rows


class _AllToAll(torch.autograd.Function):
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
        if unsent:  # rows beyond the sum of splits were not sent
            back = torch.cat([back, back.new_zeros((unsent, *back.shape[1:]))])
        return back, None, None, None


def broadcast_async(tensor: Any, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> Handle:
    """Begin to send *tensor* of job rank *root_rank* to all ranks of *process_set*; the result is a new tensor.

    Shape and dtype are the same on all ranks. *name* and errors: `allreduce_async`.
    """
    source = readable(tensor, False)
    return _broadcast([source], [torch.empty_like(source)], root_rank, name, process_set,
                      lambda outputs: like(tensor, outputs[0]))


def broadcast_async_(tensor: Any, root_rank: int, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Handle:
    """As `broadcast_async`, but the result replaces the contents of *tensor*, which is contiguous."""
    target = writable(tensor, False)
    return _broadcast([target], [target], root_rank, name, process_set, lambda _: tensor)


def broadcast(tensor: Any, root_rank: int, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return *tensor* of job rank *root_rank* on all ranks of *process_set*. Differentiable.

    The gradient is, as Horovod's, the mean of the ranks' gradients on the root, and zero elsewhere.
    """
    def run(given: Any) -> list[Any]:
        return [synchronize(broadcast_async(given, root_rank, name, process_set))]

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:
        mean = allreduce(gradient, op=Average, process_set=process_set)
        return [mean if runtime.current().rank == root_rank else torch.zeros_like(mean)]

    return _differentiable(run, back, [tensor])[0]


def broadcast_(tensor: Any, root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> Any:
    """Replace *tensor* by that of job rank *root_rank*, on all ranks of *process_set*, and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast_group_(tensors: Sequence[torch.Tensor], root_rank: int, label: str,
                     names: Sequence[str] | None = None) -> None:
    """Replace all *tensors*, contiguous or not, by those of job rank *root_rank* in one operation.

    Fails on all ranks if their *names* or number differ; there may be none. *label*: see `begin`.
    """
    sources = [readable(tensor, False) for tensor in tensors]
    _broadcast(sources, sources, root_rank, None, global_process_set, lambda _: None, grouped=True, label=label,
               names=names).wait()
    with torch.no_grad():
        for tensor, source in zip(tensors, sources):
            if source.data_ptr() != tensor.data_ptr():
                tensor.copy_(source)


def broadcast_bytes(data: bytes | None, root_rank: int, name: str | None, process_set: ProcessSet,
                    label: str) -> bytes:
    """Return on all ranks the *data* of job rank *root_rank*, of any length; None elsewhere. *label*: see `begin`."""
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    shape = None if data is None else tuple(source.shape)
    return bytes(_broadcast([source], [], root_rank, name, process_set, lambda outputs: outputs[0].numpy().tobytes(),
                            shapes=[shape], label=label).wait())


def _broadcast(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], root_rank: int, name: str | None,
               process_set: ProcessSet, give: Any, **more: Any) -> Handle:
    try:
        root = index(root_rank)
    except TypeError:
        raise ConfigError(f"root_rank={root_rank!r} is a {type(root_rank).__name__}, expected the number of a rank"
                          ) from None
    if root not in runtime.current().service(process_set, "broadcast").ranks:
        raise ConfigError(f"broadcast received invalid root rank {root} for provided process set")
    return begin(process_set, "broadcast", name, inputs, outputs, give, root=root, **more)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of *process_set* have called this."""
    service = runtime.current().service(process_set, "barrier")
    service.submit_unnamed(
        "barrier", lambda name: Operation(Request(rank=service.rank, name=name, kind="barrier"))).wait()


def join(device: int = -1) -> int:
    """Tell the other ranks that this rank has no more data; return the last rank that called this.

    Until all ranks have joined, this rank takes part in the others' allreduces, averages and `DistributedOptimizer`
    steps with zeros (neutral values for Min, Max and Product), and does not use the results. Other operations fail on
    the ranks that still submit them. *device* is Horovod's, and not used.

    Raises StallError if nothing comes from the others for `timeout_s`; the text names them.
    """
    found = runtime.current()
    join_proxies = list(found.join_proxies)
    for each in join_proxies:
        each.begin()
    service = found.service(global_process_set, "join")
    operation = service.submit(Operation(Request(
        rank=service.rank, name="join", kind="join", is_patient=bool(join_proxies),
        n_steps=sum(each.take_n_steps() for each in join_proxies))))
    over = threading.Event()
    try:
        for each in join_proxies:
            each.start(over)
        errors = [error for each in join_proxies if (error := each.wait()) is not None]
    finally:
        over.set()  # also if the wait was interrupted
    if errors:
        raise errors[0]
    return int(operation.wait())


def compressed(tensors: Sequence[Any], compression: Any) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Return what is sent of *tensors*, and a function that returns the decompressed results.

    NumPy arrays are sent as they are. Raises `ConfigError` if *compression* is not a compressor: only
    `DistributedOptimizer` takes codecs.
    """
    check_compressor(compression)
    pairs = [compression.compress(tensor) if isinstance(tensor, torch.Tensor) else (tensor, None) for tensor in tensors]

    def restored(results: Sequence[Any]) -> list[Any]:
        return [compression.decompress(result, context) if isinstance(result, torch.Tensor) else result
                for result, (_, context) in zip(results, pairs)]

    return [sent for sent, _ in pairs], restored
