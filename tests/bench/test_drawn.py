"""Plots of existing results."""
from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bpsfast.bench import drawn
from bpsfast.bench.harness import plots
from bpsfast.bench.push_pull import paired


def test_times_and_steps_are_those_of_the_records() -> None:
    def row(operation: str, library: str, *samples_s: float, condition: str = paired.ALONE) -> dict:
        return {"section": paired.SECTION, "measured": {"samples_s": list(samples_s)}, "chosen": {
            "operation": operation, "nbytes": 8, "library": library, "condition": condition}}

    ours = [row(name, library, 1e-6, 2e-6, 3e-6) for name in ("numpy", "torch", "backend", "gloo")
            for library in ("mpi", "mpich", "impi")]
    theirs = [row("mpi", "mpi", 4e-6, 5e-6), row("mpi in pieces", "mpi", 2e-6, 9e-6), row("mpi", "mpich", 7e-6),
              row("mpi", "impi", 8e-6), row("mpi", "impi", 99e-6, condition="beside one busy process")]
    found = drawn.times_us([*ours, *theirs, {"section": "by size"}])
    assert found["bpsfast, NumPy"] == {8: pytest.approx(2.0)} and found["Open MPI"] == {8: pytest.approx(3.5)}
    assert found["MPICH"] == {8: pytest.approx(7.0)} and found["Intel MPI"] == {8: pytest.approx(8.0)}
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
    assert done.exit_code == 2 and "bpsfast bench push_pull --compare gloo,mpi,mpich,impi --json" in done.output


def test_results_without_the_others_are_refused_with_the_command_that_has_them(tmp_path: Path,
                                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    if (lacking := plots.missing()) is not None:
        pytest.skip(lacking)
    kept = (drawn.RESULTS / "push_pull_one_machine.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "push_pull_one_machine.jsonl").write_text("".join(
        line for line in kept if '"library": "impi"' not in line))
    monkeypatch.setattr(drawn, "RESULTS", tmp_path)
    done = CliRunner().invoke(drawn.main, ["--out", str(tmp_path / "plots")])
    assert done.exit_code == 2 and "has no rows of Intel MPI" in done.output and "--compare gloo,mpi" in done.output
