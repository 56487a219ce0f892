"""`bench push_pull` beside MPI libraries: the ratios of paired blocks, the commands, and a short run."""
from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from bpsfast.bench import push_pull
from bpsfast.bench.push_pull import mpi_environments, paired
from bpsfast.bench.push_pull.options import PAIRED
from bpsfast.orchestration.errors import ConfigError


def test_the_better_way_of_mpi_counts_round_by_round():
    medians = {"mpi": [4.0, 9.0, 5.0], "mpi in pieces": [5.0, 3.0, 5.0], "mpi out": [1.0, 1.0, 1.0], "numpy": [1, 1, 1]}
    assert paired.best_mpi_us(medians) == [4.0, 3.0, 5.0]
    assert paired.best_mpi_us(medians, " out") == [1.0, 1.0, 1.0]


def test_rows_of_a_result_file_keep_each_block():
    block = {"median_s": 2e-6, "mean_s": 3e-6, "p99_s": 4e-6, "cpu_s": 5e-6}
    record = {"nbytes": 64, "n_calls": 2000, "handover_ns": [60.0, 70.0], "direct_sums": "auto",
              "blocks": {"numpy": [block, {**block, "median_s": 3e-6}], "mpi": [block, block]}}
    rows = paired.rows(record, paired.ALONE, "impi", 2)
    assert [row["chosen"]["operation"] for row in rows] == ["numpy", "mpi"]
    assert rows[0]["measured"]["samples_s"] == [2e-6, 3e-6] and rows[0]["measured"]["p99_s"] == [4e-6, 4e-6]
    others = paired.rows(record, "after 300 us of work", "impi", 2)
    found = paired.samples_us([*rows, *others, {"section": "by size"}])
    assert found == {("impi", 64): {"numpy": pytest.approx([2.0, 3.0]), "mpi": pytest.approx([2.0, 2.0])}}


def test_a_ratio_is_of_blocks_that_follow_each_other():
    # the machine was four times as slow in two rounds: both slowed down
    ratio, low, high = paired.interval([1.0, 4.0, 1.0, 4.0, 1.0], [2.0, 8.0, 2.1, 8.0, 1.9])
    assert ratio == pytest.approx(2.0) and 1.89 <= low <= 2.0 <= high <= 2.11
    ratio, low, high = paired.interval([1.0] * 5, [0.5, 2.0, 0.6, 3.0, 1.0])
    assert low < 1.0 < high, "no difference is shown"


def test_names_of_libraries():
    with pytest.raises(ConfigError, match="'open' is none of gloo, mpi, mpich, impi"):
        push_pull.run({"compare": "open"})


def test_ranks_of_pypis_libraries_are_started_in_an_environment_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mpiexec, *rest = mpi_environments.command("impi", 3, ["-m", "x"])
    python = rest[2]
    assert mpiexec.startswith(str(tmp_path)) and rest[:2] == ["-n", "3"] and rest[3:] == ["-m", "x"]
    assert python.startswith(str(tmp_path)) and python != sys.executable


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI's mpirun is not on the PATH")
def test_ranks_of_both_libraries_measure_in_turns():
    pytest.importorskip("mpi4py")
    plan = {"sizes": [64], "n_rounds": 2, "gap_us": 50, "names": ["numpy", "numpy out", "segment", "mpi", "mpi out"]}
    done = subprocess.run(mpi_environments.command("mpi", 2, ["-m", "bpsfast.bench.push_pull.paired_rank",
                                                             json.dumps(plan)]),
                          capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(PAIRED)]
    record = json.loads(line.removeprefix(PAIRED))
    assert set(record["blocks"]) == set(plan["names"]) and record["nbytes"] == 64
    for rounds in record["blocks"].values():
        assert len(rounds) == 2 and all(0 < each["median_s"] <= each["p99_s"] for each in rounds)
