"""Turns torch tensors into operands of collectives: contiguous CPU memory with a dtype and an op, or just bytes."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...collectives.group import Group
from ...orchestration.errors import ConfigError, MismatchError, UnsupportedError
from ...trainer.tensor_input import TensorInput
from ..ops import require_dense, wire_dtype_name

#: Booleans are bytes of 0 and 1: the op on these bytes that gives NCCL's result.
_OF_BOOLS = {"sum": "bor", "product": "band", "min": "band", "max": "bor", "band": "band", "bor": "bor", "bxor": "bxor"}
#: Unsigned dtypes (torch has them from 2.3 on) -> the signed ones as which `_SIGNLESS` ops combine them, modulo 2^w.
_SIGNED = {getattr(torch, f"u{name}"): getattr(torch, name) for name in ("int16", "int32", "int64")
           if hasattr(torch, f"u{name}")}
_SIGNLESS = ("sum", "product", "band", "bor", "bxor")


class Operand(NamedTuple):
    """A tensor and a contiguous copy of it, `dense`; if `tensor` is contiguous, both are the same object."""

    tensor: torch.Tensor
    dense: torch.Tensor

    @property
    def memory(self) -> TensorInput:
        """The bytes of `dense`, to be copied but not combined."""
        return _memory(self.dense, str(self.dense.dtype).removeprefix("torch."))

    def take_back(self) -> None:
        """Copy `dense`, which was written, to `tensor`."""
        if self.dense is not self.tensor:
            write(self.tensor, self.dense)


def operand(tensor: torch.Tensor) -> Operand:
    """Return *tensor* as an operand; raises `UnsupportedError` if it is no dense tensor on the CPU."""
    require_dense(tensor, "a torch.Tensor", "tensor.to_dense(), or all_reduce, which takes sparse ones",
                  "tensor.cpu(), or a group of another backend: this one moves CPU tensors")
    dense = tensor.detach().resolve_conj().resolve_neg()
    if dense.data_ptr() == tensor.data_ptr() and tensor.is_contiguous():
        return Operand(tensor, tensor)
    return Operand(tensor, dense.contiguous())


def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite *tensor* with *value*, in any thread, whether or not it was made in inference mode."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(value)


def operands(tensors: Sequence[torch.Tensor]) -> list[Operand]:
    """Return each of *tensors* as an operand."""
    return [operand(tensor) for tensor in tensors]


def flat(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return consecutive pieces of contiguous *tensor*, of *sizes* elements."""
    return list(torch.split(tensor.detach().reshape(-1), list(sizes)))


def pieces(whole: Operand, piece: torch.Tensor, size: int, what: str) -> list[torch.Tensor]:
    """Return *whole* in *size* pieces as large as *piece*; raises `ConfigError` if its size or dtype does not fit."""
    tensor = whole.tensor
    if tensor.numel() != piece.numel() * size or tensor.dtype != piece.dtype:
        raise ConfigError(f"{what} has {tensor.numel()} elements of {tensor.dtype}; {size} times {piece.numel()} of "
                          f"{piece.dtype} were expected")
    return flat(whole.dense, [piece.numel()] * size)


class Reduction(NamedTuple):
    """How a group combines: `op` as `Group` names it; `factor` multiplies the input first, unless it is None."""

    op: str
    factor: Any = None


def reducible(dense: torch.Tensor, op: str) -> tuple[TensorInput, str]:
    """Return the memory of contiguous *dense* and the op, as kernels name them.

    Raises `UnsupportedError` if that dtype is not combined by *op*.
    """
    dtype = dense.dtype
    if dtype == torch.bool:
        if op == "avg":
            raise UnsupportedError("truth values have no average: all_reduce tensor.float()")
        return _memory(dense.view(torch.uint8)), _OF_BOOLS[op]
    if dtype.is_complex:
        if op not in ("sum", "avg"):
            raise UnsupportedError(f"{dtype} is not combined by {op}: complex numbers have no order, and products mix "
                                   "their parts")
        return _memory(torch.view_as_real(dense)), op
    if dtype in _SIGNED:
        if op not in _SIGNLESS:
            raise UnsupportedError(f"{dtype} is not combined by {op}: use a signed dtype, or uint8")
        return _memory(dense.view(_SIGNED[dtype])), op
    if op in ("band", "bor", "bxor") and dtype.is_floating_point:
        raise UnsupportedError(f"Cannot use ReduceOp.{op.upper()} with {dtype}: it takes integers")
    return _memory(dense), op


