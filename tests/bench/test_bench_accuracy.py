"""bench accuracy: the task can be learned, gradients match the loss, the table, and a small run."""
from __future__ import annotations

import json

import numpy as np
import pytest

from bpsfast.bench import accuracy
from bpsfast.bench.accuracy import UNCOMPRESSED, task
from bpsfast.orchestration.errors import ConfigError, PeerLostError

TOPK = "topk:k=0.01,error_feedback"


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    return task.load()


def test_the_task_is_learned(digits):
    net = task.train(digits, 0, 12, 0, 1, lambda gradients, rate: gradients)
    assert task.accuracy(task.weights(0), digits) < 0.3 and task.accuracy(net, digits) > 0.95


def test_gradients_are_the_slopes_of_the_loss(digits):
    net = {name: weight.astype(np.float64) for name, weight in task.weights(3).items()}
    images, labels = digits.train_images[:8].astype(np.float64), digits.train_labels[:8]
    found = task.gradients(net, images, labels)

    def loss():
        x = images
        for layer in range(3):
            x = x @ net[f"{layer}.weight"] + net[f"{layer}.bias"]
            x = x if layer == 2 else np.maximum(x, 0)
        return float(np.mean(np.log(np.exp(x).sum(axis=1)) - x[np.arange(8), labels]))

    for name, at in (("0.weight", (20, 7)), ("1.weight", (3, 5)), ("2.weight", (100, 9)), ("2.bias", (4,))):
        net[name][at] += 1e-5
        above = loss()
        net[name][at] -= 2e-5
        below = loss()
        net[name][at] += 1e-5
        assert found[name][at] == pytest.approx((above - below) / 2e-5, rel=1e-4, abs=1e-8), name


def test_the_rate_falls_towards_the_end():
    rates = [task.rate_of(epoch, 90) for epoch in (0, 59, 60, 79, 80, 89)]
    assert np.allclose(np.array(rates) / rates[0], [1, 1, 0.1, 0.1, 0.01, 0.01])


def outcome(**accuracies):
    return {codec: [{"codec": codec, "accuracy": each, "sent_nbytes": 100.0} for each in found]
            for codec, found in accuracies.items()}


def test_the_table_says_what_is_not_kept():
    found = outcome(uncompressed=[0.98, 0.97]) | outcome(int8=[0.90, 0.90]) | {
        TOPK: outcome(x=[0.97, 0.969])["x"], "onebit:error_feedback": outcome(x=[0.977, 0.972])["x"]}
    lines = accuracy.report(found).splitlines()[2:]
    assert [line.endswith("NOT KEPT") for line in lines] == [False, False, True, False], "int8 promised nothing"
    assert accuracy.points(found, TOPK) == pytest.approx([-1.0, -0.1])
    by_codec = {each["chosen"]["codec"]: each["measured"] for each in accuracy.records(found)}
    assert by_codec[TOPK]["mean_points"] == pytest.approx(-0.55) and by_codec[UNCOMPRESSED]["mean_points"] == 0


def test_a_codec_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="no kind 'zip'"):
        accuracy.run({"codecs": "zip"})


def test_training_that_fails_is_told_with_its_words():
    with pytest.raises(PeerLostError, match=r"(?s)ended with [1-9].*no kind 'zip'"):
        accuracy.train(["zip"], 1, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_run_learns_with_fewer_bytes(digits, tmp_path):
    path = tmp_path / "out.jsonl"
    accuracy.run({"codecs": TOPK, "n_seeds": 1, "n_epochs": 12, "json_path": str(path)})
    manifest, plain, topk = map(json.loads, path.read_text().splitlines())
    assert manifest["bench"] == "accuracy"
    assert min(plain["measured"]["mean_accuracy"], topk["measured"]["mean_accuracy"]) > 0.93
    assert topk["measured"]["sent_nbytes"][0] < 0.25 * plain["measured"]["sent_nbytes"][0]
