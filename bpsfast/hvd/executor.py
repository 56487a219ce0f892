"""Executes the Horovod operations that all ranks of a process set have submitted, as collectives on torch tensors.

All ranks of the set execute the coordinator's responses in one order, so their collectives match. Small tensors of one
response are packed into one buffer. Operations that do not compute send tensors as bytes, whatever their dtype.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch

from ..collectives.group import Group
from ..orchestration.priority.negotiation import Response, Spec
from ..torch.ops import tensor_memory
from ..trainer.tensor_input import TensorInput
from .service import Operation

#: Horovod's names of reductions -> the group's.
_GROUP_OPS = {"Average": "avg", "Sum": "sum", "Min": "min", "Max": "max", "Product": "product"}
#: Larger tensors are not packed: one more collective costs less than copying them in and out.
_PACKED_NBYTES = 256 << 10


class Executor:
    """Executes the responses of one set over its *group*. Called by the thread of the set's service only.

    *change* adds and removes process sets, and returns the number of the set.
    """

    def __init__(self, group: Group, fusion_nbytes: int, change: Callable[[Response], int]) -> None:
        self._group = group
        self._fusion_nbytes = fusion_nbytes
        #: Functions of a response and this rank's operation, which return the result, by kind.
        self._by_kind: dict[str, Callable[[Response, Operation], Any]] = {
            "allgather": self._allgather, "broadcast": self._broadcast, "alltoall": self._alltoall,
            "reducescatter": self._reducescatter, "join": lambda response, _: response.last_joined,
            "add_process_set": lambda response, _: change(response),
            "remove_process_set": lambda response, _: change(response),
        }

    def __call__(self, response: Response, operations: list[Operation | None]) -> None:
        """Execute *response* and set the results of this rank's *operations*, which are None if it has joined."""
        if response.kind == "barrier":  # which ends when all ranks have submitted it
            return
        with torch.no_grad():
            if response.kind == "allreduce":
                self._allreduce(response, operations)
            else:
                (operation,) = operations
                assert operation is not None, "the coordinator decides the other kinds only for ranks that take part"
                operation.result = self._by_kind[response.kind](response, operation)

    def _allreduce(self, response: Response, operations: list[Operation | None]) -> None:
        pairs: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        specs = [spec for each in response.specs for spec in each]
        for each, operation in zip(response.specs, operations):
            if operation is None:
                pairs += [(None, _neutral(spec, response.op)) for spec in each]
            else:
                pairs += zip(operation.inputs, operation.outputs)
                operation.result = operation.outputs
        for batch in self._batches(specs):
            self._reduce([pairs[i] for i in batch], response)

    def _reduce(self, pairs: list[tuple[torch.Tensor | None, torch.Tensor]], response: Response) -> None:
        """Reduce each (input, output). Input None: the output holds it, and the result is not used."""
        op = _group_op(response, pairs[0][1].dtype)
        if len(pairs) == 1:
            source, target = pairs[0]
            if source is None or response.prescale != 1:
                source = _scaled_into(target, source, response.prescale)
            if target.numel():
                self._group.all_reduce(tensor_memory(source), tensor_memory(target), op)
            self._finish(target, response)
            return
        flat = torch.empty(sum(target.numel() for _, target in pairs), dtype=pairs[0][1].dtype)
        pieces = flat.split([target.numel() for _, target in pairs])
        for piece, (source, target) in zip(pieces, pairs):
            _scaled_into(piece, target.view(-1) if source is None else source.view(-1),
                         1.0 if source is None else response.prescale)
        if flat.numel():
            self._group.all_reduce(tensor_memory(flat), tensor_memory(flat), op)
        self._finish(flat, response)
        for piece, (_, target) in zip(pieces, pairs):
            target.view(-1).copy_(piece)

    def _finish(self, total: torch.Tensor, response: Response) -> None:
        """Turn the group's sums into the result, in place."""
        if response.op != "Average" or total.is_floating_point():
            _scale(total, response.postscale)
        elif response.postscale == 1:
            total.div_(self._group.size, rounding_mode="trunc")  # exact, unlike a product with 1 / size
        else:
            _scale(total, response.postscale / self._group.size)

    def _broadcast(self, response: Response, operation: Operation) -> list[torch.Tensor]:
        (specs,) = response.specs
        root = self._group.ranks.index(response.root)
        outputs = list(operation.outputs) or [torch.empty(spec.shape or (), dtype=getattr(torch, spec.dtype))
                                              for spec in specs]
        if root == self._group.rank:
            for source, target in zip(operation.inputs, outputs):
                if source.data_ptr() != target.data_ptr():
                    target.copy_(source)
        for batch in self._batches(specs):
            targets = [_bytes(outputs[i]) for i in batch]
            flat = torch.cat(targets) if len(targets) > 1 else targets[0]
            if flat.numel():
                self._group.broadcast(tensor_memory(flat), root)
            if len(targets) > 1 and root != self._group.rank:
                for target, piece in zip(targets, flat.split([target.numel() for target in targets])):
                    target.copy_(piece)
        return outputs

    def _allgather(self, response: Response, operation: Operation) -> tuple[list[torch.Tensor], Any]:
        outputs = []
        for tensor, rows in zip(operation.inputs, response.counts):
            output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
            if output.numel():
                self._group.all_gather(_memory(tensor), _rows(output, rows))
            outputs.append(output)
        return outputs, response.counts

    def _alltoall(self, response: Response, operation: Operation) -> tuple[list[torch.Tensor], list[int]]:
        (tensor,) = operation.inputs
        me = self._group.rank
        received = [splits[me] for splits in response.counts]
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        sent = response.counts[me]
        if any(map(sum, response.counts)) and prod(tensor.shape[1:]):
            self._group.all_to_all(_rows(tensor[: sum(sent)], sent), _rows(output, received))
        return [output], received

    def _reducescatter(self, response: Response, operation: Operation) -> list[torch.Tensor]:
        outputs = []
        for tensor in operation.inputs:
            rows = shares(tensor.shape[0], self._group.size)
            source = tensor if response.prescale == 1 else _scaled_into(torch.empty_like(tensor), tensor,
                                                                        response.prescale)
            output = tensor.new_empty((rows[self._group.rank], *tensor.shape[1:]))
            if tensor.numel():
                self._group.reduce_scatter([tensor_memory(piece) for piece in source.split(rows)],
                                           tensor_memory(output), _group_op(response, tensor.dtype))
            self._finish(output, response)
            outputs.append(output)
        return outputs

    def _batches(self, specs: Sequence[Spec]) -> Iterator[list[int]]:
        """Yield the indices of tensors that are packed together: small neighbours of one dtype."""
        batch: list[int] = []
        nbytes = 0
        for i, spec in enumerate(specs):
            if batch and (spec.dtype != specs[batch[-1]].dtype or nbytes + spec.nbytes > self._fusion_nbytes
                          or max(spec.nbytes, specs[batch[-1]].nbytes) > _PACKED_NBYTES):
                yield batch
                batch, nbytes = [], 0
            batch.append(i)
            nbytes += spec.nbytes
        if batch:
            yield batch


