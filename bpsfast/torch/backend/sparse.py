"""The sum of sparse tensors: everybody's entries to everybody, added where they meet."""
from __future__ import annotations

import torch

from ...collectives.group import Group
from ...orchestration.errors import MismatchError, UnsupportedError
from .operands import operand, write


def all_reduce(group: Group, tensor: torch.Tensor, op: str) -> None:
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
