"""Tensors as a group takes them: contiguous CPU memory of a dtype that is combined, or just bytes."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...orchestration.errors import ConfigError, UnsupportedError
from ...trainer.tensor_input import TensorInput
from ..ops import wire_dtype_name

#: Truth values are bytes of 0 and 1; sums and products of them are what NCCL makes of them.
_OF_BOOLS = {"sum": "bor", "product": "band", "min": "band", "max": "bor", "band": "band", "bor": "bor", "bxor": "bxor"}
#: Modulo 2^w these are the same with a sign and without.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
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
            with torch.no_grad():
                self.tensor.copy_(self.dense)


def operand(tensor: torch.Tensor) -> Operand:
    """Return *tensor* as an operand.

    Raises
    ------
    UnsupportedError
        If it is no dense tensor on the CPU.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"a {tensor.layout} tensor of shape {tuple(tensor.shape)} is not dense: use "
                               "tensor.to_dense(), or all_reduce, which takes sparse ones")
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}, and bpsfast's process "
                               "group moves CPU tensors: use tensor.cpu(), or a group of another backend for those")
    dense = tensor.detach().resolve_conj().resolve_neg()
    if dense.data_ptr() == tensor.data_ptr() and tensor.is_contiguous():
        return Operand(tensor, tensor)
    return Operand(tensor, dense.contiguous())


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
    first = tensors[0]
    for tensor in tensors:
        if (tensor.dtype, tensor.numel()) != (first.dtype, first.numel()):
            raise ConfigError(f"{what}: tensors must have one dtype and size, got {tuple(first.shape)} of "
                              f"{first.dtype} and {tuple(tensor.shape)} of {tensor.dtype}")
