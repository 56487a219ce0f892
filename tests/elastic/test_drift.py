"""Drift: what differs between ranks that have committed equally often is named, and nothing else."""
from __future__ import annotations

import copy
import logging
import pickle

import numpy as np
import pytest

import bpsfast
from bpsfast import elastic
from bpsfast.elastic import drift


def found(values):
    return drift.digests(values, lambda value: None)


VALUES = {"weights": np.arange(6, dtype=np.float32).reshape(2, 3), "empty": np.zeros((0, 3)), "scalar": np.float32(2.0),
          "step": 3, "rate": 0.1, "name": "adam", "raw": b"x", "nothing": None, "flag": True,
          "nested": {"moments": [np.ones(3), np.zeros(3)], 0: (1, 2)}}


def test_each_leaf_has_a_name():
    assert set(found(VALUES)) == {"weights", "empty", "scalar", "step", "rate", "name", "raw", "nothing", "flag",
                                  "nested.moments.0", "nested.moments.1", "nested.0.0", "nested.0.1"}


def test_copies_are_equal_however_they_were_made():
    for copied in (copy.deepcopy(VALUES), pickle.loads(pickle.dumps(VALUES)), dict(reversed(VALUES.items()))):
        assert found(copied) == found(VALUES) and drift.total(found(copied)) == drift.total(found(VALUES))
    strided = {**VALUES, "weights": np.asfortranarray(VALUES["weights"])}
    assert found(strided) == found(VALUES)


@pytest.mark.parametrize(("name", "other"), [
    ("weights", VALUES["weights"] + 1), ("weights", VALUES["weights"].reshape(3, 2)),
    ("weights", VALUES["weights"].astype(np.float64)), ("step", 4), ("step", 3.0), ("flag", 1), ("name", b"adam"),
    ("rate", np.nextafter(0.1, 1)), ("empty", np.zeros((0, 4)))])
def test_the_smallest_difference_is_named(name, other):
    changed = {**VALUES, name: other}
    assert drift.different(found(changed), found(VALUES)) == [name]
    assert drift.total(found(changed)) != drift.total(found(VALUES))


def test_what_one_rank_has_alone_is_named():
    changed = {**VALUES, "nested": {"moments": [np.ones(3)]}}
    assert drift.different(found(changed), found(VALUES)) == ["nested.0.0", "nested.0.1", "nested.moments.1"]


def test_objects_do_not_count():
    assert found({"sampler": object(), "objects": np.array([object()]), "set": {1}}) == {}
    assert 0 <= drift.total({}) < 1 << 63


def test_tensors_count_by_their_bytes():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    state = elastic.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), step=1)
    before = state.digests()
    assert {"model.0.weight", "model.1.num_batches_tracked", "optimizer.param_groups.0.lr", "step"} <= set(before)
    model[1].running_mean[1] += 1
    assert state.digests() == before, "of what was kept"
    state.keep()
    assert drift.different(state.digests(), before) == ["model.1.running_mean"]


def drift_after_commits(drifts, n_commits):
    """Commit *n_commits* times, with other values on rank 2 if it *drifts*; return what is logged by `sync`."""
    rank, lines = bpsfast.rank(), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("bpsfast.elastic").addHandler(handler)
    state = elastic.ObjectState(weights=np.zeros(4, np.float32), mean=[1.0, 2.0], step=0)
    if drifts and rank == 2:
        state.weights[1], state.mean = 5, [1.0, 3.0]
    for _ in range(n_commits if rank != 3 else 0):  # rank 3 is new
        state.step += 1
        state.save()
    try:
        state.sync()
    finally:
        logging.getLogger("bpsfast.elastic").removeHandler(handler)
    return lines, state.weights.tolist(), state.mean, state.step


@pytest.mark.parametrize(("drifts", "n_commits"), [(True, 3), (False, 3), (True, 0)])
def test_the_rank_that_has_drifted_says_so(shared_job, drifts, n_commits):
    said = shared_job(ranks=(2, 2)).run(drift_after_commits, drifts, n_commits)
    assert [each[1:] for each in said] == [([0.0] * 4, [1.0, 2.0], n_commits)] * 4, "all have those of rank 0"
    assert [len(each[0]) for each in said] == [0, 0, int(drifts and n_commits > 0), 0]
    if said[2][0]:
        assert "after 3 commits rank 2 has other values than rank 0 in mean.1, weights;" in said[2][0][0]
