"""Cases for each test of operations on the CPU in Horovod's test_torch.py, under the same names.

Written anew: inputs differ between ranks, and what is expected is computed from all of them.
"""
from __future__ import annotations

import itertools
import time

import pytest
import torch

import bpsfast.hvd as hvd
from tests.support.hvd_suite import (
    CASES,
    DIMS,
    FLOATS,
    INTEGERS,
    MOVED,
    REDUCED,
    SIZE,
    case,
    cast,
    own_set,
    ranks as ranks,
    refused,
    run_case,
    same,
    stacked,
    values,
)

pytestmark = pytest.mark.timeout(300)

_GPU = "needs a GPU, and is skipped on CPUs; bpsfast.hvd takes tensors on the CPU"
#: Tests of Horovod's test_torch.py that have no case, and what is otherwise in cases, with the reasons.
EXCEPTIONS = {
    "test_gpu_required": _GPU,
    "test_horovod_allreduce_multi_gpu": _GPU,
    "test_horovod_allreduce_cpu_gpu_error": _GPU,
    "test_horovod_grouped_allreduce_cpu_gpu_error": _GPU,
    "test_horovod_alltoall_splits_on_gpu": _GPU,
    "test_broadcast_state_gpu": _GPU,
    "test_model_parallelism": _GPU,
    "test_horovod_sync_batch_norm": f"{_GPU}: test_hvd_gradients.py has a test on the CPU",
    "test_delta_optimizer": "Adasum, which is refused; needs a GPU and MPI",
    "test_timeline_api": "is skipped there (Horovod's issue 2496); test_hvd_basics.py has tests of timelines",
}
#: Cases whose program differs: what torch itself refuses, or what depends on who has started the job.
OTHERWISE = {
    "test_horovod_reinit": "in a job of `bpsfast run`, which ends with its shutdown, init is refused after it in words",
    "test_horovod_is_initialized": "as test_horovod_reinit",
    "test_horovod_rank": "asks all ranks, not the variables of MPI or horovodrun",
    "test_horovod_size": "as test_horovod_rank",
    "test_broadcast_state": "torch's Muon takes matrices only: its model has no biases",
    "test_broadcast_state_options": "as test_broadcast_state",
    "test_force_allreduce": "as test_broadcast_state",
}


def everybody():
    return range(hvd.size())


def length(n):
    """A shape of *n* rows for each number of dimensions."""
    return [(n,) + (5,) * (dim - 1) for dim in DIMS]


# -- the process ------------------------------------------------------------------------------------------

@case("test_horovod_reinit")
def init_again():
    before = hvd.rank(), hvd.size()
    hvd.shutdown()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == before


@case("test_horovod_is_initialized")
def is_initialized():
    assert hvd.is_initialized()
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()


@case("test_horovod_rank", "test_horovod_size")
def rank_and_size():
    assert hvd.size() == SIZE and hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(everybody())


# -- allreduce --------------------------------------------------------------------------------------------

def reduces(op, total, dtypes=REDUCED, largest=100):
    for dtype, shape in itertools.product(dtypes, length(7)):
        x, every = values(hvd.rank(), shape, dtype, largest=largest), stacked(everybody(), shape, dtype, 0, largest)
        kept = x.clone()
        assert same(hvd.allreduce(x, op=op), cast(total(every), dtype)), (op, dtype, shape)
        assert torch.equal(x, kept)


@case("test_horovod_allreduce")
def sums():
    reduces(hvd.Sum, lambda every: every.sum(0))


@case("test_horovod_allreduce_average")
def averages():
    reduces(hvd.Average, lambda every: every.mean(0))
    x = values(hvd.rank(), (7,), torch.int64)
    wanted = stacked(everybody(), (7,), torch.int64)
    with pytest.warns(DeprecationWarning):
        assert torch.equal(hvd.allreduce(x, average=True), cast(wanted.mean(0), torch.int64))
    with pytest.warns(DeprecationWarning):
        assert torch.equal(hvd.allreduce(x, average=False), wanted.sum(0).long())


@case("test_horovod_allreduce_min")
def minima():
    reduces(hvd.Min, lambda every: every.amin(0))


