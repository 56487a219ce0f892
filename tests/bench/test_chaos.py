"""Trials of chaos: drawn from seeds, and judged by an oracle that detects errors."""
from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from bpsfast.bench.chaos import run
from bpsfast.bench.chaos.history import SIZES, RankHistory, digest, expected, names, pushed, read, wrong_sums
from bpsfast.bench.chaos.scenario import (
    CYCLE,
    FOREIGNER,
    HANG_S,
    LEASE_S,
    LINK,
    LOST_WORKER,
    MAY_RAISE,
    MUST_RECOVER,
    N_STEPS_AFTER,
    ON_A_LINK,
    Fault,
    Scenario,
    draw,
)
from bpsfast.bench.chaos.trial import judge
from bpsfast.launch.namespaces import faulty_link

MACHINES = ((0,), (1,))


def scenario(kind, *faults):
    return Scenario(1, kind, (1, 1), 1, "tcp", "ps", faults)


def whole(n_steps=1 + N_STEPS_AFTER, alone_from=(99, 0), **fields):
    """Return the history of a rank with the right sums; *alone_from*: step and gradient that is the first of rank 0."""
    of = {step: [[0] if (step, i) >= alone_from else [0, 1] for i in range(len(names(step)))]
          for step in range(n_steps)}
    steps = {step: [expected(MACHINES[:len(ranks)], step, i) for i, ranks in enumerate(each)]
             for step, each in of.items()}
    return RankHistory(**{"steps": steps, "ranks": of, "end": "ok", **fields})


def test_a_seed_is_one_trial_and_seeds_are_all_kinds_of_them():
    drawn = [draw(seed) for seed in range(9 * CYCLE)]
    assert drawn == [draw(seed) for seed in range(9 * CYCLE)]
    kinds = Counter(each.kind for each in drawn)
    assert set(kinds) == {*MUST_RECOVER, *MAY_RAISE} and min(kinds.values()) >= 8
    assert [each.kind for each in drawn[:CYCLE]] != [each.kind for each in drawn[CYCLE:2 * CYCLE]]
    for each in drawn:
        roles = {"scheduler", *(f"helper {i}" for i in range(each.n_helpers)),
                 *(f"node {i}" for i in range(len(each.ranks))),
                 *(f"{kind} {i}" for kind in ("rank", "worker") for i in range(sum(each.ranks)))}
        assert all(fault.role.startswith("worker") == (each.kind in LOST_WORKER) for fault in each.faults)
        assert {fault.role for fault in each.faults} <= roles | {LINK, FOREIGNER}
        assert len(each.faults) == len({*each.faults})
        assert all((fault.role == LINK) == (each.kind in ON_A_LINK) for fault in each.faults)
        assert all((0 < fault.step < each.n_steps and fault.seconds in (0, HANG_S)) or fault.seconds <= LEASE_S / 3
                   or fault.restarts or (fault.refused and fault.seconds < LEASE_S) for fault in each.faults)
        assert each.killed <= roles and (not each.absent or each.absent[0] in roles)


def test_what_is_lost_second_is_lost_at_once_or_soon_after_the_first():
    laters = {each.faults[1].delay_s for each in map(draw, range(400)) if each.kind == "two helpers"}
    assert laters == {0.0, 0.005, 0.02, 0.1}


def test_jobs_are_struck_while_they_declare_tensors_anew():
    anew = [step for step in range(100) if len(names(step)) == len(SIZES)]
    assert 5 <= len([step for step in anew if 5 <= step < 30]) and max(anew) < 40
    assert len({names(step)[-1] for step in anew}) == len(anew), "each is a tensor of its own"


def test_an_input_that_is_missing_or_twice_is_another_sum():
    right = expected(MACHINES, 2, 0)
    assert digest(pushed(0, 2, 0) + pushed(1, 2, 0)) == right
    missing, twice = pushed(0, 2, 0), pushed(0, 2, 0) + pushed(1, 2, 0) + pushed(1, 2, 0)
    for wrong in (missing, twice, pushed(0, 2, 0) + pushed(1, 1, 0)):
        assert digest(wrong) != right


