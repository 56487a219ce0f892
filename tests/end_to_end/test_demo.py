"""The demo as `make demo` runs it, with fewer epochs: it must keep its own promises."""
from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def needs() -> None:
    for name in ("torch", "sklearn", "matplotlib"):
        pytest.importorskip(name, reason=f"{name} is not installed")


def run_demo(out: Path, *options: str) -> tuple[subprocess.CompletedProcess, dict]:
    """Run the demo; return how it ended and its summary."""
    done = subprocess.run([sys.executable, DIGITS / "demo.py", "--out", out, *options], cwd=out.parent,
                          capture_output=True, text=True, timeout=280, check=False)
    assert (out / "summary.json").exists(), done.stdout + done.stderr
    return done, json.loads((out / "summary.json").read_text())


def check(summary: dict, steps: int) -> None:
    assert summary["max_param_diff_vs_single_process"] == 0.0
    assert summary["ranks_agree"] is True
    assert (summary["ranks"], summary["nodes"], summary["helpers"], summary["steps"]) == (4, 2, 1, steps)
    machines = {"node0", "node1", "helper0"}
    for table in ("bytes_on_wire", "bytes_on_wire_predicted", "bytes_on_wire_ring", "bytes_summed"):
        assert set(summary[table]) == machines, table
    for machine in machines:
        assert summary["bytes_on_wire"][machine] == pytest.approx(summary["bytes_on_wire_predicted"][machine], rel=0.03)
        assert summary["bytes_summed"][machine] > 0
    assert summary["bytes_on_wire_ring"]["helper0"] == 0
    assert all("tcp" in how for how in summary["transports"].values())


def test_demo(tmp_path: Path) -> None:
    done, summary = run_demo(tmp_path / "demo", "--epochs", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    check(summary, steps=110)
    assert summary["test_accuracy"] >= 0.97
    assert (tmp_path / "demo" / "loss.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "demo" / "trace.json").read_text())["traceEvents"]
    assert {event.get("cat") for event in events} >= {"queue", "copy", "sum", "wire", "wait"}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "node 0", "node 1", "node 2", "rank 0", "rank 1", "rank 2", "rank 3"}
    times = [event["ts"] for event in events if "ts" in event]
    assert min(times) == 0.0 and max(times) < 600e6


def test_broken_promise_is_told_and_ends_with_1(tmp_path: Path) -> None:
    done, summary = run_demo(tmp_path / "demo", "--epochs", "1", "--loopback")
    assert summary["bytes_on_wire_source"] == "transport counters"
    check(summary, steps=22)
    assert done.returncode == 1
    assert "NO   test accuracy" in done.stdout


def load(name: str) -> ModuleType:
    """Return a module of the demo, which imports its neighbours by their bare names."""
    spec = importlib.util.spec_from_file_location(f"digits_{name}", DIGITS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("n_ranks", [3, 4])
def test_batches_divide_the_images_among_the_ranks(n_ranks: int) -> None:
    data = load("data")
    first, second = (data.batches(1437, n_ranks, 16, epoch) for epoch in (0, 1))
    assert first.shape == (1437 // (16 * n_ranks), n_ranks, 16)
    assert len(np.unique(first)) == first.size
    assert not np.array_equal(first, second)
    assert np.array_equal(first, data.batches(1437, n_ranks, 16, 0))


def test_difference_sees_a_missing_or_broken_parameter(tmp_path: Path) -> None:
    sys.path.insert(0, str(DIGITS))
    try:
        demo = load("demo")
    finally:
        sys.path.remove(str(DIGITS))
    one, other = tmp_path / "one.npz", tmp_path / "other.npz"
    np.savez(one, **{"parameter.a": np.array([1, 2], np.float32), "parameter.b": np.array([3], np.float32)})
    np.savez(other, **{"parameter.a": np.array([1, 2], np.float32)})
    assert math.isnan(demo.difference(one, other))
    np.savez(other, **{"parameter.a": np.array([1, np.nan], np.float32), "parameter.b": np.array([3], np.float32)})
    assert math.isnan(demo.difference(one, other))
    np.savez(other, **{"parameter.a": np.array([1, 2.5], np.float32), "parameter.b": np.array([3], np.float32)})
    assert demo.difference(one, other) == 0.5
    assert demo.difference(one, one) == 0.0