@case("test_horovod_allreduce_max")
def maxima():
    reduces(hvd.Max, lambda every: every.amax(0))


@case("test_horovod_allreduce_product")
def products():
    reduces(hvd.Product, lambda every: every.prod(0), largest=9)


@case("test_horovod_allreduce_inplace")
def in_place():
    for dtype, shape in itertools.product(REDUCED, length(7)):
        x = values(hvd.rank(), shape, dtype)
        assert hvd.allreduce_(x, op=hvd.Sum) is x
        assert same(x, cast(stacked(everybody(), shape, dtype).sum(0), dtype))


def is_asynchronous(begin, wanted_of, dtypes):
    """Begin all operations before waiting for any; none can end before rank 0 has begun."""
    if hvd.rank() == 0:
        hvd.barrier()
    handles, polled = [], []
    for salt, (dtype, shape) in enumerate(itertools.product(dtypes, length(6))):
        handles.append((begin(values(hvd.rank(), shape, dtype, salt)), wanted_of(shape, dtype, salt)))
        polled.append(hvd.poll(handles[-1][0]))
    if hvd.rank() != 0:
        assert not any(polled)
        hvd.barrier()
    for handle, wanted in handles:
        assert same(hvd.synchronize(handle), wanted) and hvd.poll(handle)


@case("test_horovod_allreduce_async_fused")
def many_at_once():
    is_asynchronous(lambda x: hvd.allreduce_async(x, op=hvd.Sum),
                    lambda shape, dtype, salt: cast(stacked(everybody(), shape, dtype, salt).sum(0), dtype), REDUCED)


FACTOR = 0.37


def before(every, dtype):
    """*every* input times the factor, in float64, as it is rounded to *dtype* before the sum."""
    return cast(every * FACTOR, dtype).double()


@case("test_horovod_allreduce_prescale")
def prescaled():
    for dtype, shape in itertools.product(REDUCED, length(7)):
        found = hvd.allreduce(values(hvd.rank(), shape, dtype), op=hvd.Sum, prescale_factor=FACTOR)
        assert same(found, cast(before(stacked(everybody(), shape, dtype), dtype).sum(0), dtype)), dtype


@case("test_horovod_allreduce_postscale")
def postscaled():
    for dtype, shape in itertools.product(REDUCED, length(7)):
        x, every = values(hvd.rank(), shape, dtype), stacked(everybody(), shape, dtype)
        assert same(hvd.allreduce(x, op=hvd.Sum, postscale_factor=FACTOR), cast(every.sum(0) * FACTOR, dtype)), dtype
        assert same(hvd.allreduce(x, postscale_factor=FACTOR), cast(every.sum(0) * FACTOR / hvd.size(), dtype)), dtype


@case("test_horovod_allreduce_process_sets")
def sums_of_a_set():
    with own_set() as mine:
        for dtype, shape in itertools.product(REDUCED, length(7)):
            found = hvd.allreduce(values(hvd.rank(), shape, dtype), op=hvd.Sum, process_set=mine)
            assert same(found, cast(stacked(mine.ranks, shape, dtype).sum(0), dtype))


def differ(operation, rows_matter=True):
    """Ranks submit tensors that do not match: an error on all of them, not at submission."""
    if rows_matter:
        refused(RuntimeError, operation, torch.ones([17 + hvd.rank()] * 3))
    refused(RuntimeError, operation, torch.ones((17, 12) if hvd.rank() == 0 else (17, 3, 4)))
    refused(RuntimeError, operation, torch.ones(17, 10 * (hvd.rank() + 1), 17))


def differ_in_type(operation):
    refused(RuntimeError, operation, torch.ones(SIZE, 4).to((torch.int32, torch.float32)[hvd.rank() % 2]))


@case("test_horovod_allreduce_error")
def allreduce_differs():
    differ(hvd.allreduce)


@case("test_horovod_allreduce_type_error")
def allreduce_differs_in_type():
    differ_in_type(hvd.allreduce)


