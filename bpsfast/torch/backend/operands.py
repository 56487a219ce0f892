"""Tensors as a group takes them: contiguous CPU memory of a dtype that is combined, or just bytes."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...collectives.group import Group
from ...orchestration.errors import ConfigError, MismatchError, UnsupportedError
from ...trainer.tensor_input import TensorInput
from ..ops import require_dense, wire_dtype_name

#: Truth values are bytes of 0 and 1; sums and products of them are what NCCL makes of them.
_OF_BOOLS = {"sum": "bor", "product": "band", "min": "band", "max": "bor", "band": "band", "bor": "bor", "bxor": "bxor"}
#: Modulo 2^w these are the same with a sign and without; torch has them from 2.3 on.
_SIGNED = {getattr(torch, f"u{name}"): getattr(torch, name) for name in ("int16", "int32", "int64")
           if hasattr(torch, f"u{name}")}
_SIGNLESS = ("sum", "product", "band", "bor", "bxor")


class Operand(NamedTuple):
    """`dense` has the elements of `tensor`, contiguous; it is the same memory unless `tensor` is not."""

    tensor: torch.Tensor
    dense: torch.Tensor

    @property
    def memory(self) -> TensorInput:
        """The bytes, whatever they mean."""
        dense = self.dense
        return TensorInput(dense.data_ptr(), (dense.numel(),), str(dense.dtype), dense.numel() * dense.element_size(),
                           True, dense)

    def take_back(self) -> None:
        """Write to `tensor` what was written to `dense`."""
        if self.dense is not self.tensor:
            write(self.tensor, self.dense)


def operand(tensor: torch.Tensor) -> Operand:
    """Return *tensor* as an operand.

    Raises
    ------
    UnsupportedError
        If it is no dense tensor on the CPU.
    """
    require_dense(tensor, "a torch.Tensor", "tensor.to_dense(), or all_reduce, which takes sparse ones",
                  "tensor.cpu(), or a group of another backend: this one moves CPU tensors")
    dense = tensor.detach().resolve_conj().resolve_neg()
    if dense.data_ptr() == tensor.data_ptr() and tensor.is_contiguous():
        return Operand(tensor, tensor)
    return Operand(tensor, dense.contiguous())


def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite *tensor*, in whichever thread, and whatever mode it was made in."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(value)


def operands(tensors: Sequence[torch.Tensor]) -> list[Operand]:
    """Return each of *tensors* as an operand."""
    return [operand(tensor) for tensor in tensors]


def flat(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return consecutive pieces of contiguous *tensor*, of *sizes* elements."""
    return list(torch.split(tensor.detach().reshape(-1), list(sizes)))


class Reduction(NamedTuple):
    """How a group combines: `op` as `Group` knows it; the input is multiplied by `factor` first, if there is one."""

    op: str
    factor: Any = None


def reducible(dense: torch.Tensor, op: str) -> tuple[TensorInput, str]:
    """Return the memory of contiguous *dense* and the op, as kernels know them.

    Raises
    ------
    UnsupportedError
        If that dtype is not combined by *op*.
    """
    dtype = dense.dtype
    if dtype == torch.bool:
        if op == "avg":
            raise UnsupportedError("truth values have no average: all_reduce tensor.float()")
        return _memory(dense.view(torch.uint8)), _OF_BOOLS[op]
    if dtype.is_complex:
        if op not in ("sum", "avg"):
            raise UnsupportedError(f"{dtype} is not combined by {op}: numbers of the plane have no order, and products "
                                   "mix their parts")
        return _memory(torch.view_as_real(dense)), op
    if dtype in _SIGNED:
        if op not in _SIGNLESS:
            raise UnsupportedError(f"{dtype} is not combined by {op}: use a signed dtype, or uint8")
        return _memory(dense.view(_SIGNED[dtype])), op
    if op in ("band", "bor", "bxor") and dtype.is_floating_point:
        raise UnsupportedError(f"Cannot use ReduceOp.{op.upper()} with {dtype}: it takes integers")
    return _memory(dense), op


