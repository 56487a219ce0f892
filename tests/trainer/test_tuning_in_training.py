"""Gradients that get other layouts while a job trains: the same bits, the same arrays, nothing left over."""
from __future__ import annotations

import json
import os
import zlib

import numpy as np
import pytest

import bpsfast
from bpsfast.trainer import process
from bpsfast.trainer.gradients import Gradients
from bpsfast.trainer.tuning_search import TuningPoint
from bpsfast.trainer.tuning_trials import Decision

pytestmark = pytest.mark.matrix

LAYERS = {"conv.weight": ((16, 3, 3, 3), "f4"), "conv.bias": ((16,), "f4"), "fc.weight": ((700, 500), "f4"),
          "fc.bias": ((500,), "f4"), "scale": ((), "f4"), "half": ((70_000,), "f2"), "nothing": ((0,), "f4"),
          "middle": ((100, 300), "f4")}


LAYOUTS = [(4096, 4096, 4), (4096, 1 << 20, 1), (1 << 20, 1 << 22, 3), (64_000, 0, 2), (12_000, 100_000, 4),
        (4_096_000, 300_000, 2)]


class Tour:
    """In place of the search: visits points one after another, for three steps each."""

    def __init__(self, first, points):
        self.decision, self._left, self._n = Decision(0, first), list(points), 0
        self.best = first

    def observe(self, point, step_s):
        self._n += 1
        if self._n % 8 == 0 and not self.decision.is_last:
            coming = self._left.pop(0) if self._left else None
            self.decision = Decision(self.decision.number + 1, point, coming, is_last=coming is None)
            self.best = point

    def save(self):
        """Keep nothing: nothing was measured."""


def toured(n_rounds, wait):
    """As `train`, with another layout every eight steps, *n_rounds* times through all."""
    return train(8 * (n_rounds * len(LAYOUTS) + 1) + 8, wait, [
        TuningPoint(*sizes[:2], 1 << 20 + i % 3, sizes[2]) for _ in range(n_rounds) for i, sizes in enumerate(LAYOUTS)])


def train(n_steps, wait=True, tour=()):
    """Train *n_steps*; return a checksum of all sums, in how many ways they were cut, what moved or changed too early,
    the node's memory after every step, whether tuning was over and how many units there are."""
    g = Gradients(LAYERS, prefix=f"{wait} ")
    if tour and g._tuner is not None and g._tuner._runner is not None:
        g._tuner._runner = Tour(g._tuner._runner.decision.active, tour)
    arrays = {name: g[name] for name in g}
    checksum, layouts, kept, wrong, used = 0, set(), [], [], []
    generator = np.random.default_rng(bpsfast.rank())
    for step in range(n_steps):
        for name in reversed(list(g)):
            if kept and len(kept) >= 2 and name in kept[-2]:
                view, copy = kept[-2].pop(name)
                if not np.array_equal(view, copy):
                    wrong.append((step, name, "a view changed"))
            value = generator.standard_normal(LAYERS[name][0]).astype(LAYERS[name][1])
            if step % 3 == 0 and value.nbytes:
                g.fill(name, np.ascontiguousarray(value).ctypes.data, value.nbytes)
            else:
                arrays[name][...] = value
                g.ready(name)
        layouts.add(g._layout.sizes)
        g.step(wait=wait)
        views = {}
        for name in g:
            view = g.wait(name)
            checksum = zlib.crc32(view.tobytes(), checksum)
            views[name] = view, view.copy()
        kept.append(views)
        if any(g[name] is not arrays[name] for name in g):
            wrong.append((step, "an array moved"))
        used.append(bpsfast.counters()["memory_segments"])
    session = process.current()
    return checksum, len(layouts), wrong, used, (g._tuner is None, len(session.tensors.units()))


@pytest.mark.parametrize("wait", [True, False], ids=["barrier", "crossing"])
@pytest.mark.parametrize(("ranks", "helpers", "transport"), [
    ((2, 1), 0, "tcp"), ((1, 1), 1, "shm"), ((1, 2), 1, "tcp"), ((2,), 0, "auto")])
