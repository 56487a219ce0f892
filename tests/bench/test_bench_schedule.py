"""bench schedule: the timed network, refused options, the report, and one small run on real packets."""
from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch", reason="torch")

from bpsfast.bench import schedule  # noqa: E402
from bpsfast.bench.harness.samples import Row  # noqa: E402
from bpsfast.bench.schedule import methods, report  # noqa: E402
from bpsfast.bench.schedule.methods import Setup, divided  # noqa: E402
from bpsfast.bench.schedule.timed_network import TimedLayer, data, network  # noqa: E402
from bpsfast.launch.namespaces import netns  # noqa: E402
from bpsfast.orchestration.errors import ConfigError  # noqa: E402

SETUP = Setup(4, 2, "vgg16", 32, 0.75, 1e8, 0.5)


def test_layers_take_their_share_of_the_time_and_the_tensors():
    job = divided("vgg16", 512, 0.3)
    assert job.compute_s == pytest.approx(0.3) and job.nbytes == pytest.approx(553.4e6 / 512, rel=0.01)
    net = network(job)
    began = time.perf_counter()
    net(data(0, 0)).sum().backward()
    assert time.perf_counter() - began >= 0.3
    shapes = [job.shapes[name] for layer in job.layers for name in layer.tensors]
    assert [tuple(weight.shape) for weight in net.parameters()] == shapes


def test_gradients_depend_on_the_ranks_data_and_are_there_layer_by_layer_from_the_last():
    job = divided("vgg16", 4096, 0.0)
    found = []
    for rank in (0, 1):
        net = network(job)
        seen: list[int] = []
        for index, layer in enumerate(net):
            for weight in layer.weights:
                weight.register_post_accumulate_grad_hook(lambda _, index=index, seen=seen: seen.append(index))
        net(data(rank, 0)).sum().backward()
        assert seen == sorted(seen, reverse=True) and set(seen) == {i for i, la in enumerate(job.layers) if la.tensors}
        found.append([weight.grad.clone() for weight in net.parameters()])
    assert all(torch.isfinite(a).all() and a.abs().max() > 0 and not torch.equal(a, b) for a, b in zip(*found))


def test_weights_are_the_same_in_every_process():
    job = divided("vgg16", 4096, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(network(job).parameters(), network(job).parameters()))
    assert all(isinstance(layer, TimedLayer) for layer in network(job))


def test_the_time_to_compute_follows_from_what_links_move():
    assert SETUP.computing(1e7).compute_s == pytest.approx(0.75 * 1.2 * SETUP.nbytes / 1e7)  # t* B/M of 4 + 2 is 1.2


@pytest.mark.parametrize(("options", "text"), [
    ({"ways": "fifo|lifo"}, "'lifo' is none of fifo, "), ({"model": "vgg16/x"}, "expected a built-in model and a div"),
    ({"model": "vgg16/0"}, "expected a built-in model and a div"), ({"model": "vgg17/2"}, "'vgg17' is unknown"),
    ({"n_workers": 1}, "1 worker exchanges nothing"),
])
def test_what_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        schedule.run(options)


def test_without_namespaces_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(netns, "missing", lambda: "network namespaces need root")
    with pytest.raises(ConfigError, match="links of their own: network namespaces need root"):
        schedule.run({"ways": "fifo"})


def found(digests):
    rows = [Row(None, "step", SETUP.nbytes, label=name, samples_s=[took_s], cpu_busy=[0.5])
            for name, took_s in (("fifo", 1.5), ("priority, crossing", 1.0), ("DDP gloo", 1.8),
                                 ("gloo fifo, crossing", 2.0))]
    return report.Found(SETUP.computing(1e7), 1e7, Row(None, "alone", SETUP.nbytes, samples_s=[0.1]),
                        (0.6, 1.3, 0.05), rows, digests)


def test_the_report_sets_steps_beside_the_simulators():
    same = {name: [(9, "abc")] * 4 for name in ("fifo", "priority, crossing", "DDP gloo")}
    text = report.text(found(same))
    assert "priority and crossing over fifo with a barrier: 1.50 times as fast (simulated 1." in text
    assert "over DDP with gloo: 1.80 times as fast (simulated 1." in text
    assert "after 9 steps the weights of fifo, priority, crossing are the same, bit for bit" in text
    fifo = next(line for line in text.splitlines() if line.startswith("fifo"))
    assert fifo.split()[1] == "1.500" and fifo.split()[4] == "1.400"


def test_weights_that_differ_are_told():
    assert "DIFFER between the ranks of fifo" in report.weights_agree(found({"fifo": [(9, "a"), (9, "b")]}))
    assert "DIFFER between fifo, priority" in report.weights_agree(
        found({"fifo": [(9, "a")], "priority": [(9, "b")], "DDP gloo": [(9, "c")]}))


def test_what_is_simulated_gains_by_urgency_and_by_crossing():
    each = found({})
    steps = {name: report.simulated_s(each, name) for name in methods.METHODS}
    assert steps["priority, crossing"] * 1.15 < min(steps["fifo, crossing"], steps["fifo"]) < steps["DDP gloo"]
    assert steps["gloo priority, crossing"] * 1.1 < steps["gloo fifo, crossing"]


@pytest.mark.thorough
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_small_run_on_real_packets(tmp_path):
    lacking = netns.missing()
    if lacking is not None:
        pytest.skip(lacking)
    names = ["fifo", "priority, crossing", "DDP gloo", "gloo priority, crossing"]
    records = schedule.run({"n_workers": 2, "n_helpers": 1, "model": "vgg16/1024", "ways": "|".join(names),
                            "n_rounds": 1, "json_path": str(tmp_path / "schedule.jsonl")})
    assert [record["chosen"]["way"] for record in records[1:]] == names
    for record in records[1:]:
        assert record["measured"]["n_wrong"] == 0 and record["measured"]["exposed_s"] < record["measured"]["median_s"]
        assert len({digest for _, digest in record["measured"]["digests"]}) == 1
    ours = [record["measured"]["digests"][0] for record in records[1:3]]
    assert ours[0] == ours[1], "the same bits by urgency, crossing the barrier, as by arrival with it"