def _memory(dense: torch.Tensor) -> TensorInput:
    return TensorInput(dense.data_ptr(), (dense.numel(),), wire_dtype_name(dense.dtype),
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
    """What goes into a reduction by `op`: the memory of *source*, multiplied by *factor* if there is one."""

    memory: TensorInput
    op: str
    source: torch.Tensor
    factor: Any

    def made(self) -> TensorInput:
        """Return the memory; what has to be multiplied is, now."""
        if self.factor is None:
            return self.memory
        return reducible(self.source * self.factor, self.op)[0]


def prepared(dense: torch.Tensor, reduction: Reduction) -> Input:
    """Return contiguous *dense* as the input of a reduction; raises as `reducible`."""
    if reduction.factor is not None and not (dense.is_floating_point() or dense.is_complex()):
        raise UnsupportedError(f"PREMUL_SUM multiplies first: it takes floating point, not {dense.dtype}")
    return Input(*reducible(dense, reduction.op), dense, reduction.factor)


def check_number(tensors: Sequence[Any], size: int, what: str) -> None:
    """Raise `ConfigError` unless there is one of *tensors* for each of *size* members."""
    if len(tensors) != size:
        raise ConfigError(f"{what}: {len(tensors)} tensors for the {size} members of the group")


def check_pieces(whole: torch.Tensor, piece: torch.Tensor, size: int, what: str) -> None:
    """Raise `ConfigError` unless *whole* is as much as *size* times *piece*."""
    if whole.numel() != piece.numel() * size or whole.dtype != piece.dtype:
        raise ConfigError(f"{what} has {whole.numel()} elements of {whole.dtype}; {size} times {piece.numel()} of "
                          f"{piece.dtype} were expected")


def split(whole: torch.Tensor, sizes: Sequence[int] | None, size: int, what: str) -> list[torch.Tensor]:
    """Return *whole* in pieces of *sizes* along its first dimension, in *size* equal ones if there are none.

    Raises
    ------
    ConfigError
        If they do not add up.
    """
    length = whole.shape[0] if whole.dim() else whole.numel()
    if not sizes:
        if length % size:
            raise ConfigError(f"all_to_all: the {what} of length {length} cannot be split evenly among {size} members")
        sizes = [length // size] * size
    check_number(sizes, size, f"all_to_all: {what} splits")
    if sum(sizes) != length:
        raise ConfigError(f"all_to_all: the {what} has length {length}, its splits {list(sizes)} say {sum(sizes)}")
    row = whole.numel() // length if length else 0
    return flat(whole, [n * row for n in sizes])


def all_reduce_sparse(group: Group, tensor: torch.Tensor, op: str) -> None:
    """Replace the entries of sparse COO *tensor* by the sum (op "sum") of all members' tensors. They may differ in
    number and place of their entries, not in shape.

    Raises
    ------
    UnsupportedError
        For another op.
    MismatchError
        If members' tensors have different shapes.
    """
    if op != "sum":
        raise UnsupportedError(f"sparse tensors are combined by the sum, not by {op}: use tensor.to_dense()")
    own = tensor.detach().coalesce()
    indices, values = own.indices().contiguous(), own.values().contiguous()
    told = torch.tensor([values.shape[0], own.sparse_dim(), *own.shape])
    counts = [torch.empty_like(told) for _ in range(group.size)]
    group.all_gather(operand(told).memory, [operand(count).memory for count in counts])
    shapes = [count[1:].tolist() for count in counts]
    if any(shape != shapes[0] for shape in shapes):
        raise MismatchError(f"sparse tensors of different shapes (sparse dimensions first): {shapes}")
    all_indices = [indices.new_empty(indices.shape[0], int(count[0])) for count in counts]
    all_values = [values.new_empty(int(count[0]), *values.shape[1:]) for count in counts]
    group.all_gather(operand(indices).memory, [operand(each).memory for each in all_indices])
    group.all_gather(operand(values).memory, [operand(each).memory for each in all_values])
    total = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), own.shape,
                                    check_invariants=False).coalesce()
    write(tensor, total)
