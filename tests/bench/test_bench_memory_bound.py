"""Memory bound: how often bytes pass memory, and that its sums and exchanges move all of them."""
from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bpsfast.bench.harness import memory_bound
from bpsfast.orchestration.placement.partition import CACHED_NBYTES
from bpsfast.pyx.pages import Segment


def test_streams():
    assert memory_bound.streams("numpy", 2, 64 << 20) == 3
    assert memory_bound.streams("torch", 2, 1 << 20) == 11
    assert memory_bound.streams("torch", 2, 64 << 20) == memory_bound.streams("torch", 2, 4 << 20) == 6
    assert memory_bound.streams("in place", 2, 64 << 20) == 4


@pytest.fixture
def memories():
    def make(size, kind, nbytes, past):
        """Return the memory of *size* ranks, as if each had a separate process, and their operations."""
        ranks = [memory_bound.RankMemory(rank, size) for rank in range(size)]
        found = [kind(each, nbytes, past) for each in ranks]
        assert len({each.n_shared for each in found}) == 1
        shared = np.frombuffer(Segment(4 * found[0].n_shared), np.float32)
        for each in ranks:
            each.private = np.zeros(nbytes // 4, np.float32)
            each.lay_out(shared)
        return ranks, found

    return make


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize(("size", "nbytes"), [(1, 4096), (2, 4), (2, 1 << 20), (3, 100_004), (2, 16 << 20)])
def test_ranks_sum_all_of_it_together_and_another_share_each_time(memories, size, nbytes, past):
    _, sums = memories(size, memory_bound.Sums, nbytes, past)
    rng = np.random.default_rng(1)
    for each in sums[0].inputs:
        each[:] = rng.integers(-1000, 1000, each.size)
    written = set()
    for _ in range(2 * size):
        with ThreadPoolExecutor(size) as ranks:
            list(ranks.map(lambda each: each.run(), sums))
        both = sums[0].results
        written |= {parity for parity in (0, 1) if both[parity].any()}
        np.testing.assert_array_equal(both[0] + both[1], sum(sums[0].inputs))
        for each in both:
            each[:] = 0
    assert written == {0, 1}
    assert size == 1 or all(each.share(1) != each.share(2) for each in sums)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("nbytes", [4, 100_004, 3 << 20, 16 << 20])
def test_all_of_what_is_private_goes_through_shared_memory(memories, nbytes, past):
    for size in (1, 2, 3):
        ranks, exchanges = memories(size, memory_bound.StagedSums, nbytes, past)
        values = np.arange(1, nbytes // 4 + 1) % 9973
        for parity in (0, 1):
            for rank, (each, exchange) in enumerate(zip(ranks, exchanges)):
                each.private[:] = values if rank == 0 else 0
                exchange.run()  # one after another, so only a rank's own share is right
            for rank, exchange in enumerate(exchanges):
                result = exchange.result(parity)
                for begin in range(0, values.size, CACHED_NBYTES // 4):
                    piece = values[begin:begin + CACHED_NBYTES // 4]
                    own = slice(piece.size * rank // size, piece.size * (rank + 1) // size)
                    if rank == 0 or not memory_bound.is_worth(-(-nbytes // CACHED_NBYTES), size):
                        np.testing.assert_array_equal(result[begin:begin + piece.size][own], piece[own])
            np.testing.assert_array_equal(ranks[-1].private, exchanges[-1].result(parity))
        assert exchanges[0].n_shared >= 2 * values.size


@pytest.mark.parametrize(("kind", "last"), [(memory_bound.Sums, "kernel"), (memory_bound.StagedSums, "copy")])
def test_what_is_stored_last_goes_past_the_caches_if_asked(memories, monkeypatch, kind, last):
    past = {False: set(), True: set()}
    for asked in past:
        _, [found] = memories(1, kind, 1 << 20, asked)
        found._sum = lambda *call, asked=asked: last == "kernel" and past[asked].add(bool(call[-1]))
        monkeypatch.setattr(memory_bound, "copy", lambda *call, asked=asked: last == "copy" and past[asked].add(
            call[3] <= call[2]))
        found.run()
    assert past == {False: {False}, True: {True} if last == "kernel" else {False, True}}


def test_operations_go_to_where_memory_has_moved():
    ranks = [memory_bound.RankMemory(0, 1)]
    sums, exchange = memory_bound.Sums(ranks[0], 4096, False), memory_bound.StagedSums(ranks[0], 4096, False)
    for value in (1.0, 2.0):  # each turn uses other memory
        ranks[0].private = np.full(1024, value, np.float32)
        ranks[0].lay_out(np.zeros(exchange.n_shared, np.float32))
        exchange.run()
        assert ranks[0].shared.max() == value and (ranks[0].private == value).all()
        ranks[0].lay_out(np.zeros(sums.n_shared, np.float32))
        sums.inputs[0][:] = value
        sums.run()
        assert max(each.max() for each in sums.results) == value


def grow():
    import bpsfast

    memories = memory_bound.RankMemory(bpsfast.rank(), bpsfast.size())
    small = memories.operation("memory of torch", 8)
    sums = memories.operation("memory of numpy", 64 << 10)
    exchange = memories.operation("memory of torch, past caches", 1 << 20)
    for each in (small, sums, exchange, small, sums):
        each.fill(True)
        each.run()
    bpsfast.barrier()
    memories.shared[bpsfast.rank()] = bpsfast.rank() + 1
    bpsfast.barrier()
    return memories.shared[:2].tolist(), memories.shared.nbytes, memories.private.nbytes


def fail_to_map(rank):
    import bpsfast

    def refuse(*arguments, **values):
        raise OSError(errno.EACCES, "no rights")

    if bpsfast.rank() == rank:
        memory_bound.Segment = memory_bound._attach = refuse
    memory_bound.RankMemory(bpsfast.rank(), bpsfast.size()).operation("memory of numpy", 64 << 10)


def test_ranks_share_memory_and_let_it_grow(two):
    first, second = two.run(grow)
    assert first == second == ([1.0, 2.0], 4 << 20, 1 << 20)


@pytest.mark.parametrize(("rank", "n_mapped"), [(0, 0), (1, 1)])
def test_all_ranks_hear_that_one_has_no_memory(job, rank, n_mapped):
    outcomes = job((2,)).attempt(fail_to_map, rank)
    assert [outcome.error for outcome in outcomes] == ["CapacityError"] * 2
    assert all(f"{n_mapped} of 2 ranks have mapped the 262144 bytes of rank 0" in outcome.text for outcome in outcomes)
    assert all(f"rank {rank}: Permission denied" in outcome.text for outcome in outcomes)


def test_what_cannot_be_mapped_leaves_no_descriptor():
    ends = os.pipe()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="mmap"):
        memory_bound._attach(os.getpid(), ends[0])
    assert os.listdir("/proc/self/fd") == before
    for end in ends:
        os.close(end)
