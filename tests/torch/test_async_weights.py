"""Asynchronous weights on real ranks, against a replay of the recorded order; staleness, state, and lost workers."""
from __future__ import annotations

import itertools
import time

import ml_dtypes
import numpy as np
import pytest

import bpsfast
from bpsfast import trace
from bpsfast.orchestration.store import StoreSpec, workers_of

pytestmark = pytest.mark.matrix

N = 300_000  # two partitions
STEPS = 12
HALF = np.dtype(ml_dtypes.bfloat16)


def weights_of(rank, name):
    return np.random.default_rng([rank, len(name)]).standard_normal(N).astype(np.float32)


def change(rank, step, name):
    return np.random.default_rng([rank, step, len(name), 1]).standard_normal(N).astype(np.float32)


def train(names, options, pauses):
    """Push changes; return by name (first partition, bytes between partitions, the answers)."""
    rank = bpsfast.rank()
    weights = bpsfast.AsyncWeights({name: weights_of(rank, name) for name in names}, root_rank=1, **options)
    found = {name: [weights[name].copy()] for name in weights}
    for step in range(STEPS):
        for name in names:
            weights.push(name, change(rank, step, name))
        for name in names:
            found[name].append(weights.pull(name).copy())
        time.sleep(pauses[rank])  # workers differ
    units = {name: weights._stored[name]._unit for name in names}
    weights.close()
    return {name: (unit.first_part, unit.stride, found[name]) for name, unit in units.items()}


def replay(folder, found, names, workers):
    """Apply the changes in the order that the owners have recorded; return by (name, first rank of worker, round) what
    was answered.
    """
    firsts = {found[worker[0]][name][0]: (name, worker) for name in names for worker in workers}
    kept, answers = {}, {}
    spans = [span for path in folder.glob("node-*.trace.json") for span in trace.read(path).spans]
    for span in sorted((span for span in spans if span.kind in ("apply", "answer")),
                       key=lambda span: (span.begin_ns, span.kind == "answer")):
        first = max(part for part in firsts if part <= span.args["part"])
        (name, worker), number, round_ = firsts[first], span.args["part"] - first, span.args["round"]
        n = found[0][name][1] // 4
        cut = slice(number * n, min((number + 1) * n, N))
        if span.kind == "apply" and round_ == 1:
            kept[name, number] = weights_of(1, name)[cut].copy()
        elif span.kind == "apply":
            kept[name, number] += sum(change(rank, round_ - 2, name)[cut] for rank in worker)
        else:
            answer = answers.setdefault((name, worker[0], round_), np.empty(N, np.float32))
            answer[cut] = kept[name, number]
    return answers


@pytest.mark.parametrize(("shape", "helpers", "transport"), [((2,), 0, "auto"), ((1, 1), 0, "tcp"), ((2, 1), 1, "tcp"),
                                                             ((2, 1), 0, "shm")], ids=str)
@pytest.mark.parametrize("options", [dict(worker="rank"), dict(worker="node", staleness=1)], ids=str)
def test_answers_are_what_a_replay_of_the_recorded_order_gives(job, tmp_path, shape, helpers, transport, options):
    started = job(ranks=shape, helpers=helpers, transport=transport, trace_dir=str(tmp_path))
    names, pauses = ["w", "much longer"], [0.001 * rank for rank in range(started.size)]
    found = started.run(train, names, options, pauses)
    started.close()
    first = np.cumsum([0, *shape])
    nodes = [tuple(range(a, b)) for a, b in itertools.pairwise(first)]
    workers = workers_of(StoreSpec(worker=options["worker"]), (), nodes)
    answers = replay(tmp_path, found, names, workers)
    for worker in workers:
        for rank in worker:
            for name in names:
                for i, answer in enumerate(found[rank][name][2]):
                    np.testing.assert_allclose(answer, answers[name, worker[0], i + 1], rtol=0, atol=1e-6,
                                               err_msg=f"{name}, rank {rank}, round {i + 1}")