def twice(operation):
    """A name that is under way on this rank is refused at once, whatever the other ranks do; the first one completes.
    """
    for turn in everybody():
        name, first = f"duplicate_name.{turn}", None
        if turn == hvd.rank():
            first = operation(name)
            text = refused(ValueError, operation, name)
            assert "same name as another tensor that is currently being processed" in text
        hvd.barrier()  # the others come later: else the first one could be over before the second is refused
        hvd.synchronize(first if first is not None else operation(name))
        hvd.synchronize(operation(name))  # and it may be used again


@case("test_horovod_allreduce_duplicate_name_error")
def allreduce_twice():
    twice(lambda name: hvd.allreduce_async(torch.ones(17, 17), name=name))


def upstream(x, rank=None):
    """Return the incoming gradient of *rank*, by default this one; it differs by rank."""
    return torch.full_like(x, float((hvd.rank() if rank is None else rank) + 1))


def gradient_of(operation, x):
    x = x.clone().requires_grad_()
    y = operation(x)
    y.backward(upstream(y))
    return x.grad


def mean_upstream(ranks=None):
    ranks = list(everybody() if ranks is None else ranks)
    return sum(rank + 1 for rank in ranks) / len(ranks)


def grads(operation, factor, dtypes=FLOATS, shapes=None):
    for dtype, shape in itertools.product(dtypes, shapes or length(7)):
        x = values(hvd.rank(), shape, dtype)
        assert same(gradient_of(operation, x), torch.full_like(x, factor)), (dtype, shape)


@case("test_horovod_allreduce_grad")
def allreduce_grad():
    grads(lambda x: hvd.allreduce(x, op=hvd.Sum), mean_upstream() * SIZE)


@case("test_horovod_allreduce_grad_average")
def allreduce_grad_average():
    grads(hvd.allreduce, mean_upstream())


@case("test_horovod_allreduce_grad_process_sets")
def allreduce_grad_of_a_set():
    with own_set() as mine:
        grads(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=mine), mean_upstream(mine.ranks) * mine.size())


# -- grouped_allreduce ------------------------------------------------------------------------------------

N = 5


def group(shape, dtype, rank=None):
    rank = hvd.rank() if rank is None else rank
    return [values(rank, shape, dtype, salt) for salt in range(N)]


def all_same(found, wanted):
    return len(found) == len(wanted) and all(same(a, b) for a, b in zip(found, wanted))


def group_totals(shape, dtype, total, ranks=None):
    ranks = everybody() if ranks is None else ranks
    return [cast(total(stacked(ranks, shape, dtype, salt)), dtype) for salt in range(N)]


@case("test_horovod_grouped_allreduce")
def grouped_sums():
    for dtype, shape in itertools.product(REDUCED, length(7)):
        assert all_same(hvd.grouped_allreduce(group(shape, dtype), op=hvd.Sum),
                        group_totals(shape, dtype, lambda every: every.sum(0)))


@case("test_horovod_grouped_allreduce_average")
def grouped_averages():
    for dtype, shape in itertools.product(REDUCED, length(7)):
        assert all_same(hvd.grouped_allreduce(group(shape, dtype)),
                        group_totals(shape, dtype, lambda every: every.mean(0)))


@case("test_horovod_grouped_allreduce_inplace")
def grouped_in_place():
    for dtype, shape in itertools.product(REDUCED, length(7)):
        tensors = group(shape, dtype)
        assert all(a is b for a, b in zip(hvd.grouped_allreduce_(tensors, op=hvd.Sum), tensors))
        assert all_same(tensors, group_totals(shape, dtype, lambda every: every.sum(0)))


@case("test_horovod_grouped_allreduce_process_sets")
def grouped_sums_of_a_set():
    with own_set() as mine:
        for dtype, shape in itertools.product(REDUCED, length(7)):
            assert all_same(hvd.grouped_allreduce(group(shape, dtype), op=hvd.Sum, process_set=mine),
                            group_totals(shape, dtype, lambda every: every.sum(0), mine.ranks))


def group_grads(operation, factor, dtypes=FLOATS, shapes=None):
    """Call backward on one result after the other."""
    for dtype, shape in itertools.product(dtypes, shapes or length(7)):
        tensors = [x.requires_grad_() for x in group(shape, dtype)]
        for y in operation(tensors):
            y.backward(upstream(y))
        assert all(same(x.grad, torch.full_like(x, factor)) for x in tensors), (dtype, shape)


