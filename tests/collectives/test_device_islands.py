"""Islands in real jobs, whose ranks' devices are the host: the same sums whoever adds first, in whatever order."""
from __future__ import annotations

import numpy as np
import pytest

import bpsfast
from bpsfast.collectives import islands
from bpsfast.collectives.island_routes import IslandRoutes, Route
from bpsfast.orchestration.errors import BpsError
from bpsfast.trainer import process

pytestmark = pytest.mark.matrix
#: Ranks of the nodes, helpers, what is forced, and the islands that follow.
WAYS = [
    pytest.param((2,), 0, {}, [(0, 1)], id="best"),
    pytest.param((4,), 0, {"pcie_switch_size": 2}, [(0, 1), (2, 3)], id="switches"),
    pytest.param((3,), 0, {"reduce_roots": "1"}, [(0, 1, 2)], id="one root"),
    pytest.param((2, 2), 1, {"reduce_roots": "0,1", "transport": "tcp"}, [(0, 1), (2, 3)], id="two machines"),
    pytest.param((2, 1), 0, {"reduce_roots": "0", "transport": "tcp"}, [(0, 1)], id="one alone"),
]


def start(job, ranks, helpers=0, **values):
    return job(ranks=ranks, helpers=helpers, **{"host_device": True, "islands": "auto", "timeout_s": 20} | values)


def inputs(rank, i, n, dtype):
    return (np.arange(n) % 97 * (rank + 1) + i).astype(dtype)


def sum_and_count(n_rounds):
    """Exact sums of several sizes and dtypes; return the islands, and digests of all results."""
    rank, size, digests = bpsfast.rank(), bpsfast.size(), []
    for i in range(n_rounds):
        for n, dtype in [(1_500_001, np.float32), (7, np.float64), (3000, np.int64), (0, np.float32)]:
            x = inputs(rank, i, n, dtype)
            before = x.copy()
            y = bpsfast.push_pull(x, average=False, name=f"{n} {np.dtype(dtype)}")
            np.testing.assert_array_equal(y, sum(inputs(other, i, n, dtype) for other in range(size)))
            np.testing.assert_array_equal(x, before)
            digests.append(y.tobytes()[:4096])
            bpsfast.push_pull(x, name=f"in place {n} {np.dtype(dtype)}", out=x)
            digests.append(x.tobytes()[:4096])
    islands = process.current().devices._islands
    return islands._routes.islands(), digests


@pytest.mark.parametrize(("ranks", "helpers", "values", "expected"), WAYS)
def test_sums_are_those_of_all_ranks(job, ranks, helpers, values, expected):
    found = start(job, ranks, helpers, **values).run(sum_and_count, 3)
    assert sorted({island for islands, _ in found for island in islands}) == expected
    assert all(digests == found[0][1] for _, digests in found)


def push_in_an_order_of_its_own(n):
    rank, size = bpsfast.rank(), bpsfast.size()
    order = np.random.default_rng(rank).permutation(n)
    handles = {k: bpsfast.push_pull_async(np.full(100_000 + k, rank + k, np.float64), average=False, name=f"t{k}")
               for k in order}
    for k, handle in handles.items():
        assert (handle.wait() == sum(other + k for other in range(size))).all()


def wait_for_one_before_the_other():
    """Rank 0 pushes a and b, then waits; rank 1 pushes b, waits for it, and only then pushes a."""
    names = ["a", "b"] if bpsfast.rank() == 0 else ["b"]
    handles = [bpsfast.push_pull_async(np.ones(10_000, np.float32), average=False, name=name) for name in names]
    assert handles[-1].wait()[0] == 2
    if bpsfast.rank() == 1:
        handles.append(bpsfast.push_pull_async(np.ones(10_000, np.float32), average=False, name="a"))
    return [float(handle.wait()[0]) for handle in handles]


def test_ranks_may_push_in_different_orders(job):
    ranks = start(job, (3,), reduce_roots="0,1,2")
    ranks.run(push_in_an_order_of_its_own, 12)
    ranks.run(push_in_an_order_of_its_own, 12)


def test_who_waits_for_one_before_he_pushes_another_keeps_nobody(job):
    assert start(job, (2,)).run(wait_for_one_before_the_other) == [[2.0, 2.0], [2.0, 2.0]]


