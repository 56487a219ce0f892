"""hvd.elastic in real elastic jobs, with Horovod's example: each sample is used once when workers are lost or added."""
from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import bpsfast.hvd as hvd  # noqa: E402

_ROOT = Path(__file__).resolve().parents[2]
_BPSFAST = [sys.executable, "-m", "bpsfast"]
_ENVIRON = {**os.environ, "PYTHONPATH": str(_ROOT), "BPSFAST_TIMEOUT_S": "60"}


def trained(folder, n_ranks, options, op, *deeds):
    """Run a job; return its workers' results by their numbers. A worker is added when the training asks for one."""
    folder.mkdir()
    control = folder / "control"
    command = [*_BPSFAST, "run", "-n", str(n_ranks), "--elastic", *options, "--control", str(control), "--",
               sys.executable, "-m", "tests.support.elastic_hvd_training", str(folder), op, *deeds]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=_ROOT,
                          env=_ENVIRON) as job:
        if any(deed[0] == "+" for deed in deeds):
            while not (folder / "add").exists() and job.poll() is None:
                time.sleep(0.05)
            subprocess.run([*_BPSFAST, "add", str(control)], check=True, timeout=60, cwd=_ROOT, env=_ENVIRON)
        try:
            _, err = job.communicate(timeout=150)
        finally:
            job.kill()
    assert job.returncode == 0, err
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def require_once(found, n_epochs=2):
    """Fail unless each sample was used exactly once in each epoch."""
    for epoch in range(1, n_epochs + 1):
        count = collections.Counter(i for e, used in found["used"] for i in used if e == epoch)
        assert set(count) == set(range(480)) and max(count.values()) == 1


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("op", ["Average", "Max"])  # by the exchange of gradients; by negotiated operations
@pytest.mark.parametrize("victim", [0, 2])
def test_a_replaced_worker_changes_nothing(tmp_path, op, victim):
    undisturbed = trained(tmp_path / "undisturbed", 3, ["--lost-worker", "wait"], op)[1]
    found = trained(tmp_path / "killed", 3, ["--lost-worker", "wait"], op, f"{victim}@13")
    assert set(found) == {0, 1, 2, 3} - {victim}
    for number, each in found.items():
        assert {name: each[name] for name in ("weights", "used", "rate", "size")} == {
            name: undisturbed[name] for name in ("weights", "used", "rate", "size")}
        assert each["sizes"] == ([] if number == 3 else [3]) and sorted(each["everybody"]) == sorted(found)
    require_once(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_smaller_job_scales_its_learning_rate(tmp_path):
    found = trained(tmp_path / "killed", 3, ["--lost-worker", "shrink"], "Average", "1@13")
    assert set(found) == {0, 2} and found[0]["weights"] == found[2]["weights"]
    for each in found.values():
        assert (each["sizes"], each["size"], each["rate"]) == ([2], 2, pytest.approx(0.02))
        require_once(each)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_added_worker_takes_its_share(tmp_path):
    found = trained(tmp_path / "added", 2, ["--max-ranks", "3"], "Average", "+8")  # leaves each 112 samples
    assert set(found) == {0, 1, 2} and len({str(each["weights"]) for each in found.values()}) == 1
    assert [found[number]["sizes"] for number in range(3)] == [[3], [3], []]
    for each in found.values():
        assert each["rate"] == pytest.approx(0.03)
        require_once(each)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_graceful_stop_leaves_nothing_half_used(tmp_path):
    found = trained(tmp_path / "told", 3, ["--lost-worker", "wait"], "Average", "1~13")
    assert set(found) == {0, 1, 2}
    for each in found.values():
        assert each["how"] == "preempted" and each["weights"] == found[0]["weights"]
        used = [i for epoch, used in each["used"] for i in used if epoch == 1]
        assert sorted(used) == each["processed"] and len(set(used)) == len(used) >= 14 * 24


def test_the_state_takes_horovods_arguments():
    state = hvd.elastic.ObjectState(lambda obj, root_rank: obj, lambda: 0, epoch=3)
    state.epoch = 4
    state.restore()
    assert state.epoch == 3
    assert hvd.elastic.HostsUpdatedInterrupt is not None and hvd.elastic is hvd.torch.elastic


def test_the_samplers_methods_are_horovods():
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    assert (sampler.num_samples, sampler.total_size, sampler.remaining_indices) == (10, 10, list(range(10)))
    assert sampler.get_indices(1, 4) == [4, 5, 6, 7] and sampler.get_indices(2, 4) == [8, 9]
    sampler.record_batch(0, 4)
    sampler.record_indices([4, 5])
    assert sampler.processed_indices == set(range(6))
    state = sampler.state_dict()
    sampler.set_epoch(1)
    assert sampler.processed_indices == set() and sampler.epoch == 1
    sampler.load_state_dict(state)
    assert list(sampler) == sampler.remaining_indices == [6, 7, 8, 9] and sampler.epoch == 0
