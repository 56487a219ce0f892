"""AsyncWeights and AsyncOptimizer with backups on real ranks: steps leave late workers out and name them."""
from __future__ import annotations

import numpy as np
import pytest
import torch

import bpsfast
import bpsfast.torch as bps

N = 300_000  # two partitions


def change(rank, step):
    return np.random.default_rng([rank, step]).standard_normal(N).astype(np.float32)


def train(name, backups, n_steps):
    """All but the last rank step together; then the late one joins and makes a step with them."""
    rank, size = bpsfast.rank(), bpsfast.size()
    weights = bpsfast.AsyncWeights({name: np.zeros(N, np.float32)}, worker="rank", backups=backups)
    is_late, answers = rank == size - 1, []
    for step in range(n_steps):
        if not is_late:
            answers.append(weights.push_pull(name, change(rank, step)).copy())
    bpsfast.barrier()
    if is_late:
        answers.append(weights.push_pull(name, change(rank, 0)).copy())
    bpsfast.barrier()
    left_out = bpsfast.counters()["engine_left_out"]
    lags = bpsfast.stats(job=True).job_lags if rank == 0 else ()
    if rank != 0:  # with it there would be more than it takes
        answers.append(weights.push_pull(name, change(rank, n_steps)).copy())
    bpsfast.barrier()
    weights.close()
    return answers, left_out, lags


@pytest.mark.parametrize(("shape", "helpers", "transport"), [((3,), 0, "auto"), ((1, 1, 1), 1, "tcp"),
                                                             ((2, 1), 0, "shm")], ids=str)
def test_who_is_late_is_left_out_and_goes_on_from_the_newest_weights(shared_job, shape, helpers, transport):
    job = shared_job(ranks=shape, helpers=helpers, transport=transport)
    first, second, late = job.run(train, "late", 1, 12, timeout_s=120)
    wanted = np.zeros(N, np.float32)
    for step in range(12):
        for rank in (0, 1):
            wanted = wanted + change(rank, step) / np.float32(2)
        for answers, *_ in (first, second):
            assert (answers[step] == wanted).all(), step
    assert (late[0][0] == wanted).all(), "what came late is in no weights"
    for rank in (1, 2):
        wanted = wanted + change(rank, 12) / np.float32(2)
    assert (second[0][12] == wanted).all() and (late[0][1] == wanted).all()
    nodes = [node for node, n in enumerate(shape) for _ in range(n)]
    left_out = dict(zip(nodes, (first[1], second[1], late[1])))
    assert sum(left_out.values()) == 2, "once in each partition, at its owner"
    lags = {lag.rank: lag.mean_s for lag in first[2]}
    assert lags[2] > max(lags[0], lags[1]), "who is late is named"


def average(name):
    """Nodes of two and one ranks: a node's change is the mean of its ranks'."""
    weights = bpsfast.AsyncWeights({name: np.zeros(3, np.float32)}, backups=0)
    found = weights.push_pull(name, np.full(3, [2.0, 4.0, 9.0][bpsfast.rank()], np.float32)).copy()
    weights.close()
    return found.tolist()


def test_a_nodes_change_is_the_mean_of_its_ranks(shared_job):
    assert shared_job(ranks=(2, 1), transport="tcp").run(average, "mean") == [[6.0] * 3] * 3


def hold_back(name):
    weights = bpsfast.AsyncWeights({name: np.zeros(1, np.float32)}, worker="rank", backups=1)
    try:
        if bpsfast.rank() == 0:
            weights.push(name, np.ones(1, np.float32))
            weights.pull(name, 3.0)
    finally:
        bpsfast.barrier()


def test_who_is_missing_for_a_version_is_named(job):
    started = job(ranks=(2, 1), transport="tcp")
    waiting, *others = started.attempt(hold_back, "held")
    assert not any(outcome.error for outcome in others)
    assert waiting.error == "StallError" and "rank 1" in waiting.text and "rank 2" in waiting.text, waiting.text
    started.kill()


def refused():
    errors = []
    for options in (dict(backups=2), dict(backups=-1), dict(backups=1.5), dict(backups=1, staleness=1),
                    dict(backups=3, worker="rank")):
        try:
            bpsfast.AsyncWeights({"r": np.ones(4, np.float32)}, **options)
        except bpsfast.ConfigError as exc:
            errors.append(str(exc))
    return errors


def test_what_cannot_be_is_refused_in_words(shared_job):
    for errors in shared_job(ranks=(2, 1), transport="tcp").run(refused):
        words = ["backups=2, but there are 2 workers (worker='node')", "backups=-1", "backups=1.5", "staleness=1",
                 "backups=3, but there are 3 workers (worker='rank')"]
        assert len(errors) == len(words) and all(word in error for word, error in zip(words, errors)), errors


def learn(explicit):
    """Fit the same line on both machines; one of them makes a quarter of the steps."""
    rank = bpsfast.rank()
    torch.manual_seed(rank)
    net = torch.nn.Linear(4, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.05)
    if explicit:
        optimizer = bps.AsyncOptimizer(inner, net.named_parameters(), backups=1)
    else:
        optimizer = bps.DistributedOptimizer(inner, named_parameters=net.named_parameters())
    for step in range(120 if rank == 0 else 30):
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1000 * rank + step))
        optimizer.zero_grad()
        (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    bpsfast.barrier()
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.close()
    return [p.detach().numpy().copy() for p in net.parameters()]


@pytest.mark.parametrize("explicit", [True, False], ids=["AsyncOptimizer", "DistributedOptimizer"])
def test_a_slow_machine_holds_nobody_up_and_training_converges(shared_job, explicit):
    job = shared_job(ranks=(1, 1), transport="tcp", async_training=True, async_backups=1)
    for weight, bias in job.run(learn, explicit, timeout_s=120):
        np.testing.assert_allclose(weight, 1, atol=0.05)
        np.testing.assert_allclose(bias, 0, atol=0.05)