@case("test_horovod_grouped_allreduce_grad")
def grouped_allreduce_grad():
    group_grads(lambda tensors: hvd.grouped_allreduce(tensors, op=hvd.Sum), mean_upstream() * SIZE)


@case("test_horovod_grouped_allreduce_grad_average")
def grouped_allreduce_grad_average():
    group_grads(hvd.grouped_allreduce, mean_upstream())


@case("test_horovod_grouped_allreduce_grad_process_sets")
def grouped_allreduce_grad_of_a_set():
    with own_set() as mine:
        group_grads(lambda tensors: hvd.grouped_allreduce(tensors, op=hvd.Sum, process_set=mine),
                    mean_upstream(mine.ranks) * mine.size())


# -- allgather --------------------------------------------------------------------------------------------

ROWS = (17, 32, 8)  # of each rank


def gathers(rows, ranks=None, **arguments):
    ranks = list(everybody() if ranks is None else ranks)
    for dtype, dim in itertools.product(MOVED, DIMS):
        pieces = [values(rank, (rows(rank),) + (5,) * (dim - 1), dtype) for rank in ranks]
        found = hvd.allgather(pieces[ranks.index(hvd.rank())], **arguments)
        assert torch.equal(found, torch.cat(pieces)), (dtype, dim)


@case("test_horovod_allgather")
def allgather():
    gathers(lambda rank: 17)


@case("test_horovod_allgather_variable_size")
def allgather_of_different_lengths():
    gathers(lambda rank: ROWS[rank])


@case("test_horovod_allgather_async_fused")
def many_allgathers_at_once():
    is_asynchronous(hvd.allgather_async, lambda shape, dtype, salt: torch.cat(
        [values(rank, shape, dtype, salt) for rank in everybody()]), MOVED)


@case("test_horovod_allgather_process_sets")
def allgather_of_a_set():
    with own_set() as mine:
        gathers(lambda rank: ROWS[rank], mine.ranks, process_set=mine)


@case("test_horovod_allgather_error")
def allgather_differs():
    differ(hvd.allgather, rows_matter=False)


@case("test_horovod_allgather_type_error")
def allgather_differs_in_type():
    differ_in_type(hvd.allgather)


@case("test_horovod_allgather_duplicate_name_error")
def allgather_twice():
    twice(lambda name: hvd.allgather_async(torch.ones(17, 17), name=name))


@case("test_horovod_allgather_grad")
def allgather_grad():
    grads(hvd.allgather, mean_upstream(), shapes=length(ROWS[hvd.rank()]))


@case("test_horovod_allgather_grad_process_sets")
def allgather_grad_of_a_set():
    with own_set() as mine:
        grads(lambda x: hvd.allgather(x, process_set=mine), mean_upstream(mine.ranks), shapes=length(ROWS[hvd.rank()]))


def grouped_gathers(ranks, **arguments):
    for dtype, shape in itertools.product(MOVED, length(7)):
        wanted = [torch.cat(pieces) for pieces in zip(*[group(shape, dtype, rank) for rank in ranks])]
        assert all_same(hvd.grouped_allgather(group(shape, dtype), **arguments), wanted)


@case("test_horovod_grouped_allgather")
def grouped_allgather():
    grouped_gathers(everybody())


@case("test_horovod_grouped_allgather_process_sets")
def grouped_allgather_of_a_set():
    with own_set() as mine:
        grouped_gathers(mine.ranks, process_set=mine)


@case("test_horovod_grouped_allgather_grad")
def grouped_allgather_grad():
    group_grads(hvd.grouped_allgather, mean_upstream(), shapes=length(ROWS[hvd.rank()]))


@case("test_horovod_grouped_allgather_grad_process_sets")
def grouped_allgather_grad_of_a_set():
    with own_set() as mine:
        group_grads(lambda tensors: hvd.grouped_allgather(tensors, process_set=mine), mean_upstream(mine.ranks))


# -- broadcast --------------------------------------------------------------------------------------------

