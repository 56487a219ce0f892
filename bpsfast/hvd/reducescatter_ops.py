"""reducescatter: tensors are added up, and each rank gets some rows of the sum."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..orchestration.errors import ConfigError
from .allgather_ops import grouped_allgather
from .compression import Compression, compressed
from .errors import internal
from .handle import Handle, begin, like, readable, synchronize, wants_gradient
from .process_sets import ProcessSet, global_process_set
from .reduce_op import Average, ReduceOp, Sum, chosen, factor


def reducescatter_async(tensor: Any, name: str | None = None, op: int = Average,
                        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0) -> Handle:
    """Begin to reduce *tensor* over all ranks of *process_set*; `synchronize` of the handle returns this rank's rows.

    The first dimension is divided as evenly as can be, the first ranks get more. *op*: `Average` or `Sum`. Other
    parameters and errors: `allreduce_async`.
    """
    return _begin([tensor], name, chosen(op), process_set, prescale_factor, postscale_factor, grouped=False)


def reducescatter(tensor: Any, name: str | None = None, compression: Any = Compression.none, op: int = Average,
                  process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> Any:
    """Return this rank's rows of *tensor* reduced over all ranks of *process_set*. Differentiable.

    The gradient is, as Horovod's, that of all ranks' rows, for Sum times the number of ranks.
    """
    return _waited([tensor], name, compression, op, process_set, prescale_factor, postscale_factor, grouped=False)[0]


def grouped_reducescatter_async(tensors: Sequence[Any], name: str | None = None, op: int = Average,
                                process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> Handle:
    """As `reducescatter_async` of each of *tensors*, but none is reduced before all are there on all ranks."""
    return _begin(tensors, name, chosen(op), process_set, prescale_factor, postscale_factor)


def grouped_reducescatter(tensors: Sequence[Any], name: str | None = None, compression: Any = Compression.none,
                          op: int = Average, process_set: ProcessSet = global_process_set,
                          prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> list[Any]:
    """Return this rank's rows of each of *tensors*, reduced as a group. Differentiable as `reducescatter`."""
    return _waited(tensors, name, compression, op, process_set, prescale_factor, postscale_factor)


def _waited(tensors: Sequence[Any], name: str | None, compression: Any, op: int, process_set: ProcessSet,
            prescale: float, postscale: float, grouped: bool = True) -> list[Any]:
    narrow, back = compressed(tensors, compression)
    arguments = name, chosen(op), process_set, prescale, postscale, grouped
    if wants_gradient(*narrow):
        results = list(_Scatter.apply(arguments, *narrow))
    else:
        results = _results(narrow, arguments)
    return [bring(result) for bring, result in zip(back, results)]


def _results(tensors: Sequence[Any], arguments: tuple[Any, ...]) -> list[Any]:
    results = synchronize(_begin(tensors, *arguments))
    return list(results) if arguments[-1] else [results]


def _begin(tensors: Sequence[Any], name: str | None, op: ReduceOp, process_set: ProcessSet, prescale: float,
           postscale: float, grouped: bool = True) -> Handle:
    if op not in (Average, Sum):
        raise internal(ConfigError(f"Reducescatter currently only supports AVERAGE and SUM. (op={op.name})"))
    tensors = list(tensors)
    before, after = factor("prescale_factor", prescale), factor("postscale_factor", postscale)
    inputs = [readable(tensor, True) for tensor in tensors]
    if any(not tensor.dim() for tensor in inputs):
        raise ConfigError("Reducescatter does not support scalar inputs")

    def give(results: Sequence[torch.Tensor]) -> Any:
        given = [like(tensor)(result) for tensor, result in zip(tensors, results)]
        return given if grouped else given[0]

    return begin(process_set, "reducescatter", name, inputs, (), give, grouped=grouped, op=op.name, prescale=before,
                 postscale=after)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.arguments = arguments
        return tuple(_results(tensors, arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, op, process_set, prescale, postscale, _ = ctx.arguments
        factor = prescale * postscale * (process_set.size() if op is Sum else 1)
        return (None, *grouped_allgather([gradient * factor for gradient in gradients], process_set=process_set))
