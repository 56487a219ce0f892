"""bench helpers finds different bits, long pauses, and trainings without any change of helpers."""
from __future__ import annotations

import itertools
import json

import pytest

from bpsfast.bench.helpers import Training, judge, run

STEP_S = 0.1
N_STEPS = 60


def training(*, long_s=0.0, digest="d", lost=1, joined=2, lost_at_s=0.0, started_at_s=0.0):
    """Return a training whose step 30 takes *long_s* longer than the others."""
    at_s = list(itertools.accumulate([STEP_S + (long_s if step == 30 else 0.0) for step in range(N_STEPS)]))
    ends = [{"digest": digest, "lost": lost, "joined": joined}] * 3
    return Training(at_s, ends, lost_at_s, started_at_s)


def disturbed(**fields):
    return training(lost_at_s=2.95, started_at_s=4.5, **fields)


@pytest.mark.parametrize(("calm", "other", "words"), [
    (training(), disturbed(), []),
    (training(), disturbed(long_s=STEP_S), []),
    (training(), disturbed(long_s=0.3), ["two are lost: a step took 0.400 s"]),
    (training(), disturbed(digest="other"), ["the parameters are not the same to the bit"]),
    (training(), disturbed(joined=1), [f"the node of rank {i} has lost helpers 1 times and got 1" for i in range(3)]),
    (training(), disturbed(lost=0), [f"the node of rank {i} has lost helpers 0 times and got 2" for i in range(3)]),
], ids=["right", "a pause of a step", "a pause of three", "other bits", "not all came", "nobody was lost"])
def test_a_verdict_says_what_is_wrong(calm, other, words):
    rows, troubles = judge(calm, other)
    assert [row[0] for row in rows] == ["helpers stay", "4 helpers", "two are lost", "two others come"]
    assert len(troubles) == len(words)
    assert all(trouble.startswith(said) for trouble, said in zip(troubles, words))


def test_a_short_one_is_run_and_written_down(tmp_path):
    path = tmp_path / "helpers.jsonl"
    run({"steps": 60, "size_mb": 0.5, "placement": "ps", "json_path": str(path)})  # pauses depend on the machine
    machine, verdict, calm, other = [json.loads(line) for line in path.read_text().splitlines()]
    assert "machine" in machine and not [words for words in verdict["troubles"] if "took" not in words]
    assert len({end["digest"] for end in (*calm["ends"], *other["ends"])}) == 1
    assert all(end["lost"] >= 1 and end["joined"] == 2 for end in other["ends"])
    assert len(other["at_s"]) == len(calm["at_s"]) >= 60
