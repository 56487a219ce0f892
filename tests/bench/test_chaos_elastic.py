"""Trials of elastic jobs: errors that their oracle detects, and a real trial of each policy."""
from __future__ import annotations

import copy

import numpy as np
import pytest

from bpsfast.bench.chaos import elastic_trial
from bpsfast.bench.chaos.elastic_trial import WorkerHistory, judge, machines_of, read
from bpsfast.bench.chaos.history import SIZES, digest, expected, summed
from bpsfast.bench.chaos.scenario import N_STEPS_AFTER, Fault, Scenario
from bpsfast.bench.chaos.worker import KEPT

NODES = {1: [0, 1, 1], 2: [0, 1]}


def scenario(policy, *faults):
    kind = "rejoining worker" if policy == "rejoin" else f"lost worker, {policy}"
    return Scenario(1, kind, (1, 2), 0, "tcp", "ps", faults)


def history(*made, nodes=NODES, end="ok", without=()):
    """Return the history of a worker that made the steps (job, step); weights are those of the last time of each.

    *without*: steps (job, step) with the inputs of all but the last rank.
    """
    ranks = {(job, step): [*range(len(nodes[job]) - ((job, step) in without))] for job, step in made}
    sums = {(job, step): [expected(machines_of(nodes[job], ranks[job, step]), step, i) for i in range(len(SIZES))]
            for job, step in made}
    weights = np.zeros(SIZES[KEPT] // 4, np.float32)
    for step, job in {step: job for job, step in made}.items():
        weights += summed(machines_of(nodes[job], ranks[job, step]), step, KEPT)
    return WorkerHistory(sums, {made: [each] * len(SIZES) for made, each in ranks.items()}, dict(nodes), end, "",
                         digest(weights))


MADE = [(1, 0), (1, 1), (2, 1), (2, 2)]
WORKERS = {0: history(*MADE), 1: history(*MADE), 2: history((1, 0), end="")}


def test_what_is_right_is_recovered():
    assert judge(scenario("shrink"), WORKERS, {2}, 0, 3) == ("recovered", "")
    three = {1: [0, 1, 1], 2: [0, 1, 1]}
    again = {number: history(*MADE, nodes=three) for number in (0, 1, 3)}
    assert judge(scenario("wait"), again, {2}, 0, 3) == ("recovered", "")


def test_a_job_that_goes_on_has_the_sums_of_those_that_are_left():
    three = {1: [0, 1, 1], 2: [0, 1, 1]}
    found = {number: history(*MADE, nodes=three, without=[(1, 1)]) for number in (0, 1, 3)}
    assert judge(scenario("rejoin"), found, {2}, 0, 3) == ("recovered", "")
    found[1] = history(*MADE, nodes=three)
    assert judge(scenario("rejoin"), found, {2}, 0, 3) == (
        "wrong", "worker 1, job 1, step 1: others name other contributors")


def broken(change):
    found = copy.deepcopy(WORKERS)
    change(found)
    return found


@pytest.mark.parametrize(("outcome", "words", "change"), [
    ("wrong", "worker 1, job 2, step 2, gradient 0: x", lambda w: w[1].sums[2, 2].__setitem__(0, "x")),
    ("wrong", "weights of workers [0] are not", lambda w: setattr(w[0], "weights", "x")),
    ("crashed", "workers [1] ended without a word", lambda w: setattr(w[1], "end", "")),
    ("raised", "no quorum: x", lambda w: (setattr(w[1], "end", "StallError"), setattr(w[1], "text", "no quorum: x"))),
    ("wrong", "anything", lambda w: (setattr(w[1], "end", "StallError"), setattr(w[1], "text", "anything")))])
def test_what_is_not_right_is_noticed(outcome, words, change):
    found = judge(scenario("shrink"), broken(change), {2}, 0, 3)
    assert found[0] == outcome and found[1].startswith(words)


def test_a_job_that_shrinks_where_it_should_wait_is_wrong_and_so_is_an_exit_code():
    assert judge(scenario("wait"), WORKERS, {2}, 0, 3) == ("wrong", "ranks of the jobs: [3, 2]")
    assert judge(scenario("shrink"), WORKERS, {2}, 1, 3) == ("wrong", "the launcher ended with exit code 1")


def test_a_history_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "worker_0.jsonl"
    path.write_text('{"job": 1, "nodes": [0]}\n{"step": 0, "sums": ["a"], "ranks": [[0]]}\n'
                    '{"job": 2, "nodes": [0, 1]}\n{"step": 0, "sums": ["b"], "ranks": [[1]]}\n'
                    '{"end": "ok", "weights": "c"}\n{"st')
    assert read(path) == WorkerHistory({(1, 0): ["a"], (2, 0): ["b"]}, {(1, 0): [[0]], (2, 0): [[1]]},
                                       {1: [0], 2: [0, 1]}, "ok", "", "c")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("policy", ["shrink", "wait", "rejoin"])
def test_a_real_trial(tmp_path, policy):
    lost = scenario(policy, Fault(5, 0.005, "worker 1"))
    assert elastic_trial.run(lost, tmp_path) == ("recovered", "")
    jobs = {job: nodes for path in tmp_path.glob("worker_*") for job, nodes in read(path).nodes.items()}
    assert [len(nodes) for _, nodes in sorted(jobs.items())] == ([3, 2] if policy == "shrink" else [3, 3])
    assert max(step for _, step in read(tmp_path / "worker_0.jsonl").sums) >= 5 + N_STEPS_AFTER
