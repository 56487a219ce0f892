"""A call that fails on one rank uses no name and no number, so that later calls of all ranks still match."""
from __future__ import annotations

import numpy as np
import pytest
import torch

import bpsfast
import bpsfast.hvd as hvd
import bpsfast.torch as bps
from bpsfast.orchestration.errors import UnsupportedError
from tests.support.hvd_ranks import begun

pytestmark = pytest.mark.timeout(200)

ONE, MANY = torch.ones(6), torch.ones(6, 2)
TEXT = "a name in the wrong place"


class Unpicklable:
    def __reduce__(self):
        raise OverflowError("too much to say")


def sparse():
    return torch.eye(3).to_sparse()


#: Of each operation: calls that are refused, and one that all ranks make afterwards, without a name where it can be.
OPERATIONS = {
    "allreduce": ([
        lambda: hvd.allreduce(ONE, TEXT), lambda: hvd.allreduce(ONE, average=1),
        lambda: hvd.allreduce(ONE, average=ONE), lambda: hvd.allreduce(ONE, op="Sum"),
        lambda: hvd.allreduce(ONE, op=True), lambda: hvd.allreduce(ONE, op=7),
        lambda: hvd.allreduce(ONE, average=True, op=hvd.Sum), lambda: hvd.allreduce(ONE, name=5),
        lambda: hvd.allreduce(ONE, name=b"bytes"), lambda: hvd.allreduce(ONE, name="\ud800"),
        lambda: hvd.broadcast_parameters({"\ud800": ONE}, 0), lambda: hvd.allreduce(None), lambda: hvd.allreduce([1.0]),
        lambda: hvd.allreduce(ONE.bool()), lambda: hvd.allreduce(sparse()), lambda: hvd.allreduce(ONE.to("meta")),
        lambda: hvd.allreduce(ONE, prescale_factor="2"), lambda: hvd.allreduce(ONE, postscale_factor=None),
        lambda: hvd.allreduce(ONE, prescale_factor=ONE), lambda: hvd.allreduce(ONE, prescale_factor=float("nan")),
        lambda: hvd.allreduce(ONE, compression="fp16"), lambda: hvd.allreduce(ONE, process_set=[0, 1]),
        lambda: hvd.allreduce(ONE, process_set=None), lambda: hvd.allreduce(ONE, process_set=hvd.ProcessSet([0])),
        lambda: hvd.allreduce(ONE.clone().requires_grad_(), TEXT),
        lambda: hvd.allreduce_(MANY.t()), lambda: hvd.allreduce_async(ONE, TEXT),
    ], lambda: hvd.allreduce(ONE, op=hvd.Sum).tolist() == [2.0] * 6),
    "grouped_allreduce": ([
        lambda: hvd.grouped_allreduce([ONE, None]), lambda: hvd.grouped_allreduce([ONE, MANY], TEXT),
        lambda: hvd.grouped_allreduce([ONE, ONE.bool()]), lambda: hvd.grouped_allreduce([ONE], op=9),
        lambda: hvd.grouped_allreduce_([ONE.clone(), MANY.t()]), lambda: hvd.grouped_allreduce([ONE], name=0),
    ], lambda: hvd.grouped_allreduce([ONE, MANY], op=hvd.Sum)[1].sum() == 24),
    "allgather": ([
        lambda: hvd.allgather(None), lambda: hvd.allgather(sparse()), lambda: hvd.allgather(ONE, name=3),
        lambda: hvd.allgather(np.array(["text"])), lambda: hvd.allgather(ONE, process_set=0),
        lambda: hvd.grouped_allgather([ONE, None]), lambda: hvd.grouped_allgather([ONE], 3),
    ], lambda: len(hvd.allgather(ONE)) == 12 and len(hvd.grouped_allgather([ONE])[0]) == 12),
    "broadcast": ([
        lambda: hvd.broadcast(ONE, 7), lambda: hvd.broadcast(ONE, -1), lambda: hvd.broadcast(ONE, "0"),
        lambda: hvd.broadcast(ONE, 0.0), lambda: hvd.broadcast(ONE, None), lambda: hvd.broadcast(None, 0),
        lambda: hvd.broadcast(ONE, 0, name=1), lambda: hvd.broadcast_(MANY.t(), 0),
        lambda: hvd.broadcast_parameters({"a": 1.0}, 0), lambda: hvd.broadcast_parameters(3, 0),
        lambda: hvd.broadcast_parameters({"a": sparse()}, 0), lambda: hvd.broadcast_parameters({"a": ONE}, "0"),
        lambda: hvd.broadcast_object(1, "0"), lambda: hvd.broadcast_object(1, 0, name=2),
        lambda: hvd.allgather_object(1, name=2),
    ], lambda: (hvd.broadcast(ONE + hvd.rank(), 1)[0] == 2 and hvd.broadcast_object(hvd.rank()) == 0
                and hvd.broadcast_parameters({"a": ONE.clone()}, 0) is None and hvd.allgather_object(1) == [1, 1])),
    "alltoall": ([
        lambda: hvd.alltoall(torch.ones(5)), lambda: hvd.alltoall(ONE, [4, 3]), lambda: hvd.alltoall(ONE, [6]),
        lambda: hvd.alltoall(ONE, [7, -1]), lambda: hvd.alltoall(ONE, [2.5, 1.5]), lambda: hvd.alltoall(ONE, 3),
        lambda: hvd.alltoall(ONE, torch.tensor([3, 3])), lambda: hvd.alltoall(ONE, torch.tensor(3, dtype=torch.int32)),
        lambda: hvd.alltoall(ONE, np.array([3.0, 3.0])), lambda: hvd.alltoall(None), lambda: hvd.alltoall(ONE, name=4),
    ], lambda: hvd.alltoall(ONE).tolist() == [1.0] * 6),
    "reducescatter": ([
        lambda: hvd.reducescatter(torch.tensor(1.0)), lambda: hvd.reducescatter(ONE, op=hvd.Max),
        lambda: hvd.reducescatter(ONE, op=hvd.Min), lambda: hvd.reducescatter(ONE, prescale_factor="x"),
        lambda: hvd.grouped_reducescatter([ONE, None]), lambda: hvd.grouped_reducescatter([ONE, torch.tensor(1.0)]),
    ], lambda: hvd.reducescatter(ONE, op=hvd.Sum).tolist() == [2.0] * 3),
    "sparse": ([
        lambda: hvd.sparse_allreduce_async(ONE, "s", hvd.Sum), lambda: hvd.sparse_allreduce_async(sparse(), 4, hvd.Sum),
        lambda: hvd.sparse_allreduce_async(sparse(), "s", hvd.Max),
        lambda: hvd.sparse_allreduce_async(None, "s", hvd.Sum),
        lambda: hvd.sparse_allreduce_async(sparse(), "s", "Sum"),
    ], lambda: hvd.sparse_allreduce_async(sparse(), "s", hvd.Sum)().to_dense().equal(2 * torch.eye(3))),
    "process sets": ([
        lambda: hvd.add_process_set([0, 1]), lambda: hvd.add_process_set(["0"]), lambda: hvd.add_process_set([0, 9]),
        lambda: hvd.add_process_set(0), lambda: hvd.barrier(5), lambda: hvd.barrier(hvd.ProcessSet([0])),
        lambda: hvd.synchronize(5),
    ], lambda: hvd.remove_process_set(hvd.add_process_set([0])) and hvd.barrier() is None),
    "DistributedOptimizer": ([
        lambda: wrapped(gradient_predivide_factor="2"), lambda: wrapped(gradient_predivide_factor=0.0),
        lambda: wrapped(backward_passes_per_step=1.5), lambda: wrapped(backward_passes_per_step="1"),
        lambda: wrapped(process_set=[0]), lambda: wrapped(op="Sum"), lambda: wrapped(groups=1.5),
        lambda: wrapped(named_parameters=[("p", None)]), lambda: wrapped(named_parameters=[(1, torch.ones(1))]),
    ], lambda: wrapped() is not None),
    "push_pull": ([
        lambda: bpsfast.push_pull(np.ones(3), TEXT), lambda: bpsfast.push_pull(np.ones(3), average=1),
        lambda: bpsfast.push_pull(np.ones(3), name=4), lambda: bpsfast.push_pull(np.ones(3), priority="high"),
        lambda: bpsfast.push_pull(np.ones(3), priority=2**70), lambda: bpsfast.push_pull(np.ones(3), name="\ud800"),
        lambda: bpsfast.declare("declared", (3,), average="yes"), lambda: bpsfast.declare("declared", ("3",)),
        lambda: bpsfast.Gradients({"g": ((3,), "float32")}, average="yes"),
        lambda: bps.push_pull(ONE, TEXT), lambda: bps.push_pull_inplace(ONE, average=None),
        lambda: bpsfast.push_pull_rows([0], np.ones((1, 2)), 4, average="yes"),
        lambda: bpsfast.push_pull_rows([9], np.ones((1, 2)), 4), lambda: bpsfast.broadcast(np.ones(2), "0"),
        lambda: bpsfast.broadcast(np.ones(2), 0.5),
    ], lambda: (bpsfast.push_pull(np.ones(3), average=False).tolist() == [2, 2, 2]
                and bps.push_pull(ONE).tolist() == [1.0] * 6 and bpsfast.broadcast(np.ones(2), 0).sum() == 2
                and bpsfast.push_pull_rows([0], np.ones((1, 2)), 4)[1].tolist() == [[1, 1]])),
}