def step_with_gaps():
    """Gradients of which one is missing on rank 1, small ones that are fused, and one of several partitions."""
    rank = bpsfast.rank()
    shapes = {"big": ((1_500_000,), "float32"), "small": ((10,), "float32"), "rare": ((20,), "float32")}
    gradients = bpsfast.Gradients(shapes, device="host")
    for step in range(1, 4):
        for name in reversed(list(shapes)):
            if name != "rare" or rank == 0:
                gradients[name][...] = step * (rank + 1)
                gradients.ready(name)
        gradients.zero_missing()
        gradients.step()
        assert (gradients.wait("big") == 1.5 * step).all() and (gradients.wait("small") == 1.5 * step).all()
        assert (gradients.wait("rare") == 0.5 * step).all()


def test_gradients_with_gaps(job):
    start(job, (2,)).run(step_with_gaps)


def one_on_the_cpu():
    x = np.ones(1000, np.float32)
    if bpsfast.rank() == 0:
        memory = bpsfast.empty(1000)
        memory[...] = x
        x = memory
    return bpsfast.push_pull(x, name="x")


def test_a_tensor_that_is_on_a_device_on_some_ranks_only_is_refused(job):
    for outcome in start(job, (2,)).attempt(one_on_the_cpu):
        assert outcome.error == "MismatchError" and "islands" in outcome.text


def push():
    return float(bpsfast.push_pull(np.ones(1000, np.float32), name="x")[0])


def test_gpudirect_is_refused_with_the_reason(job):
    for outcome in start(job, (2,), gpu_direct=True).attempt(push):
        assert outcome.error in ("UnsupportedError", "ConfigError") and "BPSFAST_GPU_DIRECT" in outcome.text


def test_a_root_that_is_not_there_is_named_on_all_ranks(job):
    for outcome in start(job, (2,), reduce_roots="5").attempt(push):
        assert outcome.error == "ConfigError" and "no local rank 5" in outcome.text


def push_until_it_fails():
    for i in range(1_000_000):
        try:
            bpsfast.push_pull(np.ones(100_000, np.float32), name=f"{i % 3}")
        except BpsError as exc:
            return type(exc).__name__
    return ""


def push_a_little_and_leave():
    if bpsfast.rank() == 1:
        for i in range(10):
            bpsfast.push_pull(np.ones(100_000, np.float32), name=f"{i % 3}")
        bpsfast.shutdown()
        return "left"
    return push_until_it_fails()


def test_who_is_left_by_a_member_is_told_soon(job):
    ranks = start(job, (2,))
    first, second = ranks.run(push_a_little_and_leave, timeout_s=40)
    assert second == "left" and first in ("ClosedError", "PeerLostError", "StallError")


def test_who_loses_a_member_is_told_soon(job):
    ranks = start(job, (2,))
    ranks.run(sum_and_count, 1)
    ranks.begin(push_until_it_fails)
    ranks.kill_rank(1)
    (outcome,) = ranks.outcomes(40, only=(0,))
    assert outcome.value in ("PeerLostError", "ClosedError")
    ranks.kill()


def sum_over_crossing_islands(n):
    """Half of the partitions go by pairs of neighbours, half by the other pairs: each rank is in two islands."""
    pairs = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    islands.agree = lambda session, device: IslandRoutes(tuple(
        Route(0.5, each, tuple(tuple((rank, 0.5) for rank in island) for island in each)) for each in pairs))
    rank = bpsfast.rank()
    for turn in range(3):
        order = np.random.default_rng(10 * turn + rank).permutation(n)
        handles = {k: bpsfast.push_pull_async(np.full(1_000_000 + k, rank + k, np.float32), average=False, name=f"x{k}")
                   for k in order}
        for k, handle in handles.items():
            assert (handle.wait() == 6 + 4 * k).all()
    return [len(island) for island in process.current().devices._islands._islands]


def test_islands_that_cross_hold_nothing_up(job):
    """Their calls are on streams of their own: on one, ranks would make them in different orders."""
    for sizes in start(job, (4,), partition_bytes=1 << 20).run(sum_over_crossing_islands, 6):
        assert sizes == [2, 2]
