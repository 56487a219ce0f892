"""Plots of existing results."""
from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bpsfast.bench import drawn
from bpsfast.bench.harness import plots


def test_times_and_steps_are_those_of_the_records() -> None:
    def row(operation: str, median_s: float, section: str = "by size") -> dict:
        return {"section": section, "chosen": {"operation": operation, "nbytes": 8}, "measured": {"median_s": median_s}}

    rows = [row("torch", 2.0), row("numpy", 1.0), row("gloo", 8.0), row("mpi", 6.0), row("mpi 4 MB", 3.0),
            row("memory", 0.5), row("gloo", 99.0, "latency")]
    assert drawn.times_ours(rows) == {"gloo": {8: 4.0}, "Open MPI, the best of three ways": {8: 1.5},
                                      "bpsfast, arrays of bpsfast.empty": {8: 0.5}}
    way = {"chosen": {"way": "fifo"}, "measured": {"median_s": 3.0, "alone_s": 2.0}, "simulated": {"step_s": 2.5}}
    assert drawn.steps([way]) == {"fifo": (1.5, 1.25)}
    assert drawn.seconds_and_steps({"at_s": [5.0, 5.25, 6.0]}) == ([0.25, 1.0], [250.0, 750.0])


def test_the_kept_results_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (lacking := plots.missing()) is not None:
        pytest.skip(lacking)
    done = CliRunner().invoke(drawn.main, ["--out", str(tmp_path / "plots")])
    assert done.exit_code == 0, done.output
    for name in ("push_pull_one_machine.png", "schedule.png", "helpers.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(drawn, "RESULTS", tmp_path)
    done = CliRunner().invoke(drawn.main, ["--out", str(tmp_path / "plots")])
    assert done.exit_code == 2 and "bpsfast bench push_pull --compare gloo,mpi --json" in done.output


def test_results_without_the_others_are_refused_with_the_command_that_has_them(tmp_path: Path,
                                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    if (lacking := plots.missing()) is not None:
        pytest.skip(lacking)
    kept = (drawn.RESULTS / "push_pull_one_machine.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "push_pull_one_machine.jsonl").write_text("".join(
        line for line in kept if '"operation": "mpi' not in line))
    monkeypatch.setattr(drawn, "RESULTS", tmp_path)
    done = CliRunner().invoke(drawn.main, ["--out", str(tmp_path / "plots")])
    assert done.exit_code == 2 and "has no rows of mpi" in done.output and "--compare gloo,mpi" in done.output
