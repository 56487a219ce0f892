"""bpsfast.hvd's operations against their definitions: 1 to 4 ranks, on 1 and 2 nodes, all dtypes."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import bpsfast.hvd as hvd
from tests.support.hvd_ranks import of_shapes

pytestmark = pytest.mark.matrix

ranks = of_shapes((1,), (2,), (3,), (4,), (1, 1), (2, 1), (2, 2))
REDUCED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
           torch.int64, torch.uint8]
MOVED = [*REDUCED, torch.bool, torch.complex64]


def check(job, function, *arguments):
    """Run *function*, which returns what is wrong, on all ranks."""
    assert job.run(function, *arguments) == [[]] * job.size


def of(rank, shape, dtype=torch.float32, salt=0):
    """Small whole numbers, different on each rank: exact in every dtype."""
    values = (torch.arange(int(np.prod(shape))) * (rank + 2) + 3 * salt) % 5 + rank
    return (values % 2 if dtype == torch.bool else values).reshape(shape).to(dtype)


def every(shape, dtype=torch.float32, salt=0):
    return torch.stack([of(rank, shape, dtype, salt) for rank in range(hvd.size())])


def reduced(inputs, op, pre=1.0, post=1.0):
    """Return the reduction of *inputs*, one row for each rank, in float64, which is exact for small numbers."""
    x = (inputs.double() * pre).to(inputs.dtype).double()
    total = {hvd.Average: x.sum(0), hvd.Sum: x.sum(0), hvd.Min: x.amin(0), hvd.Max: x.amax(0),
             hvd.Product: x.prod(0)}[op]
    if op == hvd.Average:
        total = total / len(x)
    y = (total if inputs.dtype.is_floating_point else total.trunc()).to(inputs.dtype)
    return (y.double() * post).to(inputs.dtype) if post != 1 else y


def close(a, b):
    """Return whether arrays are equal, or for floats differ by at most one rounding."""
    if not a.dtype.is_floating_point:
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.double(), b.double(), rtol=1e-2, atol=1e-5)


def allreduces():
    wrong = []
    for dtype in REDUCED:
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
            x, inputs = of(hvd.rank(), (3, 2), dtype), every((3, 2), dtype)
            kept = x.clone()
            if not close(hvd.allreduce(x, op=op, name=f"{dtype} {op}"), reduced(inputs, op)) or not x.equal(kept):
                wrong.append(f"allreduce {dtype} {op}")
            same = hvd.allreduce_(x, op=op)
            if same is not x or not close(x, reduced(inputs, op)):
                wrong.append(f"allreduce_ {dtype} {op}")
        handle = hvd.allreduce_async(of(hvd.rank(), (5,), dtype), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
        if not close(hvd.synchronize(handle), reduced(every((5,), dtype), hvd.Sum, 2.0, 0.5)) or not hvd.poll(handle):
            wrong.append(f"scaled {dtype}")
    for shape in ((), (0,), (2, 0), (300_000,)):
        if not close(hvd.allreduce(of(hvd.rank(), shape), op=hvd.Sum), reduced(every(shape), hvd.Sum)):
            wrong.append(f"shape {shape}")
    if not close(hvd.allreduce(of(hvd.rank(), (4, 3)).t()), reduced(every((4, 3)), hvd.Average).t()):
        wrong.append("not contiguous")
    with pytest.warns(DeprecationWarning, match="Parameter `average` has been replaced with `op`"):
        if not close(hvd.allreduce(of(hvd.rank(), (2,)), average=False), reduced(every((2,)), hvd.Sum)):
            wrong.append("average=False")
    narrow = hvd.allreduce(of(hvd.rank(), (7,)), compression=hvd.Compression.fp16)
    if not close(narrow, reduced(every((7,)), hvd.Average)):
        wrong.append("compression")
    return wrong


def test_allreduce(ranks):
    check(ranks, allreduces)


def groups():
    wrong = []
    shapes = [(3,), (), (70_000,), (2, 2), (0,)]
    for dtype in REDUCED:
        tensors = [of(hvd.rank(), shape, dtype, i) for i, shape in enumerate(shapes)]
        expected = [reduced(every(shape, dtype, i), hvd.Sum) for i, shape in enumerate(shapes)]
        found = hvd.grouped_allreduce(tensors, op=hvd.Sum, name=f"group {dtype}")
        wrong += [f"grouped {dtype} {shape}" for shape, a, b in zip(shapes, found, expected) if not close(a, b)]
        same = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
        wrong += [f"grouped_ {dtype} {i}" for i, (a, b) in enumerate(zip(same, tensors)) if a is not b]
        wrong += [f"grouped_ {dtype}" for a, b in zip(tensors, expected) if not close(a, b)]
    mixed = [of(hvd.rank(), (4,), dtype) for dtype in REDUCED]
    found = hvd.synchronize(hvd.grouped_allreduce_async(mixed, op=hvd.Max, prescale_factor=2.0))
    wrong += [f"mixed {dtype}" for dtype, a in zip(REDUCED, found)
              if not close(a, reduced(every((4,), dtype), hvd.Max, 2.0))]
    return wrong


def test_groups_are_reduced_tensor_by_tensor(ranks):
    check(ranks, groups)


def gathers():
    wrong = []
    n = hvd.size()
    for dtype in MOVED:
        x = of(hvd.rank(), (hvd.rank(), 2), dtype)
        expected = torch.cat([of(rank, (rank, 2), dtype) for rank in range(n)])
        if not torch.equal(hvd.allgather(x), expected):
            wrong.append(f"allgather {dtype}")
    pair = hvd.grouped_allgather([of(hvd.rank(), (n - hvd.rank(),)), of(hvd.rank(), (1, 3), torch.int64)], name="pair")
    if not torch.equal(pair[0], torch.cat([of(rank, (n - rank,)) for rank in range(n)])):
        wrong.append("grouped, first")
    if not torch.equal(pair[1], torch.cat([of(rank, (1, 3), torch.int64) for rank in range(n)])):
        wrong.append("grouped, second")
    if hvd.synchronize(hvd.allgather_async(torch.empty(0, 4))).shape != (0, 4):
        wrong.append("nothing at all")
    return wrong


def test_allgather(ranks):
    check(ranks, gathers)


def broadcasts():
    wrong = []
    root = hvd.size() - 1
    for dtype in MOVED:
        x = of(hvd.rank(), (2, 3), dtype)
        kept, expected = x.clone(), of(root, (2, 3), dtype)
        if not torch.equal(hvd.broadcast(x, root), expected) or not torch.equal(x, kept):
            wrong.append(f"broadcast {dtype}")
        if hvd.broadcast_(x, root, name=f"{dtype}") is not x or not torch.equal(x, expected):
            wrong.append(f"broadcast_ {dtype}")
    scalar = torch.tensor(float(hvd.rank()))
    if hvd.synchronize(hvd.broadcast_async_(scalar, root)).item() != root:
        wrong.append("scalar")
    if hvd.synchronize(hvd.broadcast_async(torch.empty(0), 0)).shape != (0,):
        wrong.append("nothing")
    return wrong


def test_broadcast(ranks):
    check(ranks, broadcasts)


def rows(sender, receiver):
    return (sender + 2 * receiver) % 3


def exchanges():
    wrong = []
    n, me = hvd.size(), hvd.rank()
    for dtype in MOVED:
        splits = [rows(me, other) for other in range(n)]
        x = of(me, (sum(splits) + 1, 2), dtype)  # one row more, which goes nowhere
        begins = [[sum(rows(a, b) for b in range(c)) for c in range(n)] for a in range(n)]
        expected = torch.cat([
            of(a, (sum(rows(a, b) for b in range(n)) + 1, 2), dtype)[begins[a][me]:][: rows(a, me)] for a in range(n)])
        output, received = hvd.alltoall(x, torch.tensor(splits, dtype=torch.int32))
        if not torch.equal(output, expected) or received.tolist() != [rows(a, me) for a in range(n)]:
            wrong.append(f"alltoall {dtype}")
    even = hvd.alltoall(of(me, (2 * n, 3)), name="even")
    if not torch.equal(even, torch.cat([of(a, (2 * n, 3))[2 * me: 2 * me + 2] for a in range(n)])):
        wrong.append("even splits")
    output, received = hvd.synchronize(hvd.alltoall_async(of(me, (n,))))
    if received.tolist() != [1] * n or received.dtype != torch.int32:
        wrong.append("received splits")
    if hvd.alltoall(torch.empty(0, 3), [0] * n)[0].shape != (0, 3):
        wrong.append("nothing")
    return wrong


def test_alltoall(ranks):
    check(ranks, exchanges)


def scatters():
    wrong = []
    n, me = hvd.size(), hvd.rank()
    for n_rows in (1, n, 2 * n + 1):
        shares = [n_rows // n + (i < n_rows % n) for i in range(n)]
        begin = sum(shares[:me])
        for dtype in REDUCED:
            for op in (hvd.Sum, hvd.Average):
                found = hvd.reducescatter(of(me, (n_rows, 2), dtype), op=op)
                if not close(found, reduced(every((n_rows, 2), dtype), op)[begin:][:shares[me]]):
                    wrong.append(f"reducescatter {n_rows} {dtype} {op}")
    first, second = hvd.grouped_reducescatter([of(me, (n, 2)), of(me, (n,), salt=1)], op=hvd.Sum, prescale_factor=2.0,
                                              postscale_factor=0.25)
    if not close(first, reduced(every((n, 2)), hvd.Sum, 2.0, 0.25)[me: me + 1]):
        wrong.append("grouped, first")
    if not close(second, reduced(every((n,), salt=1), hvd.Sum, 2.0, 0.25)[me: me + 1]):
        wrong.append("grouped, second")
    return wrong


def test_reducescatter(ranks):
    check(ranks, scatters)


def sparse():
    wrong = []
    for op in (hvd.Sum, hvd.Average):
        dense = torch.zeros(6, 2)
        dense[hvd.rank()] = hvd.rank() + 1.0
        dense[5] = 1.0
        total = torch.zeros(6, 2)
        for rank in range(hvd.size()):
            total[rank] += rank + 1.0
            total[5] += 1.0
        found = hvd.synchronize(hvd.sparse_allreduce_async(dense.to_sparse(1), name=f"sparse {op}", op=op))
        if not found.is_sparse or not close(found.to_dense(), total / (hvd.size() if op == hvd.Average else 1)):
            wrong.append(f"{op}")
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 2), (6, 2))
    if hvd.sparse_allreduce_async(empty, name="empty", op=hvd.Sum)().to_dense().any():
        wrong.append("empty")
    return wrong


def test_sparse_tensors_are_added_up_entry_by_entry(ranks):
    check(ranks, sparse)


def arrays():
    wrong = []
    n, me = hvd.size(), hvd.rank()
    for dtype in ("float32", "float16", "int64", ml_dtypes.bfloat16):
        x = np.full((2, 3), me + 1, dtype)
        kept, total = x.copy(), np.full((2, 3), n * (n + 1) // 2, dtype)
        y = hvd.allreduce(x, op=hvd.Sum)
        if not isinstance(y, np.ndarray) or y.dtype != x.dtype or (y != total).any() or (x != kept).any():
            wrong.append(f"allreduce {dtype}")
        if hvd.allreduce_(x, op=hvd.Sum) is not x or (x != total).any():
            wrong.append(f"allreduce_ {dtype}")
    x = np.arange(n, dtype=np.float32) + me
    found = [hvd.allgather(x), hvd.broadcast(x, 0), hvd.alltoall(x), hvd.reducescatter(x, op=hvd.Sum)]
    expected = [np.concatenate([np.arange(n) + r for r in range(n)]), np.arange(n), np.arange(n) + me,
                [me * n + n * (n - 1) // 2]]
    wrong += [f"array {i}" for i, (a, b) in enumerate(zip(found, expected))
              if not isinstance(a, np.ndarray) or not np.array_equal(a, b)]
    fixed = np.ones(2)
    fixed.flags.writeable = False
    if (hvd.allreduce(fixed, op=hvd.Sum) != n).any():
        wrong.append("read-only input")
    with pytest.raises(ValueError, match="read-only"):
        hvd.allreduce_(fixed)
    return wrong


def test_numpy_arrays_are_taken_and_given(ranks):
    check(ranks, arrays)


def any_order():
    names = [f"order {i}" for i in range(20)]
    mine = names[hvd.rank():] + names[:hvd.rank()]
    handles = {name: hvd.allreduce_async(torch.full((4,), float(names.index(name))), name=name, op=hvd.Sum)
               for name in (mine[::-1] if hvd.rank() % 2 else mine)}
    return [name for i, name in enumerate(names)
            if not torch.equal(hvd.synchronize(handles[name]), torch.full((4,), float(i * hvd.size())))]


def test_ranks_submit_in_any_order(ranks):
    check(ranks, any_order)


def same_name_again():
    total = 0.0
    for i in range(50):
        total += hvd.allreduce(torch.ones(1) * i, name="again", op=hvd.Sum).item()
    return [] if total == 1225 * hvd.size() else [total]


def test_a_name_can_be_used_again(ranks):
    check(ranks, same_name_again)
