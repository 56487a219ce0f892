"""bench frameworks: its table, and one small run. No test asserts a time."""
from __future__ import annotations

import json

import pytest

from bpsfast.bench import frameworks
from bpsfast.bench.frameworks.rank import FRAMEWORKS, WORKLOADS, lacking
from bpsfast.orchestration.errors import ConfigError, PeerLostError


def test_the_table_says_what_is_above_the_target():
    records = [{"workload": "64 MB", "row": row, "median_s": seconds, "best_s": seconds}
               for row, seconds in (("numpy", 0.1), ("numpy, out=", 0.15), ("jax eager", 0.11), ("jax jit", 0.13))]
    _, base, out, eager, jitted = frameworks.text(records).splitlines()
    assert base.endswith("+0%") and out.endswith("+50%") and eager.endswith("+10%")
    assert jitted.endswith("+30%  above the target")


def test_what_is_refused():
    with pytest.raises(ConfigError, match="needs a rank"):
        frameworks.run({"n_ranks": 0})


def test_a_job_that_fails_is_an_error_in_words(monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(PeerLostError, match=r"job of 2 ranks .* ended with exit code 1"):
        frameworks.run({"quick": True})


@pytest.mark.slow
def test_a_small_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BPSFAST_TRANSPORT", "nope")  # the measured job ignores settings of the user
    path = tmp_path / "frameworks.jsonl"
    records = frameworks.run({"quick": True, "json_path": str(path)})
    assert [json.loads(line) for line in path.read_text().splitlines()] == records
    found = {(record["workload"], record["row"]) for record in records[1:]}
    assert {(workload, "numpy") for workload in WORKLOADS} <= found
    if lacking(FRAMEWORKS["jax_rows"]) is None:
        assert {(workload, "jax jit") for workload in WORKLOADS} <= found
    assert "overhead" in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_installed_in_part_has_no_row_and_one_line(tmp_path, monkeypatch, capfd):
    for name in ("jax", "tensorflow"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text(f"import {name}lib_that_is_not_there\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    records = frameworks.run({"quick": True, "n_ranks": 1})
    assert {record["row"].partition(",")[0] for record in records[1:]} == {"numpy"}
    out = capfd.readouterr().out
    for name in ("jax", "tensorflow"):
        assert out.count(f"no rows of {name}: No module named '{name}lib_that_is_not_there'") == 1