def count(n_steps, staleness, pauses, name):
    """Each rank counts its steps in its own element; return the counts in every answer."""
    rank, size = bpsfast.rank(), bpsfast.size()
    weights = bpsfast.AsyncWeights({name: np.zeros(size, np.float64)}, worker="rank", staleness=staleness)
    one, found = np.zeros(size), []
    one[rank] = 1
    for _ in range(n_steps):
        found.append(weights.push_pull(name, one).copy())
        time.sleep(pauses[rank])
    weights.close()
    return found


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_no_answer_is_staler_than_was_asked_for(shared_job, transport, staleness):
    job = shared_job(ranks=(2, 1), transport=transport)
    found = job.run(count, 40, staleness, [0.0, 0.002, 0.0005], f"count {staleness}")
    for rank, answers in enumerate(found):
        for step, answer in enumerate(answers):
            assert answer[rank] == step + 1 and answer.min() >= step + 1 - staleness, (rank, step, answer)
    if staleness == 0:  # and maybe the next change of a faster worker
        assert all(answer.max() <= step + 2 for answers in found for step, answer in enumerate(answers))


def leave_early(name):
    weights = bpsfast.AsyncWeights({name: np.zeros(1, np.float32)}, worker="rank", staleness=1)
    for _ in range(3 if bpsfast.rank() == 2 else 20):
        answer = weights.push_pull(name, np.ones(1, np.float32))
    found = float(answer[0])
    weights.close()
    return found


def test_who_has_closed_holds_nobody_back(shared_job):
    job = shared_job(ranks=(2, 1), transport="tcp")
    assert max(job.run(leave_early, "leaving")) == 43.0


def shut_down_early():
    weights = bpsfast.AsyncWeights({"w": np.zeros(1, np.float32)}, worker="rank", staleness=1)
    for _ in range(2 if bpsfast.rank() == 2 else 12):
        answer = weights.push_pull("w", np.ones(1, np.float32))
    found = float(answer[0])
    if bpsfast.rank() == 2:
        bpsfast.shutdown()
    return found


def test_who_has_shut_down_holds_nobody_back(job):
    assert max(job(ranks=(2, 1), transport="tcp").run(shut_down_early)) == 26.0


def hold_back(name):
    weights = bpsfast.AsyncWeights({name: np.zeros(1, np.float32)}, worker="rank", staleness=2)
    try:
        for _ in range(10 if bpsfast.rank() != 2 else 1):
            weights.push(name, np.ones(1, np.float32))
            weights.pull(name, 4.0)
    finally:
        bpsfast.barrier()


def in_use_and_closed():
    mine = bpsfast.AsyncWeights({"twice": np.ones(5, np.float32)})
    errors = []
    for use in (lambda: bpsfast.AsyncWeights({"twice": np.full(5, 10, np.float32)}), mine.close,
                lambda: mine.pull("twice"), lambda: mine.push("twice", np.ones(5, np.float32)), lambda: mine["twice"]):
        try:
            use()
            bpsfast.barrier()  # nobody closes what another rank has not tried yet
        except bpsfast.BpsError as exc:
            errors.append(f"{type(exc).__name__}: {exc}")
            bpsfast.barrier()
    again = bpsfast.AsyncWeights({"twice": np.full(5, 10, np.float32)})
    found = again["twice"].tolist()
    again.close()
    return errors, found


def test_a_name_is_kept_for_one_at_a_time_and_not_used_after_its_end(shared_job):
    for errors, found in shared_job(ranks=(2, 1), transport="tcp").run(in_use_and_closed):
        assert len(errors) == 4 and "'AsyncParam.twice' is in use in this process" in errors[0], errors
        assert all((error.startswith("ClosedError: ") and "'AsyncParam.twice' was" in error)
                   or "'AsyncParam.twice' were closed" in error for error in errors[1:]), errors
        assert found == [10] * 5


def test_who_is_too_far_behind_is_named(job):
    started = job(ranks=(2, 1), transport="tcp")
    fast, beside, slow = started.attempt(hold_back, "held")
    assert not slow.error
    for outcome in (fast, beside):
        assert outcome.error == "StallError" and "rank 2 (" in outcome.text and "has not pushed" in outcome.text
        assert "rank 0 (" not in outcome.text and "rank 1 (" not in outcome.text
    started.kill()