def test_a_history_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "rank_0.jsonl"
    assert read(path) == RankHistory()
    path.write_text('{"step": 0, "sums": ["a"], "ranks": [[0]]}\n{"step": 1, "su')
    assert read(path) == RankHistory(steps={0: ["a"]}, ranks={0: [[0]]})
    path.write_text('{"step": 0, "sums": ["a"], "ranks": [[0]]}\n{"end": "PeerLostError", "text": "x", "at_s": 7.5}\n')
    assert read(path) == RankHistory({0: ["a"]}, {0: [[0]]}, "PeerLostError", "x", 7.5)
    path.write_text('{"end": "ok", "recoveries": 2}\n')
    assert read(path) == RankHistory(end="ok", recoveries=2)


def test_wrong_sums_and_steps_left_out_are_found():
    assert wrong_sums({0: whole(), 1: whole()}, MACHINES) == []
    bad = whole()
    bad.steps[1] = ["0", *bad.steps[1][1:]]
    [words] = wrong_sums({0: whole(), 1: bad}, MACHINES)
    assert words.startswith("rank 1, step 1, gradient 0: 0 instead of")
    del bad.steps[1], bad.ranks[1]
    assert wrong_sums({0: bad}, MACHINES) == [f"rank 0 has steps {[0, *range(2, 1 + N_STEPS_AFTER)]}"]


def test_sums_of_other_ranks_than_those_that_are_named_are_wrong():
    """At step 2 some gradients have the lost rank 1, and others do not; from then on none has."""
    lost = {1}
    right = whole(alone_from=(2, 3)), whole(2)
    assert wrong_sums(dict(enumerate(right)), MACHINES, lost) == []
    assert "of [0, 1] without some of ()" in wrong_sums({0: right[0]}, MACHINES)[0], "nobody was lost"
    late = whole(alone_from=(2, 4))
    assert "elsewhere of" in wrong_sums({0: right[0], 1: late}, MACHINES, lost)[0]
    right[0].ranks[2][0] = [0]
    assert "gradient 0" in wrong_sums({0: right[0]}, MACHINES, lost)[0], "it has the input of rank 1"
    back = whole(alone_from=(2, 0))
    back.steps[3], back.ranks[3] = whole().steps[3], whole().ranks[3]
    assert "the last was of [0]" in wrong_sums({0: back}, MACHINES, lost)[0]


RESTARTED = Fault(1, 0.0, "scheduler", restarts=True)
KILLED = Fault(1, 0.0, "node 1")
LOST = {"end": "PeerLostError", "text": "node 1 is lost", "at_s": 101.0}
FINE = {"scheduler": 0, "node 0": 0, "rank 0": 0, "rank 1": 0}


@pytest.mark.parametrize(("outcome", "of", "histories", "codes"), [
    ("recovered", scenario("undisturbed"), {0: whole(), 1: whole()}, FINE),
    ("wrong", scenario("undisturbed"), {0: whole(), 1: whole()}, {**FINE, "node 0": 1}),
    ("recovered", scenario("lost scheduler", RESTARTED), {0: whole(), 1: whole()}, FINE),
    ("wrong", scenario("lost scheduler", RESTARTED), {0: whole(), 1: whole()}, {**FINE, "scheduler": 1}),
    ("wrong", scenario("lost node", KILLED), {0: whole(), 1: whole(N_STEPS_AFTER)}, FINE),
    ("wrong", scenario("lost node", KILLED), {0: whole(N_STEPS_AFTER), 1: whole(N_STEPS_AFTER)}, FINE),
    ("hung", scenario("lost node", KILLED), {0: whole(), 1: whole()}, {**FINE, "node 0": None}),
    ("raised", scenario("lost node", KILLED), {0: whole(2, **LOST), 1: whole(1, **LOST)}, {**FINE, "node 0": 1}),
    ("late", scenario("lost node", KILLED), {0: whole(2, **LOST), 1: whole(1, **{**LOST, "at_s": 103.5})}, FINE),
    ("wrong", scenario("lost node", KILLED), {0: whole(2, **LOST), 1: whole(1, **{**LOST, "end": "StallError"})}, FINE),
    ("crashed", scenario("lost node", KILLED), {0: whole(2, **LOST), 1: whole(1, end="")}, FINE),
    ("crashed", scenario("lost node", KILLED), {0: whole(2, **LOST), 1: whole(2, **LOST)},
     {**FINE, "node 0": -signal.SIGSEGV}),
    ("wrong", scenario("lost node", KILLED),
     {0: whole(2, **LOST), 1: RankHistory({0: ["x"] * len(SIZES)}, {0: [[0, 1]] * len(SIZES)}, **LOST)}, FINE),
    ("recovered", scenario("survived node", KILLED),
     {0: whole(alone_from=(1, 2), recoveries=1), 1: whole(1, **LOST)}, {**FINE, "node 1": -signal.SIGKILL}),
    ("wrong", scenario("survived node", KILLED), {0: whole(recoveries=0), 1: whole(1, **LOST)},
     {**FINE, "node 1": -signal.SIGKILL}),
    ("raised", scenario("survived rank", Fault(1, 0.0, "rank 1")), {0: whole(2, **LOST), 1: whole(1, end="")}, FINE),
])
def test_a_verdict_says_what_became_of_it(outcome, of, histories, codes):
    assert judge(of, histories, codes, {"node 1": 100.0})[0] == outcome


