"""Gradients that are cut anew while a job trains: the same bits, the same arrays, nothing left over."""
from __future__ import annotations

import json
import os
import zlib

import numpy as np
import pytest

import bpsfast
from bpsfast.trainer import current
from bpsfast.trainer.gradients import Gradients

LAYERS = {"conv.weight": ((16, 3, 3, 3), "f4"), "conv.bias": ((16,), "f4"), "fc.weight": ((700, 500), "f4"),
          "fc.bias": ((500,), "f4"), "scale": ((), "f4"), "half": ((70_000,), "f2"), "nothing": ((0,), "f4"),
          "middle": ((100, 300), "f4")}


def train(n_steps, wait=True):
    """Train *n_steps*; return a checksum of all sums, in how many ways they were cut, what moved or changed too early,
    the node's memory after every step, whether tuning was over and how many units there are."""
    g = Gradients(LAYERS, prefix=f"{wait} ")
    arrays = {name: g[name] for name in g}
    checksum, cuts, kept, wrong, used = 0, set(), [], [], []
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
        cuts.add(g._edition.cut)
        g.step(wait=wait)
        views = {}
        for name in g:
            view = g.wait(name)
            checksum = zlib.crc32(view.tobytes(), checksum)
            views[name] = view, view.copy()
        kept.append(views)
        if any(g[name] is not arrays[name] for name in g):
            wrong.append((step, "an array moved"))
        used.append(bpsfast.stats()["memory_segments"])
    session = current.current()
    return checksum, len(cuts), wrong, used, (g._tuner is None, len(session.tensors.units()))


@pytest.mark.parametrize("wait", [True, False], ids=["barrier", "crossing"])
@pytest.mark.parametrize(("ranks", "helpers", "transport"), [((2, 1), 0, "tcp"), ((1, 1), 1, "shm"), ((2,), 0, "auto")])
def test_the_sums_have_the_same_bits(job, tmp_path, ranks, helpers, transport, wait):
    ordinary = job(ranks, helpers, transport).run(train, 75, wait)
    tuned = job(ranks, helpers, transport, autotune=True, tuned_dir=str(tmp_path), partition_bytes=64_000,
                fusion_bytes=100_000).run(train, 75, wait, timeout_s=120)
    for before, after in zip(ordinary, tuned):
        assert after[0] == before[0] and after[2] == before[2] == []
        assert before[1] == 1 and after[1] > 3, "it was cut in several ways"
        is_over, _ = after[4]
        assert is_over
    assert max(tuned[0][3][40:]) == max(tuned[0][3]), "memory does not grow with the number of trials"


def test_a_result_is_kept_and_used(job, tmp_path):
    settings = {"autotune": True, "tuned_dir": str(tmp_path / "deep" / "er"), "partition_bytes": 64_000}
    job((1, 1), 0, "tcp", **settings).run(train, 70, timeout_s=120)
    (file,) = (tmp_path / "deep" / "er").iterdir()
    found = json.loads(file.read_text())
    assert found["is_over"] and found["n_steps"] <= 60 and len(found["trials"]) >= 3
    before = file.read_bytes()
    again = job((1, 1), 0, "tcp", **settings).run(train, 12)
    assert {cuts for _, cuts, *_ in again} == {1 if found["chosen"][:2] == [64_000, 4_096_000] else 2}
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
    """Memory for one edition: every trial with other partitions is refused, on all ranks alike, and training goes on."""
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