def broadcasts(roots, **arguments):
    for dtype, shape, root in itertools.product(MOVED, length(7), roots):
        x = values(hvd.rank(), shape, dtype)
        kept = x.clone()
        assert torch.equal(hvd.broadcast(x, root, **arguments), values(root, shape, dtype))
        assert torch.equal(x, kept)


@case("test_horovod_broadcast")
def broadcast():
    broadcasts(everybody())


@case("test_horovod_broadcast_inplace")
def broadcast_in_place():
    for dtype, shape, root in itertools.product(MOVED, length(7), everybody()):
        x = values(hvd.rank(), shape, dtype)
        assert hvd.broadcast_(x, root) is x and torch.equal(x, values(root, shape, dtype))


@case("test_horovod_broadcast_process_sets")
def broadcast_in_a_set():
    with own_set() as mine:
        broadcasts(mine.ranks, process_set=mine)
        stranger = next(rank for rank in everybody() if rank not in mine.ranks)
        refused(ValueError, hvd.broadcast, torch.ones(1), stranger, process_set=mine)


@case("test_horovod_broadcast_error")
def broadcast_differs():
    differ(lambda x: hvd.broadcast(x, 0))


@case("test_horovod_broadcast_type_error")
def broadcast_differs_in_type():
    differ_in_type(lambda x: hvd.broadcast(x, 0))


@case("test_horovod_broadcast_rank_error")
def broadcast_of_different_roots():
    refused(RuntimeError, hvd.broadcast, torch.ones(3), hvd.rank())


@case("test_horovod_broadcast_duplicate_name_error")
def broadcast_twice():
    twice(lambda name: hvd.broadcast_async(torch.ones(17, 17), root_rank=0, name=name))


@case("test_horovod_broadcast_grad")
def broadcast_grad():
    for root in everybody():
        grads(lambda x, root=root: hvd.broadcast(x, root), mean_upstream() if root == hvd.rank() else 0.0)


@case("test_horovod_broadcast_grad_process_sets")
def broadcast_grad_in_a_set():
    with own_set() as mine:
        for root in mine.ranks:
            grads(lambda x, root=root: hvd.broadcast(x, root, process_set=mine),
                  mean_upstream(mine.ranks) if root == hvd.rank() else 0.0)


# -- alltoall ---------------------------------------------------------------------------------------------

def sent(sender, receivers, dtype, dim, rows):
    """Return what *sender* sends: *rows* for each of *receivers*."""
    return values(sender, (len(receivers) * rows,) + (2,) * (dim - 1), dtype)


def exchanges(ranks, with_splits, **arguments):
    me = ranks.index(hvd.rank())
    for dtype, dim in itertools.product(MOVED, DIMS):
        counts = [rank + 1 if with_splits else 2 for rank in ranks]  # that each sends to each
        given = [sent(rank, ranks, dtype, dim, n) for rank, n in zip(ranks, counts)]
        wanted = torch.cat([each[me * n: (me + 1) * n] for each, n in zip(given, counts)])
        if with_splits:
            splits = torch.tensor([counts[me]] * len(ranks), dtype=torch.int32)
            found, received = hvd.alltoall(given[me], splits, **arguments)
            assert received.tolist() == counts and received.dtype == torch.int32
        else:
            found = hvd.alltoall(given[me], **arguments)
        assert torch.equal(found, wanted)


@case("test_horovod_alltoall")
def alltoall():
    exchanges(list(everybody()), True)


@case("test_horovod_alltoall_equal_split")
def alltoall_of_equal_parts():
    exchanges(list(everybody()), False)


@case("test_horovod_alltoall_process_sets")
def alltoall_of_a_set():
    with own_set() as mine:
        exchanges(mine.ranks, True, process_set=mine)


@case("test_horovod_alltoall_type_error")
def alltoall_differs_in_type():
    differ_in_type(hvd.alltoall)


@case("test_horovod_alltoall_rank_error")
def alltoall_differs():
    refused(RuntimeError, hvd.alltoall, torch.ones(2 * SIZE, 10 * (hvd.rank() + 1), 2))