def wrapped(**arguments):
    p = torch.nn.Parameter(torch.ones(2))
    return hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), **arguments)


def fails_on(rank, name):
    """Return the numbers of the calls that do not fail on *rank*, and whether all ranks' calls match afterwards."""
    bad, good = OPERATIONS[name]
    wrong = []
    for number, call in enumerate(bad if hvd.rank() == rank else []):
        try:
            call()
            wrong.append(number)
        except ValueError:
            pass
    return wrong, bool(good()), hvd.allreduce(ONE).tolist() == [1.0] * 6


@pytest.fixture
def pair(shared_job):
    return begun(shared_job(ranks=(2,), start_timeout_s=120, timeout_s=120))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_call_that_one_rank_is_refused_costs_nobody_anything(pair, name):
    for rank in range(2):
        assert pair.run(fails_on, rank, name) == [([], True, True)] * 2


def cannot_be_sent(rank):
    """Only *rank*'s objects cannot be pickled: it raises the reason, and the others raise at once."""
    mine = Unpicklable() if hvd.rank() == rank else 1
    errors = (OverflowError,) if hvd.rank() == rank else (UnsupportedError,)
    found = []
    for call in (lambda: hvd.broadcast_object(mine, rank), lambda: hvd.allgather_object(mine),
                 lambda: bpsfast_object(mine, rank)):
        with pytest.raises(errors, match="too much to say") as caught:
            call()
        found.append(isinstance(caught.value, hvd.HorovodInternalError))
    return found, hvd.broadcast_object(hvd.rank(), rank), bpsfast_object(hvd.rank(), rank)