def test_the_sums_have_the_same_bits(job, tmp_path, ranks, helpers, transport, wait):
    n_rounds = 4
    tuned = job(ranks, helpers, transport, autotune=True, tuned_dir=str(tmp_path)).run(toured, n_rounds, wait)
    ordinary = job(ranks, helpers, transport).run(toured, n_rounds, wait)
    for before, after in zip(ordinary, tuned):
        assert after[0] == before[0] and after[2] == before[2] == []
        assert (before[1], after[1]) == (1, len(LAYOUTS) + 1), "in how many ways the sums were cut"
        is_over, _ = after[4]
        assert is_over
        used, turn = after[3], 8 * len(LAYOUTS)
        assert max(used[2 * turn:]) == max(used[:2 * turn]), "memory grows with the number of editions"
    assert len({units for *_, (_, units) in tuned}) == 1


def test_a_result_is_kept_and_used(job, tmp_path):
    settings = {"autotune": True, "tuned_dir": str(tmp_path / "deep" / "er"), "partition_bytes": 64_000}
    job((1, 1), 0, "tcp", **settings).run(train, 70, timeout_s=120)
    (file,) = (tmp_path / "deep" / "er").iterdir()
    found = json.loads(file.read_text())
    assert found["is_over"] and found["n_steps"] <= 60 and len(found["trials"]) >= 2
    before = file.read_bytes()
    again = job((1, 1), 0, "tcp", **settings).run(train, 12)
    partition, fusion, _, n_streams = found["chosen"]
    n_layouts = 1 if (partition, fusion, n_streams) == (64_000, 4_096_000, 2) else 2
    assert {layouts for _, layouts, *_ in again} == {n_layouts}
    assert all(is_over for *_, (is_over, _) in again) and file.read_bytes() == before
    # other shapes, other machines: another result
    job((2,), 0, "tcp", **settings).run(train, 70, timeout_s=120)
    assert len(list(file.parent.iterdir())) == 2


def test_a_file_that_is_no_result_is_as_none(job, tmp_path):
    settings = {"autotune": True, "tuned_dir": str(tmp_path)}
    job((1, 1), 0, "tcp", **settings).run(train, 70, timeout_s=120)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    job((1, 1), 0, "tcp", **settings).run(train, 70, timeout_s=120)
    assert json.loads(file.read_text())["is_over"]


def test_an_edition_that_cannot_be_had_is_left_out(job, tmp_path):
    """There is memory for one layout: trials with other partitions are refused, and training goes on."""
    report = tmp_path / "report.json"
    limited = job((1, 1), 0, "tcp", autotune=True, tuned_dir=str(tmp_path / "kept"), autotune_report=str(report),
                  max_bytes=12 << 20, partition_bytes=256_000)
    for _, _, wrong, *_ in limited.run(train, 70, timeout_s=120):
        assert not wrong
    found = json.loads(report.read_text())
    assert any(step_s is None for _, step_s, *_ in found["trials"]), found
    assert found["is_over"]


def two_models():
    small = {"a": ((1000,), "f4"), "b": ((10,), "f4")}
    models = [Gradients(small, prefix=prefix) for prefix in ("first ", "second ")]
    for step in range(10):
        for g in models:
            for name in g:
                g[name][:] = step
                g.ready(name)
            g.step()
            if any((g.wait(name) != step).any() for name in g):
                return step
    return [g._tuner is not None for g in models]


def test_of_two_models_the_first_is_tuned(job, tmp_path):
    assert job((1, 1), 0, "tcp", autotune=True, tuned_dir=str(tmp_path)).run(two_models) == [[True, False]] * 2


def descriptors(n_steps):
    """Return the descriptors of this process after *n_steps* of tuning."""
    train(n_steps)
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_do_not_grow(job, tmp_path):
    few, many = (job((1, 1), 0, "tcp", autotune=True, tuned_dir=str(tmp_path / str(n)), partition_bytes=64_000)
                 .run(descriptors, n, timeout_s=120) for n in (30, 75))
    assert all(late <= early + 2 for early, late in zip(few, many)), (few, many)