@case("test_horovod_alltoall_equal_split_length_error")
def alltoall_of_rows_that_cannot_be_divided():
    assert "not an even multiple" in refused(ValueError, hvd.alltoall, torch.ones(SIZE + 1))


@case("test_horovod_alltoall_splits_error")
def alltoall_of_too_many_rows():
    ones = torch.ones(SIZE, dtype=torch.int32)
    assert "greater than the first dimension" in refused(ValueError, hvd.alltoall, torch.ones(SIZE - 1), ones)
    assert "number of workers" in refused(ValueError, hvd.alltoall, torch.ones(9), ones[1:])
    assert "1D splits" in refused(ValueError, hvd.alltoall, torch.ones(9), ones.reshape(1, -1))


@case("test_horovod_alltoall_splits_type_error")
def alltoall_of_splits_that_are_no_integers():
    for splits in (torch.ones(SIZE), torch.ones(SIZE, dtype=torch.int64), [1.0] * SIZE, ["1"] * SIZE):
        refused(ValueError, hvd.alltoall, torch.ones(SIZE), splits)


@case("test_horovod_alltoall_grad")
def alltoall_grad():
    for dtype, dim in itertools.product(FLOATS, DIMS):
        n = hvd.rank() + 1
        x = sent(hvd.rank(), everybody(), dtype, dim, n)
        found = gradient_of(lambda x, n=n: hvd.alltoall(x, torch.tensor([n] * SIZE, dtype=torch.int32))[0], x)
        assert same(found, torch.cat([upstream(x[:n], receiver) for receiver in everybody()]))


@case("test_horovod_alltoall_equal_split_grad")
def alltoall_of_equal_parts_grad():
    for dtype, dim in itertools.product(FLOATS, DIMS):
        x = sent(hvd.rank(), everybody(), dtype, dim, 2)
        assert same(gradient_of(hvd.alltoall, x), torch.cat([upstream(x[:2], receiver) for receiver in everybody()]))


@case("test_horovod_alltoall_grad_process_sets")
def alltoall_grad_of_a_set():
    with own_set() as mine:
        for dtype, dim in itertools.product(FLOATS, DIMS):
            x = sent(hvd.rank(), mine.ranks, dtype, dim, 2)
            found = gradient_of(lambda x: hvd.alltoall(x, [2] * mine.size(), process_set=mine)[0], x)
            assert same(found, torch.cat([upstream(x[:2], receiver) for receiver in mine.ranks]))


# -- reducescatter ----------------------------------------------------------------------------------------

def part(x, ranks=None):
    """This rank's rows of *x*, which is divided evenly."""
    ranks = list(everybody() if ranks is None else ranks)
    n = len(x) // len(ranks)
    return x[ranks.index(hvd.rank()) * n:][:n]


def scatters(total, ranks=None, dtypes=REDUCED, **arguments):
    ranks = list(everybody() if ranks is None else ranks)
    for dtype, shape in itertools.product(dtypes, length(4 * len(ranks))):
        wanted = part(cast(total(stacked(ranks, shape, dtype), dtype), dtype), ranks)
        assert same(hvd.reducescatter(values(hvd.rank(), shape, dtype), **arguments), wanted), (dtype, shape)


def group_scatters(total, ranks=None, dtypes=REDUCED, **arguments):
    ranks = list(everybody() if ranks is None else ranks)
    for dtype, shape in itertools.product(dtypes, length(4 * len(ranks))):
        wanted = [part(cast(total(stacked(ranks, shape, dtype, salt), dtype), dtype), ranks) for salt in range(N)]
        assert all_same(hvd.grouped_reducescatter(group(shape, dtype), **arguments), wanted), (dtype, shape)


def summed(every, dtype):
    return every.sum(0)


def averaged(every, dtype):
    return every.mean(0)


def scaled_before(every, dtype):
    return before(every, dtype).sum(0)


def scaled_after(every, dtype):
    return every.sum(0) * FACTOR


@case("test_horovod_reducescatter")
def reducescatter():
    scatters(summed, op=hvd.Sum)


@case("test_horovod_grouped_reducescatter")
def grouped_reducescatter():
    group_scatters(summed, op=hvd.Sum)


