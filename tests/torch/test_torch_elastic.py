"""TorchState and ElasticSampler in real elastic jobs: a lost worker costs no bit and no sample."""
from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.matrix

pytest.importorskip("torch")

_ROOT = Path(__file__).resolve().parents[2]


def trained(folder, policy, kind, victim="-", at_step="-", moment="after"):
    """Run a job of three workers on two nodes; return each worker's results."""
    folder.mkdir()
    command = [sys.executable, "-m", "bpsfast", "run", "-n", "3", "--nodes", "2", "--elastic", "--lost-worker", policy,
               "--", sys.executable, "-m", "tests.support.elastic_torch_training", str(folder), kind, victim, at_step,
               moment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=_ROOT,
                          env={**os.environ, "PYTHONPATH": str(_ROOT), "BPSFAST_TIMEOUT_S": "60"})
    assert done.returncode == 0, done.stderr
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same without a loss, by DistributedOptimizer; the other kinds have its bits."""
    found = trained(tmp_path_factory.mktemp("elastic") / "none", "wait", "opt")
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["opt", "cross", "ddp"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_replaced_worker_changes_no_bit(tmp_path, undisturbed, kind, victim):
    found = trained(tmp_path / kind, "wait", kind, str(victim), "25")
    assert set(found) == {0, 1, 2, 3} - {victim}
    assert all(each == undisturbed for each in found.values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("policy", "victim"), [("wait", 0), ("wait", 2), ("shrink", 1)])
def test_who_is_lost_while_the_others_make_a_module_is_as_any_other(tmp_path, undisturbed, policy, victim):
    found = trained(tmp_path / "making", policy, "ddp", str(victim), moment="making")
    assert set(found) == ({0, 1, 2, 3} if policy == "wait" else {0, 1, 2}) - {victim}
    first = found[2 if victim != 2 else 0]
    assert all(each == first for each in found.values())
    assert first["size"] == (3 if policy == "wait" else 2)
    if victim == 2:
        assert first == undisturbed
    elif policy == "wait":  # rank 0, whose model all get, is another worker
        assert first["used"] == undisturbed["used"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "moment"), [("opt", "after"), ("ddp", "after"), ("opt", "before"),
                                              ("cross", "before"), ("cross", "stepped"), ("ddp", "before")])
def test_a_smaller_job_uses_every_sample_of_an_epoch(tmp_path, undisturbed, kind, moment):
    """Killed before backward: the others' gradients are under way, and never come to an end. Killed when it has stepped
    across the barrier: so are their updates.
    """
    found = trained(tmp_path / kind, "shrink", kind, "0", "25", moment)
    assert set(found) == {1, 2} and found[1] == found[2] and found[1]["size"] == 2
    assert found[1]["weights"] != undisturbed["weights"]
    for epoch in range(2):
        count = collections.Counter(i for e, used in found[1]["used"] for i in used if e == epoch)
        assert set(count) == set(range(480)) and max(count.values()) == 1
