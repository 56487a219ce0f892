"""Process sets: operations of some ranks, in any order, while others of all ranks are under way."""
from __future__ import annotations

import threading

import pytest
import torch

import bpsfast.hvd as hvd
from bpsfast.hvd import runtime
from bpsfast.orchestration.errors import StallError
from bpsfast.trainer import process
from tests.support.hvd_ranks import begun, of_shapes

pytestmark = pytest.mark.matrix

ranks = of_shapes((2,), (3,), (4,), (2, 2))


def every_operation():
    """Even and odd ranks reduce at the same time, in opposite orders, while an operation of all ranks is under way."""
    wrong = []
    everybody = hvd.allreduce_async(torch.ones(1), name="everybody", op=hvd.Sum) if hvd.rank() == 0 else None
    sets = [hvd.add_process_set(range(start, hvd.size(), 2)) for start in (0, 1)]
    mine, other = sets[hvd.rank() % 2], sets[1 - hvd.rank() % 2]
    me, n = mine.rank(), mine.size()
    if not mine.included() or other.included() or mine.ranks[me] != hvd.rank() or n != len(mine.ranks):
        wrong.append("membership")
    with pytest.raises(ValueError, match="Process is not part of provided process set"):
        other.rank()
    with pytest.raises(ValueError, match=f"Allgather: Rank {hvd.rank()} is not a member of the"):
        hvd.allgather(torch.ones(1), process_set=other)
    with pytest.raises(ValueError, match="broadcast received invalid root rank"):
        hvd.broadcast(torch.ones(1), other.ranks[0], process_set=mine)
    steps = [
        lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum, name="x", process_set=mine).tolist() == [n, n],
        lambda: hvd.allreduce(torch.tensor(float(hvd.rank())), name="m", process_set=mine) == sum(mine.ranks) / n,
        lambda: hvd.allgather(torch.tensor([hvd.rank()]), name="g", process_set=mine).tolist() == mine.ranks,
        lambda: hvd.broadcast(torch.tensor(hvd.rank()), mine.ranks[-1], name="b", process_set=mine) == mine.ranks[-1],
        lambda: hvd.alltoall(torch.full((n,), hvd.rank()), name="a", process_set=mine).tolist() == mine.ranks,
        lambda: hvd.reducescatter(torch.ones(n), op=hvd.Sum, name="r", process_set=mine).tolist() == [n],
        lambda: hvd.broadcast_object(hvd.rank(), mine.ranks[0], "o", mine) == mine.ranks[0],
        lambda: hvd.allgather_object(hvd.rank(), "q", mine) == mine.ranks,
        lambda: hvd.barrier(mine) is None,
    ]
    for i, step in enumerate(steps if hvd.rank() % 2 else steps[::-1]):
        if not step():
            wrong.append(f"step {i} of rank {hvd.rank()}")
    everybody = everybody or hvd.allreduce_async(torch.ones(1), name="everybody", op=hvd.Sum)
    if hvd.synchronize(everybody).item() != hvd.size():
        wrong.append("everybody")
    for each in sets:
        hvd.remove_process_set(each)
    return wrong


def test_every_operation_of_a_set(ranks):
    assert ranks.run(every_operation) == [[]] * ranks.size


def life():
    wrong = []
    new = hvd.ProcessSet([hvd.size() - 1, 0])
    if new.ranks != [0, hvd.size() - 1] or new.size() is not None or new.rank() is not None:
        wrong.append("before it counts")
    with pytest.raises(ValueError, match="Barrier: Process set provided does not exist, or has not"):
        hvd.barrier(new)
    if hvd.size() > 2:
        if hvd.add_process_set(new) is not new or new.process_set_id < 1:
            wrong.append("added")
        with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
            hvd.add_process_set([0, hvd.size() - 1])
        number = new.process_set_id
        if not hvd.remove_process_set(new) or new.process_set_id is not None or hvd.remove_process_set(new):
            wrong.append("removed")
        if hvd.add_process_set(new).process_set_id == number:
            wrong.append("the number came again")
        hvd.remove_process_set(new)
    with pytest.raises(ValueError, match="duplicate"):
        hvd.add_process_set(range(hvd.size()))
    for ranks in ([], [0, 0], [hvd.size()], [-1]):
        with pytest.raises(ValueError, match="cannot be"):
            hvd.add_process_set(ranks)
    with pytest.raises(ValueError, match="list of process ranks"):
        hvd.ProcessSet(["a"])
    with pytest.raises(ValueError, match="MPI"):
        hvd.ProcessSet(7)
    if hvd.remove_process_set(hvd.global_process_set) or hvd.global_process_set.process_set_id != 0:
        wrong.append("the global set")
    if hvd.global_process_set.ranks != list(range(hvd.size())) or hvd.global_process_set.rank() != hvd.rank():
        wrong.append("what the global set knows")
    return wrong


def test_a_sets_life(ranks):
    assert ranks.run(life) == [[]] * ranks.size


def different_sets():
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched process sets: One rank named ranks"):
        hvd.add_process_set([0] if hvd.rank() else [1])
    return hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item()


def test_ranks_that_name_different_sets_are_told_so(ranks):
    assert ranks.run(different_sets) == [ranks.size] * ranks.size


def given_to_init():
    before = threading.active_count()
    first, second = hvd.ProcessSet([0]), hvd.ProcessSet([1])
    hvd.init(process_sets=[first, second])
    sums = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=(first, second)[hvd.rank()]).item()
    hvd.shutdown()
    with pytest.raises(ValueError, match="process_sets entry number 1 is a duplicate"):
        hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])
    again = hvd.is_initialized()
    hvd.init(process_sets="dynamic")
    numbers = hvd.add_process_set([1]).process_set_id
    hvd.shutdown()
    return first.process_set_id, second.process_set_id, sums, again, numbers, threading.active_count() - before


def test_sets_can_be_given_to_init(job):
    assert job(ranks=(2,)).run(given_to_init) == [(1, 2, 1.0, False, 1, 0)] * 2


def meet_and_look():
    new = hvd.add_process_set([0, 1])
    session, title = process.current(), f"hvd.{runtime.current()._begun}.{new.process_set_id}:"
    if hvd.rank() == 0:  # behind its own withdrawal
        with pytest.raises(StallError, match="has not published it"):
            session.key_values.lookup(title, 0.2, "nobody")
    return hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=new).item() if new.included() else 2.0


def test_the_notice_by_which_a_set_has_met_is_taken_back(job):
    own = begun(job(ranks=(2, 1)))
    assert own.run(meet_and_look) == [2.0] * 3