def _memory(dense: torch.Tensor, dtype: str = "") -> TensorInput:
    return TensorInput(dense.data_ptr(), (dense.numel(),), dtype or wire_dtype_name(dense.dtype),
                       dense.numel() * dense.element_size(), True, dense)


def check_same(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise `ConfigError` unless all *tensors* have one dtype and one number of elements."""
    if not tensors:
        raise ConfigError(f"{what}: no tensor is given")
    first = tensors[0]
    for tensor in tensors:
        if (tensor.dtype, tensor.numel()) != (first.dtype, first.numel()):
            raise ConfigError(f"{what}: tensors must have one dtype and size, got {tuple(first.shape)} of "
                              f"{first.dtype} and {tuple(tensor.shape)} of {tensor.dtype}")


_LOCALLY: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


def combined(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return *tensors* of one shape combined by *op* of a `Reduction`."""
    total = functools.reduce(_LOCALLY[op], tensors)
    return total / len(tensors) if op == "avg" else total


class Input(NamedTuple):
    """The input of a reduction by `op`: the memory of *source*, to be multiplied by *factor* unless that is None."""

    memory: TensorInput
    op: str
    source: torch.Tensor
    factor: Any

    def made(self) -> TensorInput:
        """Return the memory, after the multiplication."""
        return self.memory if self.factor is None else reducible(self.source * self.factor, self.op)[0]


def prepared(dense: torch.Tensor, reduction: Reduction) -> Input:
    """Return contiguous *dense* as the input of a reduction; raises as `reducible`."""
    if reduction.factor is not None and not (dense.is_floating_point() or dense.is_complex()):
        raise UnsupportedError(f"PREMUL_SUM multiplies first: it takes floating point, not {dense.dtype}")
    return Input(*reducible(dense, reduction.op), dense, reduction.factor)


def check_number(tensors: Sequence[Any], size: int, what: str) -> None:
    """Raise `ConfigError` unless there is one of *tensors* for each of *size* members."""
    if len(tensors) != size:
        raise ConfigError(f"{what}: {len(tensors)} tensors for the {size} members of the group")


def split(whole: torch.Tensor, sizes: Sequence[int] | None, size: int, what: str) -> list[torch.Tensor]:
    """Return *whole* in pieces of *sizes* along its first dimension, or in *size* equal ones if *sizes* is empty.

    Raises `ConfigError` if they do not add up.
    """
    length = whole.shape[0] if whole.dim() else whole.numel()
    if not sizes:
        if length % size:
            raise ConfigError(f"all_to_all: the {what} of length {length} cannot be split evenly among {size} members")
        sizes = [length // size] * size
    check_number(sizes, size, f"all_to_all: {what} splits")
    if sum(sizes) != length:
        raise ConfigError(f"all_to_all: the {what} has length {length}, its splits {list(sizes)} give {sum(sizes)}")
    row = whole.numel() // length if length else 0
    return flat(whole, [n * row for n in sizes])


def all_reduce_sparse(group: Group, tensor: torch.Tensor, op: str) -> None:
    """Replace the entries of sparse COO *tensor* by the sum (op "sum") of all members' tensors.

    The tensors may differ in the number and indices of their entries. Raises `MismatchError` if they differ in shape,
    and `UnsupportedError` for another op.
    """
    if op != "sum":
        raise UnsupportedError(f"sparse tensors are combined by the sum, not by {op}: use tensor.to_dense()")
    own = tensor.detach().coalesce()
    indices, values = own.indices().contiguous(), own.values().contiguous()

    def gathered(mine: torch.Tensor, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        group.all_gather(operand(mine).memory, [operand(each).memory for each in outputs])
        return outputs

    count = torch.tensor([values.shape[0], own.sparse_dim(), *own.shape])
    counts = gathered(count, [torch.empty_like(count) for _ in range(group.size)])
    shapes = [each[1:].tolist() for each in counts]
    if any(shape != shapes[0] for shape in shapes):
        raise MismatchError(f"sparse tensors of different shapes (sparse dimensions first): {shapes}")
    all_indices = gathered(indices, [indices.new_empty(indices.shape[0], int(each[0])) for each in counts])
    all_values = gathered(values, [values.new_empty(int(each[0]), *values.shape[1:]) for each in counts])
    total = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), own.shape,
                                    check_invariants=False).coalesce()
    write(tensor, total)
