"""bench ddp: results of its collectives, refused options, the report, and one small run. No test asserts a time."""
from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="torch")

from bpsfast.bench import ddp  # noqa: E402
from bpsfast.bench.ddp import report  # noqa: E402
from bpsfast.bench.ddp.collectives import Call, expected  # noqa: E402
from bpsfast.bench.ddp.models import MODELS, batch, network  # noqa: E402
from bpsfast.bench.harness.contestant_group import Group  # noqa: E402
from bpsfast.bench.harness.samples import Row  # noqa: E402
from bpsfast.orchestration.errors import ConfigError  # noqa: E402


class NamedGroup(Group):
    """A group without processes: rows need only its name."""

    def __init__(self, name):
        self.name = name


def rows(name, nbytes, gloo_s, ours_s, n_wrong=0):
    return [Row(NamedGroup(backend), name, nbytes, samples_s=[took_s], cpu_busy=[0.5], cpu_s=[0.1], n_wrong=n_wrong)
            for backend, took_s in (("gloo", gloo_s), ("bpsfast", ours_s))]


@pytest.mark.parametrize("name", MODELS)
def test_models_are_as_large_as_they_say_and_the_same_each_time(name):
    model = network(name)
    assert sum(p.numel() * p.element_size() for p in model.parameters()) == MODELS[name].nbytes
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), network(name).parameters()))
    inputs, labels = batch(name, 1, 3)
    assert model(inputs).shape == (MODELS[name].n_samples, 10) and torch.equal(inputs, batch(name, 1, 3)[0])
    assert not torch.equal(inputs, batch(name, 0, 3)[0]) and labels.max() < 10


def test_what_each_rank_must_find():
    call = Call(torch.zeros(4), torch.zeros(4), lambda: None)
    found = {name: [expected(name, call, rank, 2).tolist() for rank in (0, 1)] for name in
             ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send/recv")}
    assert found == {
        "all_reduce": [[1, 3, 5, 7]] * 2, "broadcast": [[0, 1, 2, 3]] * 2,
        "all_gather": [[0, 1, 2, 3, 1, 2, 3, 4]] * 2, "reduce_scatter": [[1, 3], [5, 7]],
        "all_to_all": [[0, 1, 1, 2], [2, 3, 3, 4]], "send/recv": [[1, 2, 3, 4], [0, 1, 2, 3]]}


@pytest.mark.parametrize(("options", "text"), [
    ({"n_ranks": 1}, "2 or more, got 1"), ({"operations": "all_reduce,bcast"}, "'bcast' is none of all_reduce, "),
    ({"sizes": "3"}, "is no size")])
def test_what_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        ddp.run(options)


def test_the_report_says_how_many_times_as_fast_and_whether_losses_agree():
    losses = {"gloo": [{"comm-bound": [0.5, 0.25]}] * 2, "bpsfast": [{"comm-bound": [0.5, 0.25]}] * 2}
    said = report.text(rows("comm-bound", 100, 0.3, 0.2), losses, rows("broadcast", 1024, 1e-4, 2e-4, n_wrong=3))
    step, collective = (line.split() for line in said.splitlines() if line.startswith(("comm-bound", "broadcast")))
    assert step == ["comm-bound", "0.00", "300.00", "200.00", "1.50", "2", "alike"]
    assert collective == ["broadcast", "1024", "100.00", "200.00", "0.50", "6"]
    other = {**losses, "bpsfast": [{"comm-bound": [0.5, 0.25000001]}] * 2}
    assert "DIFFER" in report.text(rows("comm-bound", 100, 0.3, 0.2), other, [])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_small_run(tmp_path):
    ddp.run({"quick": True, "sizes": "4K", "json_path": str(tmp_path / "ddp.jsonl")})
    manifest, *found = map(json.loads, (tmp_path / "ddp.jsonl").read_text().splitlines())
    assert manifest["bench"] == "ddp"
    steps = [each for each in found if each["section"] == "step"]
    assert [(each["chosen"]["operation"], each["chosen"]["contestant"]) for each in steps] == [
        (model, backend) for model in MODELS for backend in ("gloo", "bpsfast")]
    for step in steps:
        assert step["measured"]["losses_alike"] and len(step["measured"]["losses"]) >= 3
    collectives = [each for each in found if each["section"] == "collective"]
    assert len(collectives) == 12 and all(each["measured"]["n_wrong"] == 0 for each in collectives)
