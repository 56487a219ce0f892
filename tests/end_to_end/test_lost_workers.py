"""A rank, or a machine with ranks, is lost in the middle of training: the others finish the step, and go on."""
from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import bpsfast
from bpsfast.base.exit_codes import LEFT_BEHIND
from tests.support.lossy_training import say_step, train_without_lost, until_step

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(120)]

#: Ranks of each machine, as the job has them.
MACHINES = {(4,): ((0, 1, 2, 3),), (1, 1, 1): ((0,), (1,), (2,)), (2, 2): ((0, 1), (2, 3)),
            (1, 1, 1, 1): ((0,), (1,), (2,), (3,)), (2, 1): ((0, 1), (2,))}


def continuing(job, shape, **values):
    return job(shape, on_worker_loss="continue", partition_bytes=65536, **values)


def require_equal(outcomes, lost: set[int], size: int) -> None:
    """Fail unless the remaining ranks have right averages, the same ones, and the last are those without *lost*."""
    assert [each.text or each.value[0] for each in outcomes] == [[]] * len(outcomes)
    assert len({(tuple(each.value[1]), each.value[2]) for each in outcomes}) == 1, "all ranks have the same"
    named = outcomes[0].value[1]
    assert named[-1] == tuple(rank for rank in range(size) if rank not in lost), "at the end all averages are without"
    assert all(set(after) <= set(before) for before, after in zip(named, named[6:])), "nobody comes back"


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_that_is_killed_costs_nothing_but_its_input(job, tmp_path, shape, transport):
    """On a machine with others: its node goes on with these."""
    path = tmp_path / "step"
    started = continuing(job, shape, transport=transport)
    started.begin(train_without_lost, MACHINES[shape], 0, 60, str(path))
    until_step(path, 20)
    started.lose_ranks(1)
    require_equal(started.outcomes(60), {1}, 4)
    assert started.call("size") == [3] * 3 and started.call("members") == [(0, 2, 3)] * 3
    assert started.call("rank") == [0, 2, 3], "a rank keeps its number"


@pytest.mark.parametrize("at", [0, 1, 7])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 1, 1, 1)], ids=str)
def test_a_rank_ends_itself_between_two_of_its_pushes(job, shape, at):
    """So some of what it has pushed in that step is summed with it, and the rest without: never a part of a tensor."""
    started = continuing(job, shape, transport="tcp")
    started.begin(train_without_lost, MACHINES[shape], 0, 12, "", (2, at))
    started.lost.add(2)
    if shape == (1, 1, 1, 1):
        node = started.daemons.pop("node 2")
    require_equal(started.outcomes(60), {2}, 4)
    if shape == (1, 1, 1, 1):
        assert node.wait(20) == LEFT_BEHIND


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize(("shape", "helpers", "placement"), [((1, 1, 1), 0, "optimal"), ((1, 1, 1), 1, "optimal"),
                                                             ((1, 1, 1), 1, "ps"), ((2, 1), 0, "optimal")], ids=str)
def test_a_machine_is_lost_with_its_node(job, tmp_path, shape, helpers, placement, transport):
    path, size = tmp_path / "step", sum(shape)
    started = continuing(job, shape, transport=transport, helpers=helpers, placement=placement)
    started.begin(train_without_lost, MACHINES[shape], 0, 60, str(path))
    until_step(path, 20)
    last = len(shape) - 1
    started.lose_ranks(*MACHINES[shape][last])
    started.lose(f"node {last}")
    require_equal(started.outcomes(60), set(MACHINES[shape][last]), size)


def test_the_first_of_two_machines_is_lost(job, tmp_path):
    """The second one alone is no majority: it goes on once the process of the first is proven dead."""
    started = continuing(job, (1, 1), transport="tcp")
    started.begin(train_without_lost, ((0,), (1,)), 0, 60)
    started.lose_ranks(0)
    started.lose("node 0")
    require_equal(started.outcomes(60), {0}, 2)


def test_a_node_that_is_killed_takes_its_ranks_along(job, tmp_path):
    path = tmp_path / "step"
    started = continuing(job, (1, 1, 1), transport="tcp")
    started.begin(train_without_lost, MACHINES[1, 1, 1], 0, 60, str(path))
    until_step(path, 20)
    started.lose("node 1")
    (alone,) = started.outcomes(60, only=(1,))
    assert alone.error == "PeerLostError"
    started.lost.add(1)
    require_equal(started.outcomes(60), {1}, 3)


def test_a_machine_that_is_stopped_is_lost_after_its_lease(job, tmp_path):
    path = tmp_path / "step"
    started = continuing(job, (1, 1, 1), transport="tcp", lease_s=2.0, heartbeat_s=0.5)
    started.begin(train_without_lost, MACHINES[1, 1, 1], 0, 40, str(path))
    until_step(path, 12)
    started.lost.add(2)
    node = started.daemons.pop("node 2")
    node.send_signal(signal.SIGSTOP)
    require_equal(started.outcomes(60), {2}, 3)
    node.send_signal(signal.SIGCONT)
    assert node.wait(20) == LEFT_BEHIND
    (outcome,) = started.outcomes(20, only=(2,))
    assert outcome.error == "PeerLostError", "its rank hears of it"


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_two_are_lost_one_after_the_other_and_then_a_helper(job, tmp_path, transport):
    path = tmp_path / "step"
    started = continuing(job, (2, 2), transport=transport, helpers=1)
    started.begin(train_without_lost, MACHINES[2, 2], 0, 80, str(path))
    until_step(path, 15)
    started.lose_ranks(3)
    until_step(path, 30)
    started.lose_ranks(1)
    until_step(path, 45)
    started.lose("helper 0")
    require_equal(started.outcomes(60), {1, 3}, 4)
    losses = started.call("losses")
    assert losses[0] == losses[1] or [each.ranks for each in losses[0]] == [(3,), (1,)]
    assert [each.members for each in losses[0]] == [(0, 1, 2), (0, 2)]


