"""ElasticSampler uses every sample once in an epoch, however the number of ranks changes."""
from __future__ import annotations

import copy
import tracemalloc
import types
from array import array

import pytest
from hypothesis import given, strategies as st

pytest.importorskip("torch")

from bpsfast.torch import elastic
from bpsfast.torch.elastic import ElasticSampler


@pytest.fixture
def in_job(monkeypatch):
    """Make samplers see rank *rank* of *size*."""
    return lambda rank, size: see(monkeypatch, rank, size)


def see(patch, rank, size, members=None):
    """Make samplers see rank *rank* of *size*, of which *members* are not lost (None: all)."""
    membership = types.SimpleNamespace(members=tuple(range(size)) if members is None else members)
    found = types.SimpleNamespace(rank=rank, size=size, membership=membership)
    patch.setattr(elastic.process, "session", lambda: found)


def ranks_of(n, size, in_job, state=None, **options):
    found = []
    for rank in range(size):
        in_job(rank, size)
        found.append(ElasticSampler(range(n), **options))
        if state is not None:
            found[-1].load_state_dict(state)
    return found


@given(n=st.integers(1, 60), seed=st.integers(0, 5),
       jobs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4))
def test_nothing_is_used_twice_or_left_out(n, seed, jobs):
    """Use some batches in jobs of different sizes; then the last job finishes the epoch."""
    with pytest.MonkeyPatch.context() as patch:
        def in_job(rank, size):
            see(patch, rank, size)

        state, used = None, []
        for number, (size, batch_size, n_batches) in enumerate(jobs):
            ranks = ranks_of(n, size, in_job, state, seed=seed)
            assert len({len(sampler) for sampler in ranks}) == 1
            if number == len(jobs) - 1:
                n_batches = -(-len(ranks[0]) // batch_size)
            for batch in range(min(n_batches, -(-len(ranks[0]) // batch_size))):
                for sampler in ranks:
                    used += list(sampler)[batch * batch_size : (batch + 1) * batch_size]
                    sampler.record_batch(batch, batch_size)
            states = [sampler.state_dict() for sampler in ranks]
            assert all(each == states[0] for each in states)
            state = states[0]
            assert state["n_processed"] == len(set(used))
            assert all(sorted(set(used)) == sampler.processed_indices for sampler in ranks)
        assert set(used) == set(range(n)) and len(used) - n < max(size for size, _, _ in jobs), "only to fill up"


LOSSES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=3)


@given(n=st.integers(1, 80), seed=st.integers(0, 5), batch_size=st.integers(1, 4), every=st.integers(1, 3),
       jobs=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), LOSSES), max_size=4))
def test_what_lost_ranks_had_to_use_is_used_in_the_next_job(n, seed, batch_size, every, jobs):
    """In each job ranks are lost before some batch, and the others go on; the last job loses none and ends the epoch.

    Every *every*-th batch is recorded, and each one before a loss.
    """
    with pytest.MonkeyPatch.context() as patch:
        state, used = None, []
        for size, n_batches, losses in [*jobs, (2, 1000, [])]:
            ranks = ranks_of(n, size, lambda rank, size: see(patch, rank, size), state, seed=seed)
            members = list(range(size))
            n_batches = min(n_batches, -(-len(ranks[0]) // batch_size))
            for batch in range(n_batches):
                for before, rank in losses:
                    if before == batch and rank in members and len(members) > 1:
                        members.remove(rank)
                        see(patch, 0, size, tuple(members))
                for rank in members:
                    used += list(ranks[rank])[batch * batch_size:(batch + 1) * batch_size]
                losing = any(before == batch + 1 for before, _ in losses)
                if batch % every == every - 1 or losing or batch == n_batches - 1:
                    for rank in members:
                        ranks[rank].record_batch(batch, batch_size)
            states = [ranks[rank].state_dict() for rank in members]
            assert all(each == states[0] for each in states)
            state = states[0]
            assert set(ranks[members[0]].processed_indices) <= set(used)
        assert set(used) == set(range(n))
        assert len(used) - n <= 2 * sum(size - 1 for size, _, _ in [*jobs, (2, 0, [])]), "only to fill up"


def test_epochs_are_shuffled_alike_on_all_ranks_and_one_by_one(in_job):
    first, second = ranks_of(10, 2, in_job, seed=3)
    orders = []
    for epoch in (0, 1):
        for sampler in (first, second):
            sampler.set_epoch(epoch)
            assert sampler.epoch == epoch and sampler.processed_indices == []
            sampler.record_batch(0, 2)
        orders.append([first._order, second._order])
    assert orders[0][0] == orders[0][1] != orders[1][0]
    assert second.state_dict() == {"epoch": 1, "n_processed": 4, "skipped": array("q")}
    plain = ElasticSampler(range(4), shuffle=False)
    assert plain._order == [0, 1, 2, 3]


def test_a_step_costs_nothing_however_long_the_epoch_is(in_job):
    sampler, = ranks_of(200_000, 1, in_job)
    sampler.record_batch(90, 1000)
    tracemalloc.start()
    try:
        for batch in range(91, 150):
            sampler.record_batch(batch, 1000)
            kept = copy.deepcopy(sampler.state_dict())
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()
    assert kept == {"epoch": 0, "n_processed": 150_000, "skipped": array("q")}
    assert len(sampler.processed_indices) == 150_000