def shares(n_rows: int, n_ranks: int) -> list[int]:
    """Return how many of *n_rows* each rank gets of a reducescatter: evenly, with the remainder on the first ranks."""
    return [n_rows // n_ranks + (i < n_rows % n_ranks) for i in range(n_ranks)]


def _group_op(response: Response, dtype: torch.dtype) -> str:
    """Return the group's reduction. Averages of integers are summed and divided here: the group rounds them down."""
    return "sum" if response.op == "Average" and not dtype.is_floating_point else _GROUP_OPS[response.op]


def _neutral(spec: Spec, op: str) -> torch.Tensor:
    """Return the neutral tensor that a rank contributes after it has joined."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    shape = spec.shape or ()
    if op in ("Min", "Max"):
        bounds = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        largest, least = (float("inf"), -float("inf")) if dtype.is_floating_point else (bounds.max, bounds.min)
        return torch.full(shape, largest if op == "Min" else least, dtype=dtype)
    return torch.full(shape, 1 if op == "Product" else 0, dtype=dtype)


def _scaled_into(target: torch.Tensor, source: torch.Tensor | None, factor: float) -> torch.Tensor:
    if source is not None and source.data_ptr() != target.data_ptr():
        target.copy_(source)
    if source is not None:
        _scale(target, factor)
    return target


def _scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers in float64, truncated towards zero."""
    if factor == 1:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor).trunc_())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous *tensor* as uint8."""
    return tensor.view(-1).view(torch.uint8)


def _memory(tensor: torch.Tensor) -> TensorInput:
    return tensor_memory(_bytes(tensor))


def _rows(tensor: torch.Tensor, counts: Sequence[int]) -> list[TensorInput]:
    """Return the memory of consecutive groups of rows."""
    return [_memory(piece) for piece in tensor.split(list(counts))]