def test_two_ranks_and_a_helper_are_lost_at_once(job, tmp_path):
    path = tmp_path / "step"
    started = continuing(job, (2, 1, 1), transport="tcp", helpers=1, placement="ps")
    started.begin(train_without_lost, ((0, 1), (2,), (3,)), 0, 60, str(path))
    until_step(path, 15)
    started.lose_ranks(0, 3)
    started.lose("node 2", "helper 0")
    require_equal(started.outcomes(60), {0, 3}, 4)


def test_rank_0_is_lost_and_new_tensors_are_declared(job):
    """Rank 0 gives the order of what it declares; the next one does in its place."""
    started = continuing(job, (2, 1), transport="tcp")
    started.begin(declare_and_push, 40)
    started.lose_ranks(0)
    assert [each.text or each.value for each in started.outcomes(60)] == [[]] * 2


def declare_and_push(n: int) -> list[int]:
    """Push *n* tensors, each of which nobody has seen before; return those whose average is wrong."""
    wrong = []
    for i in range(n):
        found = bpsfast.push_pull(np.full(40_000, bpsfast.rank() + i, np.float32), name=f"t{i}")
        if not (found == np.float32(np.mean(bpsfast.contributors(f"t{i}"))) + i).all():
            wrong.append(i)
    return wrong


def test_barriers_and_waits_for_declarations_go_on(job):
    started = continuing(job, (2, 1))
    started.begin(enter_barrier, only=(0, 2))
    started.begin(declare_and_push, 3, only=(1,))
    started.lose_ranks(1)
    assert [each.text or each.value for each in started.outcomes(30)] == [True, True]
    started.begin(declare_and_push, 3)
    assert [each.text or each.value for each in started.outcomes(30)] == [[], []]


def enter_barrier() -> bool:
    bpsfast.barrier(20)
    return True


def test_fewer_than_min_workers_end_the_job_in_words(job):
    started = continuing(job, (3,), min_workers=2)
    started.begin(train_without_lost, ((0, 1, 2),), 0, 10_000)
    started.lose_ranks(2)
    deadline = time.monotonic() + 20
    while started.ranks[2].poll() is None:
        assert time.monotonic() < deadline
    started.lose_ranks(1)
    (outcome,) = started.outcomes(30)
    assert outcome.error == "PeerLostError" and "fewer than BPSFAST_MIN_WORKERS = 2" in outcome.text
    started.kill()


def test_collectives_that_need_each_rank_raise(job):
    started = continuing(job, (3,))
    assert started.run(broadcast_from, 1) == [1.0] * 3
    started.lose_ranks(1)
    outcomes = started.attempt(broadcast_from, 1)
    assert {each.error for each in outcomes} == {"PeerLostError"} and "needs rank 1, which is lost" in outcomes[0].text


def broadcast_from(root: int) -> float:
    bpsfast.push_pull(np.ones(3, np.float32), name="before")
    return float(bpsfast.broadcast(np.full(3, bpsfast.rank(), np.float32), root)[0])


def test_what_cannot_go_on_is_refused_when_it_is_declared(job):
    started = continuing(job, (2,))
    for kind, words in (("onebit", "is compressed"), ("async", "is kept by its owners")):
        outcomes = started.attempt(declare_kind, kind)
        assert {each.error for each in outcomes} == {"UnsupportedError"}
        assert all(words in each.text and "BPSFAST_ON_WORKER_LOSS" in each.text for each in outcomes)
    assert started.run(declare_kind, "plain") == ["done"] * 2


def declare_kind(kind: str) -> str:
    if kind == "async":
        bpsfast.AsyncWeights({"w": np.zeros(4, np.float32)})
    compression = bpsfast.compression.onebit() if kind == "onebit" else None
    bpsfast.push_pull(np.ones(1 << 20, np.float32), name=f"of {kind}", compression=compression)
    return "done"


def test_a_callback_hears_of_a_loss_before_the_first_sum_without_the_rank(job, tmp_path):
    path = tmp_path / "step"
    started = continuing(job, (3,))
    started.begin(sums_with_callback, str(path))
    until_step(path, 5)
    started.lose_ranks(2)
    os.kill(started.ranks[1].pid, signal.SIGSTOP)  # in its wait, which may be over: it hears of the loss later
    until_lost(path)
    os.kill(started.ranks[1].pid, signal.SIGCONT)
    for outcome in started.outcomes(30):
        (ranks, members, first_rounds, size, step), first = outcome.value
        assert ranks == (2,) and members == (0, 1) and size == 2
        assert first == first_rounds["c"], "the first sum without rank 2 is the one that the callback has named"
        assert step == first, "and the callback was called when that was waited for, on all ranks"


def until_lost(path, timeout_s: float = 0.3) -> None:
    """Wait until rank 0 makes no steps any more, or has made the first without rank 2."""
    deadline = time.monotonic() + timeout_s
    before = path.read_text()
    while time.monotonic() < deadline:
        if path.read_text() != before:
            before, deadline = path.read_text(), time.monotonic() + timeout_s


def sums_with_callback(path: str):
    found, first, step = [], 0, 0
    bpsfast.on_ranks_lost(
        lambda loss: found.append((loss.ranks, loss.members, loss.first_rounds, bpsfast.size(), step)))
    while not first:
        step += 1
        say_step(path, step)
        total = bpsfast.push_pull(np.ones(4, np.float32), name="c", average=False)[0]
        assert total == len(bpsfast.contributors("c"))
        if total == 2:
            assert found, "the callback comes first"
            first = step
    return found[0], first
