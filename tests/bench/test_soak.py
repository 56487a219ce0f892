"""A soak: a short one finds nothing, and growth is detected."""
from __future__ import annotations

import json

import numpy as np
import pytest

from bpsfast.bench.soak import Usage, growth, run
from bpsfast.bench.soak.rank import PERIOD, SIZES, added, base


def usages(process="node 0", private_nbytes=lambda i: 80_000_000, n_fds=lambda i: 30, n_threads=lambda i: 9, n=100):
    return [Usage(process, float(i), private_nbytes(i), n_fds(i), n_threads(i)) for i in range(n)]


def test_no_two_elements_are_the_same_and_no_input_is_nothing():
    every = np.concatenate([base(gradient) for gradient in range(len(SIZES))])
    assert len(np.unique(every)) == len(every) == sum(SIZES)
    assert added(0, PERIOD - 1) + 1 == added(1, PERIOD - 1) and added(0, 0) == added(0, PERIOD) == 1
    most = 8 * (int(every.max()) + added(7, PERIOD - 1))
    assert np.float32(most) == most and np.float32(most - 1) == most - 1, "all sums of eight ranks are exact"


def test_what_stays_is_no_growth_and_neither_is_the_warm_up():
    assert growth(usages()) == []
    assert growth(usages(private_nbytes=lambda i: 80_000_000 + min(i, 15) * 5_000_000,
                         n_fds=lambda i: min(i, 20))) == []
    assert growth(usages(private_nbytes=lambda i: 80_000_000 + i % 7 * 100_000,
                         n_threads=lambda i: 9 + (i == 95))) == []


def test_what_grows_is_named():
    [words] = growth([*usages("rank 0"), *usages(private_nbytes=lambda i: 80_000_000 + i * 100_000)])
    assert words.startswith("node 0: private_nbytes has grown from 8")
    [words] = growth(usages(n_fds=lambda i: 30 + i // 40))
    assert words == "node 0: n_fds has grown from 30 to 32"
    [words] = growth(usages(n_threads=lambda i: 9 + (i > 60)))
    assert words == "node 0: n_threads has grown from 9 to 10"
    assert growth([]) == ["nothing was seen: the job ended at once"]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_worker_is_lost_and_replaced_in_a_short_one(tmp_path):
    path = tmp_path / "soak.jsonl"
    run({"minutes": 0.3, "transport": "auto", "losses": 1, "json_path": str(path)})  # too short to judge growth
    _, summary, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert summary["losses"] == 1 and summary["jobs"] == 2 and summary["wrong"] == 0 and summary["steps"] >= 100
    assert not [each for each in summary["troubles"] if "has grown" not in each]
    assert {row["process"] for row in rows} == {"launcher", "worker 0"}


def test_a_short_one_is_run_and_written_down(tmp_path):
    path = tmp_path / "soak.jsonl"
    run({"minutes": 0.1, "transport": "auto", "json_path": str(path)})  # too short to judge growth
    machine, summary, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert "machine" in machine and summary["steps"] >= 100
    assert not [each for each in summary["troubles"] if "has grown" not in each]
    ranks = {f"rank {rank}" for rank in range(3)}
    assert {row["process"] for row in rows} == {"scheduler", "node 0", "node 1", "helper 0", *ranks}
