"""Sums of sparse tensors against the sums of the same tensors as dense ones, in jobs of every shape."""
from __future__ import annotations

import pytest
import torch

from bpsfast.collectives.group import make_group
from bpsfast.orchestration.errors import MismatchError, UnsupportedError
from bpsfast.torch.backend import operands
from bpsfast.trainer import process

pytestmark = pytest.mark.matrix


def whole():
    session = process.current()
    return make_group(session, range(session.size))


def given(rank, shape, sparse_dim, nnz, dtype=torch.float64):
    """Return a sparse tensor with *nnz* entries, some of them at the same place; another one on each rank."""
    draw = torch.Generator().manual_seed(100 * rank + nnz)
    indices = torch.stack([torch.randint(0, length, (nnz,), generator=draw) for length in shape[:sparse_dim]])
    values = torch.randint(-9, 9, (nnz, *shape[sparse_dim:]), generator=draw).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


CASES = [((7,), 1, 3, torch.int32), ((5, 4), 2, 0, torch.float64), ((5, 4), 2, 11, torch.bfloat16),
         ((3, 2, 6), 1, 2, torch.float64), ((1000, 8), 1, 900, torch.float32)]


def sums():
    group = whole()
    for shape, sparse_dim, most, dtype in CASES:
        nnz = [(most + 5 * rank) if most else 0 for rank in range(group.size)]
        nnz[0] = 0 if sparse_dim == 1 else nnz[0]  # one may have none
        inputs = [given(rank, shape, sparse_dim, n, dtype) for rank, n in enumerate(nnz)]
        mine = inputs[group.rank].clone()
        operands.all_reduce_sparse(group, mine, "sum")
        assert mine.is_sparse and mine.is_coalesced() and mine.shape == shape and mine.dtype == dtype
        assert torch.equal(mine.to_dense(), sum(each.to_dense() for each in inputs)), (shape, sparse_dim, dtype)
        assert mine.sparse_dim() == sparse_dim
    group.close()


def test_entries_are_added_where_they_meet(everywhere):
    everywhere.run(sums)


def refusals():
    group = whole()
    x = given(group.rank, (5,), 1, 2)
    with pytest.raises(UnsupportedError, match=r"combined by the sum, not by max: use tensor\.to_dense"):
        operands.all_reduce_sparse(group, x, "max")
    with pytest.raises(MismatchError, match=r"sparse tensors of different shapes \(sparse dimensions first\)"):
        operands.all_reduce_sparse(group, given(group.rank, (5 + group.rank,), 1, 2), "sum")
    with pytest.raises(MismatchError, match="different shapes"):
        operands.all_reduce_sparse(group, given(group.rank, (5, 4), 1 + group.rank % 2, 2), "sum")
    kept = given(group.rank, (5,), 1, 2)
    operands.all_reduce_sparse(group, kept, "sum")  # nothing is broken: all know the same
    with pytest.raises(MismatchError, match=r"members of group .* called different collectives"):
        operands.all_reduce_sparse(group, given(group.rank, (5, 4)[:1 + group.rank], 1, 2), "sum")
    group.close()


def test_what_cannot_be_added_is_refused_on_all(two):
    two.run(refusals)


def other_dtypes():
    group = whole()
    with pytest.raises(MismatchError, match=r"all_gather float32.*; rank 1: .*all_gather float64"):
        other = given(group.rank, (5,), 1, 2, (torch.float32, torch.float64)[group.rank])
        operands.all_reduce_sparse(group, other, "sum")
    group.close()


def test_values_of_different_dtypes_are_told_apart(two):
    two.run(other_dtypes)
