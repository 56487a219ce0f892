"""What the ranks of jobs in the guest run. Imported by the ranks themselves: no pytest, nothing of `tests`."""
from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

import bpsfast

N_WARMUP, N_STEPS = 2, 4
SHAPES = [(1000, 30), (30,), (1 << 18,), (3, 5)]


def train() -> dict[str, Any]:
    """Run on a rank: gradient descent on data of its own; return parameters, and the node's counters over the end."""
    source = np.random.default_rng(bpsfast.rank())
    parameters = [np.zeros(shape, "f4") for shape in SHAPES]
    gradients = [bpsfast.empty(shape, "f4") for shape in SHAPES]  # shared memory: pushed from where they are computed
    before = {}
    for step in range(N_WARMUP + N_STEPS):
        if step == N_WARMUP:
            bpsfast.barrier()
            before = bpsfast.counters()
            bpsfast.barrier()  # nobody pushes before all have looked
        handles = []
        for i, gradient in enumerate(gradients):
            gradient[...] = parameters[i] * np.float32(0.1) + source.standard_normal(SHAPES[i], dtype="f4")
            handles.append(bpsfast.push_pull_async(gradient, name=f"layer {i}"))
        for parameter, handle in zip(parameters, handles):
            parameter -= np.float32(0.01) * np.asarray(bpsfast.synchronize(handle))
    bpsfast.barrier()  # everybody has all results: every write of these steps has arrived
    after = bpsfast.counters()
    return {"parameters": [parameter.tobytes() for parameter in parameters], "before": before, "after": after}


def push_in_other_ways() -> list[bytes]:
    """Run on a rank: push compressed tensors, rows, changes of weights that owners keep; return what came."""
    rank = bpsfast.rank()
    source = np.random.default_rng(rank)
    topk = bpsfast.compression.topk(0.01, error_feedback=True)
    weights = bpsfast.AsyncWeights({"w": np.zeros(300_000, "f4")}, staleness=0)
    found = []
    for step in range(4):
        gradient = source.standard_normal(1 << 18, dtype="f4")
        found.append(bpsfast.push_pull(gradient, name="compressed", compression=topk).tobytes())
        rows = source.integers(0, 1 << 20, 100 + 300 * step)  # more than there is room for at first
        indices, values = bpsfast.push_pull_rows(rows, np.full((len(rows), 8), rank + 1, "f4"), 1 << 20, name="rows",
                                                 max_rows=256)
        found += [indices.tobytes(), values.tobytes()]
        found.append(weights.push_pull("w", np.full(300_000, rank + step, "f4")).tobytes())
        bpsfast.barrier()  # an answer may have another rank's next change
    return found


def push_many_partitions(n: int, partition_nbytes: int) -> list[dict[str, Any]]:
    """Run on a rank: push a little, then *n* partitions at once, and check the sums; return the counters after each."""
    rank, found = bpsfast.rank(), []
    for name, n_partitions in (("few", 2), ("many", n), ("few", 2)):
        pattern = np.arange(n_partitions * partition_nbytes // 4, dtype="f4") % 1000
        for step in range(2):
            total = bpsfast.push_pull(pattern * (step + rank), name=name, average=False)
            assert (total == pattern * (2 * step + 1)).all(), (name, step)
        bpsfast.barrier()
        found.append(bpsfast.counters())
        bpsfast.barrier()
    return found


def push_until_it_fails(n: int) -> str:
    """Run on a rank: push_pull until the job is broken; return the error."""
    array = np.ones(1 << 20, "f4")
    for _ in range(n):
        bpsfast.push_pull(array, name="x")
    return "nothing failed"


def push_across_links(stop: str, timeout_s: float) -> dict[str, Any]:
    """Run on a rank: push_pull and check every sum until the file *stop* is there for all ranks, and some steps more.

    Each step also declares a tensor. Return the number of steps, the kinds of link to the other node and their queue
    pairs in the order in which they were seen, and the counters at the end.
    """
    rank, deadline = bpsfast.rank(), time.monotonic() + timeout_s
    pattern = np.arange(1 << 18, dtype="f4") % 1000
    array, flag = bpsfast.empty(pattern.shape, "f4"), bpsfast.empty((1,), "f4")
    seen: list[tuple[int, int]] = []
    step = n_after = 0
    while n_after < 5:
        array[...] = pattern * (step + rank)
        flag[...] = os.path.exists(stop)
        handles = [bpsfast.push_pull_async(array, name="array"), bpsfast.push_pull_async(flag, name="flag")]
        if step % 8 == 0 and step < 4000:
            handles.append(bpsfast.push_pull_async(np.full(1000, rank + step, "f4"), name=f"new {step}"))
        total, flags, *new = (np.asarray(bpsfast.synchronize(handle)) for handle in handles)
        assert (total == pattern * (2 * step + 1) / 2).all(), f"step {step}"
        assert all((each == step + 0.5).all() for each in new), f"new in step {step}"
        counters = bpsfast.counters()
        state = counters[f"transport_{1 - rank}"], counters.get(f"wire_{1 - rank}_queue_pairs", 0)
        if not seen or seen[-1] != state:
            seen.append(state)
        n_after += flags[0] == 1
        step += 1
        assert time.monotonic() < deadline, f"no end in {step} steps; seen: {seen}"
    bpsfast.barrier()
    return {"steps": step, "seen": seen, "after": bpsfast.counters()}


def push_until_it_goes_by_tcp(timeout_s: float) -> dict[str, Any]:
    """Run on a rank: push_pull and check every sum until both nodes have made a reconnect, and some steps more.

    Return the number of steps, and the node's counters at the end.
    """
    rank, deadline = bpsfast.rank(), time.monotonic() + timeout_s
    pattern = np.arange(1 << 20, dtype="f4") % 1000
    array, flag = bpsfast.empty(pattern.shape, "f4"), bpsfast.empty((1,), "f4")
    step = n_after = 0
    while n_after < 5:
        array[...] = pattern * (step + rank)
        flag[...] = bpsfast.counters()["dispatch_reconnects"]
        handles = [bpsfast.push_pull_async(array, name="array"), bpsfast.push_pull_async(flag, name="flag")]
        total, flags = (np.asarray(bpsfast.synchronize(handle)) for handle in handles)
        assert (total == pattern * (2 * step + 1) / 2).all(), f"step {step}"
        n_after += flags[0] == 1
        step += 1
        assert time.monotonic() < deadline, f"no reconnect in {step} steps"
    bpsfast.barrier()
    return {"steps": step, "after": bpsfast.counters()}