def bpsfast_object(obj, rank):
    return bps.broadcast_object(obj, rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_hear_of_an_object_that_cannot_be_pickled(pair, rank):
    found = pair.run(cannot_be_sent, rank)
    assert found[rank] == ([False] * 3, rank, rank) and found[1 - rank] == ([True, True, False], rank, rank)


def other_sets():
    """Ranks remove different sets: an error on both, and the sets stay."""
    sets = [hvd.add_process_set([0]), hvd.add_process_set([1])]
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched process sets"):
        hvd.remove_process_set(sets[hvd.rank()])
    mine = hvd.allreduce(ONE, process_set=sets[hvd.rank()]).tolist()
    return mine == [1.0] * 6, [hvd.remove_process_set(each) for each in sets], sets[0].process_set_id


def test_a_set_that_was_not_removed_still_counts(pair):
    assert pair.run(other_sets) == [(True, [True, True], None)] * 2


def integer_and_float():
    """Integers of a group have the gradient None, the other tensors have gradients."""
    x = torch.ones(3, requires_grad=True)
    y, _ = hvd.grouped_allreduce([x, torch.ones(3, dtype=torch.int64)], op=hvd.Sum)
    y.sum().backward()
    z = torch.ones(3, requires_grad=True)
    hvd.grouped_allgather([z, torch.ones(3, dtype=torch.int64)])[0].sum().backward()
    w = torch.ones(2, requires_grad=True)
    hvd.grouped_reducescatter([w, torch.ones(2, dtype=torch.int64)])[0].sum().backward()
    m = torch.ones(2, requires_grad=True)
    hvd.grouped_allreduce([m, torch.ones(2, dtype=torch.int64)], op=hvd.Max)[0].sum().backward()
    return [each.grad.tolist() for each in (x, z, w, m)]


def test_a_group_of_integers_and_others_has_the_gradients_of_the_others(pair):
    assert pair.run(integer_and_float) == [[[2.0] * 3, [1.0] * 3, [1.0] * 2, [1.0] * 2]] * 2


def averages_of_integers():
    """Averages are truncated towards zero exactly; a product with 1 / size would not be exact (49 / 49 = 0.99...)."""
    found = []
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        mine = torch.tensor([-3, 3, -4, 7], dtype=dtype) if hvd.rank() else torch.zeros(4, dtype=dtype)
        found.append(hvd.allreduce(mine).tolist() == [-1, 1, -2, 3])
        found.append(hvd.reducescatter(mine).tolist() == ([-2, 3] if hvd.rank() else [-1, 1]))
        found.append(hvd.grouped_allreduce([mine, mine.clone()])[1].tolist() == [-1, 1, -2, 3])
    large = torch.tensor([2**53 + 3]) if hvd.rank() else torch.tensor([2**53 + 1])
    found.append(hvd.allreduce(large).item() == 2**53 + 2)
    unsigned = torch.tensor([7], dtype=torch.uint8)
    return [*found, hvd.allreduce(unsigned * hvd.rank()).item() == 3]


def test_averages_of_integers_are_cut_off_towards_zero(pair):
    assert all(all(found) for found in pair.run(averages_of_integers))