def save_and_load(name, dtype):
    rank = bpsfast.rank()
    one = np.full(5000, rank + 1).astype(dtype)
    weights = bpsfast.AsyncWeights({name: np.full(5000, 100 + rank).astype(dtype)}, worker="rank")
    for _ in range(3):
        weights.push_pull(name, one)
    state = weights.state()
    before = weights.push_pull(name, one).copy()
    weights.load(state if rank == 0 else {name: np.zeros(5000, dtype)})
    bpsfast.barrier()
    loaded = weights[name].copy()
    bpsfast.barrier()
    weights.close()
    return float(state[name][7]), float(before[7]) > float(state[name][7]), float(loaded[7])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", HALF], ids=str)
def test_all_have_the_same_state_and_go_on_from_the_roots(shared_job, dtype):
    job = shared_job(ranks=(2, 1), transport="tcp")
    assert job.run(save_and_load, f"state {dtype}", dtype) == [(118.0, True, 118.0)] * 3


def small_changes(name):
    """Add 512 changes that float16 would lose, one by one."""
    weights = bpsfast.AsyncWeights({name: np.ones(3, np.float16)}, worker="rank")
    for _ in range(512):
        weights.push_pull(name, np.full(3, 2.0**-12, np.float16))
    return float(weights.state()[name][0])


def test_halves_are_kept_with_more_precision(shared_job):
    job = shared_job(ranks=(2, 1), transport="tcp")
    assert job.run(small_changes, "small") == [1.375] * 3


def refused():
    ones = {"r": np.ones(4, np.float32)}
    errors = []
    for call in (lambda: bpsfast.AsyncWeights(ones, staleness=-2), lambda: bpsfast.AsyncWeights(ones, staleness=1.5),
                 lambda: bpsfast.AsyncWeights(ones, worker="machine"),
                 lambda: bpsfast.AsyncWeights(ones, root_rank=9, prefix="a."),
                 lambda: bpsfast.AsyncWeights({"r": np.ones(4, np.int32)}, prefix="b.")):
        try:
            call()
        except bpsfast.BpsError as exc:
            errors.append(f"{type(exc).__name__}: {exc}")
    weights = bpsfast.AsyncWeights(ones, prefix="c.")
    for call in (lambda: weights.push("r", np.ones(5, np.float32)), lambda: weights.push("r", np.ones(4, np.float64)),
                 lambda: weights.push("s", ones["r"]), lambda: weights.load({"r": np.ones(5, np.float32)}),
                 lambda: bpsfast.AsyncWeights(ones, prefix="c.")):
        try:
            call()
        except bpsfast.BpsError as exc:
            errors.append(f"{type(exc).__name__}: {exc}")
    weights.close()
    return errors


def test_what_cannot_be_is_refused_in_words(shared_job):
    for errors in shared_job(ranks=(2, 1), transport="tcp").run(refused):
        words = ["staleness=-2", "staleness=1.5", "'machine'", "root_rank=9", "int32", "(5,) of float32", "float64",
                 "'s'", "(5,)", "'c.r' is in use in this process"]
        assert len(errors) == len(words) and all(word in error for word, error in zip(words, errors)), errors


made = {}


def begin(name):
    made[name] = bpsfast.AsyncWeights({name: np.zeros(2_000_000, np.float32)}, worker="rank")
    made[name].push_pull(name, np.ones(2_000_000, np.float32))


def for_ever(name):
    while True:
        made[name].push_pull(name, np.ones(2_000_000, np.float32))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_all_ranks_hear_of_the_end_of_an_owner(job, transport):
    started = job(ranks=(2, 1), transport=transport)
    started.run(begin, "lost")
    started.begin(for_ever, "lost")
    started.kill_daemon("node 1")
    assert {outcome.error for outcome in started.outcomes(30)} == {"PeerLostError"}
    started.kill()


@pytest.mark.parametrize(("worker", "ranks", "wanted"), [
    ("job", (), [()]), ("job", (0, 3), [(0, 3)]), ("node", (), [(0, 1), (2, 3)]), ("node", (1, 2), [(1,), (2,)]),
    ("node", (2,), [(2,)]), ("rank", (), [(0,), (1,), (2,), (3,)]), ("rank", (0, 3), [(0,), (3,)])])
def test_workers(worker, ranks, wanted):
    assert workers_of(StoreSpec(worker=worker), ranks, [(0, 1), (), (2, 3)]) == wanted
