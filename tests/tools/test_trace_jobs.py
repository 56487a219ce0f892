"""Traces of real jobs: machines whose clocks differ by hours, and what urgent partitions wait for."""
from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from types import ModuleType

import msgspec
import numpy as np
import pytest

import bpsfast
from bpsfast import trace
from bpsfast.base.trace_records import CREDIT
from bpsfast.launch import local_job as launch

_AHEAD_S = 40_000


def checker(name: str = "trace_format") -> ModuleType:
    """Import a module beside this one: ranks, which load this file too, do not find it."""
    return importlib.import_module(f"tests.support.{name}")


def pushes(n_steps):
    """On every rank: steps of three tensors, the first of which is the most urgent."""
    found = []
    for _ in range(n_steps):
        for name, n in (("first", 30_000), ("second", 100_000), ("third", 250_000)):
            found.append(float(bpsfast.push_pull(np.full(n, bpsfast.rank() + 1, "f4"), average=False, name=name)[-1]))
    return found


def in_another_time(argv):
    """Wrap a command so that its monotonic clock is hours ahead."""
    return ["unshare", "--time", "--monotonic", str(_AHEAD_S), "--fork", "--kill-child", *argv]


@pytest.fixture
def time_namespaces():
    """Skip where none can be made."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    probe = subprocess.run(in_another_time([sys.executable, "-c", "import time; print(time.monotonic())"]),
                           capture_output=True, text=True, timeout=20, check=False)
    if probe.returncode:
        pytest.skip(f"no time namespace: {probe.stderr.strip()}")


@pytest.mark.root
def test_a_machine_hours_ahead_comes_onto_the_schedulers_clock(tmp_path, time_namespaces, job, monkeypatch):
    """Node 1 and its rank live in a time namespace of their own: no byte arrives before it was sent."""
    plan = launch.plan

    def elsewhere(*arguments, **values):
        commands = plan(*arguments, **values)
        return [each if each.environ.get("BPSFAST_NODE_INDEX") != "1" else
                msgspec.structs.replace(each, argv=tuple(in_another_time(each.argv))) for each in commands]

    monkeypatch.setattr(launch, "plan", elsewhere)
    started = job(ranks=(1, 1), transport="tcp", trace_dir=str(tmp_path), partition_bytes=65_536)
    assert started.run(pushes, 4) == [[3.0] * 12] * 2
    started.close()
    nodes = [trace.read(next(tmp_path.glob(f"node-{index}-*"))) for index in (0, 1)]
    assert abs(nodes[1].base_ns - nodes[0].base_ns - _AHEAD_S * 10**9) < 60 * 10**9  # they do differ
    assert nodes[0].clock_id != nodes[1].clock_id

    whole = trace.load(tmp_path)
    uncertainty_ns = 2 * whole.clocks.uncertainty_ns  # of the one end and of the other
    assert whole.clocks.number == 2 and not whole.clocks.unknown and 0 < uncertainty_ns < 10**9
    sent = {(process.node, span.args["peer"], *span.key): span for process in whole.processes
            for span in process.spans if span.kind == "wire"}
    received = {(span.args["peer"], process.node, *span.key): span for process in whole.processes
                for span in process.spans if span.kind == "receive"}
    assert len(sent) >= 4 * 20 and set(sent) == set(received)
    for key, arrival in received.items():  # both ways, so that the offset may be neither too large nor too small
        assert sent[key].begin_ns - uncertainty_ns <= arrival.begin_ns
    assert {node for node, *_ in sent} == {0, 1}
    trace.merge(tmp_path, tmp_path / "trace.json")
    checker().check(tmp_path / "trace.json")


def test_an_urgent_partition_waits_at_most_one_window_of_credit(tmp_path, job):
    """Two partitions of credit: whatever is urgent has no more than that of less urgent bytes ahead of it."""
    started = job(ranks=(1, 1), transport="tcp", trace_dir=str(tmp_path), partition_bytes=65_536, credit_bytes=131_072,
                  trace_first_step=2, trace_last_step=5)
    started.run(pushes_at_once, 8)
    started.close()
    trace.merge(tmp_path, tmp_path / "trace.json")
    checker().check(tmp_path / "trace.json")
    told = trace.summarise(trace.reload(tmp_path / "trace.json")).data()
    assert told["writes"] > 50 and told["inversions"] == 0
    assert 0 < told["less_urgent_ahead_nbytes"] <= told["credit_window_nbytes"] == 131_072
    whole = trace.load(tmp_path)
    rounds = {span.args["round"] for process in whole.processes for span in process.spans}
    assert rounds == {2, 3, 4, 5}  # only the steps that were asked for, on ranks, engines, connections and in the queue
    assert {span.kind for process in whole.processes for span in process.spans} >= {
        "push", "gather", "queue", "sum", "wire", "receive", CREDIT, "wait"}
    checker("perfetto").check(tmp_path / "trace.json")  # last: it skips the test where it cannot be asked


def pushes_at_once(n_steps):
    """On every rank: all gradients in backward order, so that the most urgent one comes last."""
    layers = {f"layer{i}": ((60_000,), "f4") for i in range(8)}
    gradients = bpsfast.Gradients(layers, group_small=False)
    for _ in range(n_steps):
        for name in reversed(layers):
            gradients[name][:] = 1.0
            gradients.ready(name)
        for name in layers:
            gradients.wait(name)
        gradients.step()
