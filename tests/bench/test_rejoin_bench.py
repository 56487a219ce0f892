"""The part "rejoin" of bench worker_loss: what its oracle detects, how the steps are counted, and a small run."""
from __future__ import annotations

import copy
import json

import pytest

from bpsfast.bench.worker_loss import parts, rejoin
from bpsfast.bench.worker_loss.rejoin import N_STEPS, WorkerHistory, judge

LOST, JOINED = 100, 400  # worker 1 is lost in step 100, and its replacement makes the steps from 401 on


def histories():
    """Steps take 10 ms, those while the replacement joins 20 ms, and the first with it half a second."""
    ends_s, now = [], 0.0
    for step in range(1, N_STEPS + 1):
        now += 0.02 if JOINED - 100 < step <= JOINED else 0.5 if step == JOINED + 1 else 0.01
        ends_s.append(now)
    digests = [str(step) for step in range(1, N_STEPS + 1)]
    whole = WorkerHistory(1, 0.0, [(1, 0), (2, 0)], ["first", "second"], [*range(1, N_STEPS + 1)], ends_s, digests,
                          [3] * N_STEPS, 0.97)
    newcomer = WorkerHistory(3, ends_s[JOINED - 100], [(2, 1)], ["second"], whole.steps[JOINED:], ends_s[JOINED:],
                             digests[JOINED:], [3] * (N_STEPS - JOINED), 0.97)
    return {0: whole, 2: copy.deepcopy(whole), 3: newcomer}


def test_the_steps_of_the_others_are_counted_until_the_replacement_has_made_one():
    found = judge(1, LOST, histories())
    assert not found.trouble and found.accuracy == 0.97
    assert found.rate == pytest.approx(100.0) and found.window_s == pytest.approx(99 * 0.02 + 0.5)
    assert found.rate_during == pytest.approx(100 / found.window_s) and found.pause_s == pytest.approx(0.5)


@pytest.mark.parametrize(("words", "change"), [
    ("parameters differ after step 7", lambda w: w[2].digests.__setitem__(6, "x")),
    ("parameters differ at the start of job 2", lambda w: w[3].first_digests.__setitem__(0, "x")),
    ("worker 2 has not made each step once", lambda w: w[2].steps.__setitem__(0, 2)),
    ("worker 2 ended without a word", lambda w: w.pop(2)),
    ("workers [] have replaced one", lambda w: w.pop(3))])
def test_what_is_wrong_is_noticed(words, change):
    found = histories()
    change(found)
    assert words in judge(1, LOST, found).trouble


def test_what_is_lacking_is_named(monkeypatch, capsys):
    monkeypatch.setattr(rejoin.importlib.util, "find_spec", lambda module: None)
    assert parts.run({"parts": "rejoin"})
    assert capsys.readouterr().out == ("rejoin is left out: torch and scikit-learn not installed (pip install torch "
                                       "scikit-learn)\n")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lost_worker_is_replaced_in_a_real_training(tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    path = tmp_path / "worker_loss.jsonl"
    assert parts.run({"parts": "rejoin", "n_rejoin": 1, "json_path": str(path)}), capsys.readouterr().out
    _, row = [json.loads(line) for line in path.read_text().splitlines()]
    undisturbed, trial = row["measured"]["trials"]
    assert min(undisturbed["accuracy"], trial["accuracy"]) >= 0.95