@case("test_horovod_reducescatter_average")
def reducescatter_average():
    scatters(averaged, dtypes=(*INTEGERS, *FLOATS))


@case("test_horovod_grouped_reducescatter_average")
def grouped_reducescatter_average():
    group_scatters(averaged, dtypes=(*INTEGERS, *FLOATS))


@case("test_horovod_reducescatter_prescale")
def reducescatter_prescaled():
    scatters(scaled_before, op=hvd.Sum, prescale_factor=FACTOR)


@case("test_horovod_grouped_reducescatter_prescale")
def grouped_reducescatter_prescaled():
    group_scatters(scaled_before, op=hvd.Sum, prescale_factor=FACTOR)


@case("test_horovod_reducescatter_postscale")
def reducescatter_postscaled():
    scatters(scaled_after, op=hvd.Sum, postscale_factor=FACTOR)


@case("test_horovod_grouped_reducescatter_postscale")
def grouped_reducescatter_postscaled():
    group_scatters(scaled_after, op=hvd.Sum, postscale_factor=FACTOR)


@case("test_horovod_reducescatter_process_sets")
def reducescatter_of_a_set():
    with own_set() as mine:
        scatters(summed, mine.ranks, op=hvd.Sum, process_set=mine)


@case("test_horovod_grouped_reducescatter_process_sets")
def grouped_reducescatter_of_a_set():
    with own_set() as mine:
        group_scatters(summed, mine.ranks, op=hvd.Sum, process_set=mine)


@case("test_horovod_reducescatter_scalar_error", "test_horovod_grouped_reducescatter_scalar_error")
def reducescatter_of_a_scalar():
    scalar = torch.tensor(1.0)
    assert "scalar" in refused(ValueError, hvd.reducescatter, scalar)
    assert "scalar" in refused(ValueError, hvd.grouped_reducescatter, [torch.zeros(3, 1), scalar])


@case("test_horovod_reducescatter_adasum")
def reducescatter_by_adasum():
    for dtype in REDUCED:
        refused(RuntimeError, hvd.reducescatter, torch.ones(4 * SIZE, dtype=dtype), op=hvd.Adasum)


@case("test_horovod_reducescatter_async_fused")
def many_reducescatters_at_once():
    is_asynchronous(lambda x: hvd.reducescatter_async(x, op=hvd.Sum), lambda shape, dtype, salt: part(
        cast(stacked(everybody(), shape, dtype, salt).sum(0), dtype)), REDUCED)


@case("test_horovod_reducescatter_error")
def reducescatter_differs():
    differ(hvd.reducescatter)


@case("test_horovod_reducescatter_type_error")
def reducescatter_differs_in_type():
    differ_in_type(hvd.reducescatter)


@case("test_horovod_reducescatter_duplicate_name_error")
def reducescatter_twice():
    twice(lambda name: hvd.reducescatter_async(torch.ones(17, 17), name=name))


def scatter_grads(operation, factor_of, ranks=None):
    """The gradient of a rank's result goes to the same part of all ranks' inputs."""
    ranks = list(everybody() if ranks is None else ranks)
    for dtype, shape in itertools.product((*FLOATS, torch.float16), length(4 * len(ranks))):
        x = values(hvd.rank(), shape, dtype)
        wanted = torch.cat([upstream(x[:4], rank) for rank in ranks]) * factor_of(ranks)
        assert same(gradient_of(operation, x), wanted)


@case("test_horovod_reducescatter_grad")
def reducescatter_grad():
    scatter_grads(lambda x: hvd.reducescatter(x, op=hvd.Sum), len)


@case("test_horovod_grouped_reducescatter_grad")
def grouped_reducescatter_grad():
    scatter_grads(lambda x: hvd.grouped_reducescatter([x, x.detach()], op=hvd.Sum)[0], len)


@case("test_horovod_reducescatter_grad_average")
def reducescatter_grad_average():
    scatter_grads(hvd.reducescatter, lambda ranks: 1)


@case("test_horovod_reducescatter_grad_process_sets")
def reducescatter_grad_of_a_set():
    with own_set() as mine:
        scatter_grads(lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=mine), len, mine.ranks)