@pytest.mark.parametrize(("role", "named", "unnamed"), [
    ("node 1", "node 1 (b) is lost", "node 11 is lost"),
    ("rank 1", "node 1 (b) is lost: rank 1 died", "rank 0 is lost"),
    ("rank 1", "rank 1 has died", "a rank has died"), ("scheduler", "the scheduler at a:1 is gone", "it is gone"),
    ("helper 0", "helper 0 is lost", "helper 1 (node 3) is lost"), ("helper 0", "node 2 is lost", "node 1 is lost")])
def test_an_error_names_who_is_lost_on_every_rank(role, named, unnamed):
    fields = {"end": "PeerLostError", "at_s": 101.0}
    of, rank = scenario("lost node", Fault(1, 0.0, role)), int(role == "rank 0")
    for text, outcome in ((named, "raised"), (unnamed, "wrong")):
        told = {rank: whole(2, **fields, text=text), 1 - rank: whole(2, **fields, text=named)}
        assert judge(of, told, FINE, {role: 100.0})[0] == outcome, text


@pytest.mark.parametrize(("outcome", "recoveries", "code"), [
    ("recovered", (1, 1), -signal.SIGKILL), ("recovered", (2, 1), -signal.SIGKILL),
    ("wrong", (1, 0), -signal.SIGKILL), ("wrong", (1, 1), 0), ("wrong", (1, 1), 3)])
@pytest.mark.parametrize("kind", ["lost helper", "two helpers"])
def test_who_is_lost_must_have_been_killed_and_done_without(kind, outcome, recoveries, code):
    histories = {rank: whole(recoveries=n) for rank, n in enumerate(recoveries)}
    of = scenario(kind, Fault(1, 0.0, "helper 0"))
    assert judge(of, histories, {**FINE, "helper 0": code}, {"helper 0": 100.0})[0] == outcome


def test_what_must_recover_may_not_raise_and_what_is_killed_says_nothing():
    told = {0: whole(2, **{**LOST, "text": "rank 1 is lost"}), 1: RankHistory()}
    assert judge(scenario("lost rank", Fault(1, 0.0, "rank 1")), told, FINE, {"rank 1": 100.0})[0] == "raised"
    assert "lost helper" in MUST_RECOVER and "lost rank" in MAY_RAISE and "survived rank" in MUST_RECOVER


def test_a_trial_is_run_and_written_down(tmp_path):
    kinds = {seed: draw(seed).kind for seed in range(200)}
    first = next(seed for seed in kinds if kinds[seed] == "lost helper")
    path = tmp_path / "chaos.jsonl"
    assert run({"seeds": 1, "first": first, "json_path": str(path)})
    machine, row = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert "machine" in machine and (row["seed"], row["kind"], row["outcome"]) == (first, "lost helper", "recovered")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refused data", "refused control", "lost host", "foreign helper", "absent helper"])
def test_a_job_that_can_go_on_does(tmp_path, kind):
    if kind in ON_A_LINK and faulty_link.missing():
        pytest.skip(faulty_link.missing())
    first = next(seed for seed in range(200) if draw(seed).kind == kind)
    path = tmp_path / "chaos.jsonl"
    assert run({"seeds": 1, "first": first, "json_path": str(path)})
    row = json.loads(path.read_text().splitlines()[1])
    assert (row["kind"], row["outcome"]) == (kind, "recovered")