# -- ranks wait for each other ----------------------------------------------------------------------------

def joins(first, otherwise):
    """Rank *first* joins; the others do *otherwise* before. All get the same last rank, which is another one."""
    if hvd.rank() != first:
        otherwise()
    last = hvd.join()
    assert last != first and hvd.allgather_object(last) == [last] * hvd.size()


@case("test_horovod_join_allreduce")
def join_with_allreduce():
    for dtype, shape, first in itertools.product((*INTEGERS, *FLOATS), length(7), everybody()):
        rest = [rank for rank in everybody() if rank != first]

        def two(shape=shape, dtype=dtype, rest=rest):
            handles = [hvd.allreduce_async(values(hvd.rank(), shape, dtype, salt), name=f"tensor {salt}")
                       for salt in range(2)]
            for salt, handle in enumerate(handles):
                wanted = stacked(rest, shape, dtype, salt).sum(0) / hvd.size()  # a joined rank counts as zeros
                assert same(hvd.synchronize(handle), cast(wanted, dtype))

        joins(first, two)


@case("test_horovod_join_allgather")
def join_with_allgather():
    for first in everybody():
        joins(first, lambda: refused(RuntimeError, hvd.allgather, torch.ones(17, 17)))


@case("test_horovod_join_broadcast")
def join_with_broadcast():
    for first in everybody():
        joins(first, lambda: refused(RuntimeError, hvd.broadcast, torch.ones(17), hvd.rank(), name="broadcast to all"))


LATE_S = 0.4


def late(process_set, waits):
    """Rank 0 is late at the barrier of its set; the rank that *waits* has waited for it."""
    hvd.barrier()
    begun = time.monotonic()
    if hvd.rank() == 0:
        time.sleep(LATE_S)  # what is measured
    hvd.barrier(process_set)
    assert not waits or time.monotonic() - begun > LATE_S * 0.9
    hvd.barrier()


@case("test_global_barrier_op")
def barrier():
    late(hvd.global_process_set, True)


@case("test_process_set_barrier_op")
def barrier_of_a_set():
    with own_set() as mine:
        late(mine, hvd.rank() in (0, 2))


@case("test_barrier_with_multiple_collectives")
def barrier_among_others():
    eye = torch.eye(5)
    handles = [hvd.broadcast_async(eye, root_rank=0), hvd.allgather_async(eye), hvd.allgather_async(torch.zeros(5, 5))]
    mean = hvd.allreduce_async(eye)
    hvd.barrier()
    assert torch.equal(hvd.synchronize(mean), eye) and torch.equal(hvd.synchronize(handles[0]), eye)
    assert torch.equal(hvd.synchronize(handles[1]), torch.cat([eye] * SIZE))
    assert not hvd.synchronize(handles[2]).any()


# -- sparse tensors ---------------------------------------------------------------------------------------

def sparse_sums(ranks, **arguments):
    dense = [[torch.where(values(rank, (n, 10), torch.float32) > 60, 1.5, 0.0) for rank in ranks] for n in (17, 8, 1)]
    mine = list(ranks).index(hvd.rank())
    handles = [hvd.sparse_allreduce_async(every[mine].to_sparse(), str(i), hvd.Average, **arguments)
               for i, every in enumerate(dense)]
    for every, handle in zip(dense, handles):
        assert torch.allclose(handle().to_dense(), torch.stack(every).mean(0))


@case("test_async_sparse_allreduce")
def sparse_allreduce():
    sparse_sums(everybody())


@case("test_async_sparse_allreduce_process_sets")
def sparse_allreduce_of_a_set():
    with own_set() as mine:
        sparse_sums(mine.ranks, process_set=mine)


# ---------------------------------------------------------------------------------------------------------

def run(name):
    torch.set_num_threads(1)
    run_case(name)


def test_exceptions_have_no_case():
    assert not set(EXCEPTIONS) & set(CASES)


@pytest.mark.parametrize("name", [name for name, function in CASES.items() if function.__module__ == __name__])
def test_case(ranks, name):
    ranks.run(run, name, timeout_s=250.0)
