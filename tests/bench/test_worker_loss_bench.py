"""bench worker_loss: the schedule, the steps around a loss, verdicts, statistics, tables, and small runs."""
from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from bpsfast.bench.harness import result_file
from bpsfast.bench.harness.samples import Row
from bpsfast.bench.worker_loss import cost, parts, report, torchft_trial
from bpsfast.bench.worker_loss.training import COMPUTES, N_RANKS, WAITS, History, Inputs, Progress
from bpsfast.bench.worker_loss.trial import (
    LEASE_S,
    N_AROUND,
    Around,
    Kind,
    Schedule,
    Trial,
    await_ends,
    draw,
    judge,
    measure,
    strike,
)
from bpsfast.orchestration.errors import ConfigError, StallError

STEP_S, SLOW_S, N_BEFORE, N_LATER = 0.5, 2.0, 30, 40
#: A rank is killed in the middle of a step.
STRUCK_S = N_BEFORE * STEP_S + 0.25


def history(loss_s=SLOW_S, without=1, later_s=STEP_S, **fields):
    """Return a history whose step `N_BEFORE` takes *loss_s*; the one *without* steps later is the first of three."""
    steps_s = [STEP_S] * N_BEFORE + [loss_s] + [STEP_S] * without + [later_s] * N_LATER
    members = [N_RANKS] * (N_BEFORE + without) + [N_RANKS - 1] * (N_LATER + 1)
    return History(list(itertools.accumulate(steps_s)), members, losses=[([3], 0.125)], **fields)


def trial(contestant="four machines, rank", index=0, lost="rank", lost_s=(1.0, 1.0, 1.0), **fields):
    around = [Around(longest_s=STEP_S + each, calm_s=0.0, median_s=STEP_S, around_s=N_AROUND * STEP_S + each,
                     lost_s=each) for each in lost_s]
    return Trial(contestant, index, lost, 3, "waits", around, [0.125] * len(around), **fields)


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="--parts price: 'price' is none of cost, pause, torchft"):
        parts.run({"parts": "price"})
    with pytest.raises(ConfigError, match="'3' is no size"):
        parts.run({"parts": "cost", "sizes": "3"})


def test_schedules_are_drawn_from_their_number_alone():
    drawn = [draw(i) for i in range(200)]
    assert drawn == [draw(i) for i in range(200)] and len(set(drawn)) == 200
    assert {each.victim for each in drawn} == set(range(N_RANKS))


def test_trials_of_a_schedule_follow_each_other_and_have_both_kinds_beside_torchft():
    rank, machine, silent = (Kind("four machines", lost) for lost in ("rank", "machine", "silent machine"))
    one = Kind("one machine", "rank")
    assert parts.losses(2, 1, 0) == [(one, 0), (rank, 0), (one, 1), (machine, 1), (silent, 0)]
    theirs = [(name, 0) for name in torchft_trial.LIGHTHOUSES]
    assert parts.losses(0, 0, 1) == [(rank, 0), (machine, 0), *theirs]
    assert parts.losses(2, 0, 1) == [(one, 0), (rank, 0), (machine, 0), *theirs, (one, 1), (machine, 1)]


@pytest.mark.parametrize(("without", "later_s"), [(0, STEP_S), (1, STEP_S), (2, STEP_S / 2)])
def test_a_pause_is_the_longest_step_without_a_median_one(without, later_s):
    of = history(without=without, later_s=later_s)
    found = measure(of.ends_s, of.n_members, STRUCK_S)
    assert (found.longest_s, found.median_s, found.calm_s) == (SLOW_S, STEP_S, 0.0)
    assert found.pause_s == SLOW_S - STEP_S
    # steps with the lost rank count as those before, others as those after
    slow_after = (SLOW_S - later_s if without == 0 else SLOW_S - STEP_S) + (STEP_S - later_s) * min(without, 1)
    assert found.lost_s == pytest.approx(slow_after)


def test_a_slow_step_that_comes_later_is_not_of_the_loss():
    of = history()
    late = N_BEFORE + 10
    of.ends_s[late:] = [each + 9.0 for each in of.ends_s[late:]]
    found = measure(of.ends_s, of.n_members, STRUCK_S)
    assert found.longest_s == SLOW_S and found.lost_s == pytest.approx(SLOW_S - STEP_S + 9.0)


def test_a_rank_that_never_goes_on_alone_is_an_error():
    of = history()
    for members in ([N_RANKS] * len(of.ends_s), of.n_members[:N_BEFORE]):
        with pytest.raises(ValueError, match="are too few"):
            measure(of.ends_s[:len(members)], members, STRUCK_S)


@pytest.mark.parametrize(("fields", "words"), [
    ({}, ""), ({"wrong": ["step 7, gradient 0 is not the sum of ranks (0, 1)"]}, "rank 1: step 7, gradient 0"),
    ({"error": "StallError: nobody answers"}, "rank 1: StallError: nobody answers")])
def test_a_trial_is_bad_if_a_rank_says_so(tmp_path, fields, words):
    paths = [tmp_path / f"rank_{rank}.jsonl" for rank in range(N_RANKS)]
    for rank, path in enumerate(paths[:3]):
        history(**(fields if rank == 1 else {})).write(path)
    found = judge(Trial("four machines, rank", 0, "rank", 3), paths, STRUCK_S)
    assert found.trouble.startswith(words) and bool(found.trouble) == bool(words)
    assert len(found.around) == (2 if "error" in fields else 3) and set(found.reported_s) == {0.125}


def test_a_rank_without_a_word_and_a_loss_of_another_are_bad(tmp_path):
    paths = [tmp_path / f"rank_{rank}.jsonl" for rank in range(N_RANKS)]
    history().write(paths[0])
    history().write(paths[3])
    found = judge(Trial("four machines, rank", 0, "rank", 2, trouble="exit codes are {'node 1': 1}"), paths, STRUCK_S)
    assert found.trouble == ("exit codes are {'node 1': 1}; rank 0 knows of the losses [[[3], 0.125]], and only rank 2 "
                             "was lost; rank 1 ended without a word; rank 3 knows of the losses [[[3], 0.125]], and "
                             "only rank 2 was lost")


def test_sums_show_whose_inputs_they_have():
    inputs = [Inputs(rank) for rank in range(N_RANKS)]
    for each in inputs:
        each.fill(7)
    found = inputs[0].arrays[1] + inputs[3].arrays[1]
    right = [ranks for n in range(1, 5) for ranks in itertools.combinations(range(N_RANKS), n)
             if inputs[1].is_sum(found, 1, 7, ranks)]
    assert right == [(0, 3)] and not inputs[1].is_sum(found, 1, 8, (0, 3))
    found[5] = np.nextafter(found[5], np.float32(np.inf))
    assert not inputs[1].is_sum(found, 1, 7, (0, 3))


def test_progress_is_read_by_others(tmp_path):
    path = tmp_path / "progress"
    read = Progress.create(path)
    assert (read.step, read.phase) == (0, COMPUTES)
    written = Progress(path)
    written.end_step()
    written.phase = WAITS
    assert (read.step, read.phase) == (1, WAITS)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        at_s, phase = strike(read, [process], Schedule(0, 1, 0.0), signal.SIGKILL)
        assert phase == "waits" and at_s > 0 and process.returncode == -signal.SIGKILL
        with pytest.raises(StallError, match="rank 0 has made 1 steps, and ended"):
            strike(read, [process], Schedule(0, 2, 0.0), signal.SIGKILL)
        assert await_ends({"rank 0": process}) == "exit codes are {'rank 0': -9}"


def test_percentiles_and_pauses_without_the_lease_of_silent_machines():
    assert [report.percentile([3.0, 1.0, 2.0], percent) for percent in (50, 99, 100)] == [2.0, 3.0, 3.0]
    trials = [trial(), trial(index=1, trouble="bad"), trial("torchft"),
              trial("four machines, silent machine", lost="silent machine", lost_s=(LEASE_S + 0.5,) * 3)]
    found = report.pauses(trials)
    assert found["four machines, rank"]["pause_s"] == [1.0] * 3 and len(found) == 2
    assert found["four machines, silent machine"]["pause_s"] == [0.5] * 3
    assert found["four machines, silent machine"]["reported_s"] == [0.125] * 3


def test_what_torchft_loses_is_divided_by_what_we_lose_for_the_same_schedules():
    ours = {i: trial(index=i) for i in range(4)}
    theirs = {i: trial("torchft", i, lost_s=(3.0, 5.0, 4.0)) for i in range(1, 6)}
    assert report.times_ours(ours, theirs) == (4.0, 4.0, 4.0)
    assert report.times_ours(ours, {}) is None
    assert report.times_ours({1: trial(lost_s=(-0.5,) * 3)}, theirs) is None, "nothing was lost: no ratio"
    assert report.beside([*ours.values()]) == {}
    found = report.beside([*ours.values(), *theirs.values(), trial("one machine, rank", 1)])
    assert list(found["four machines, rank"]) == [1, 2, 3] and list(found["torchft"]) == [1, 2, 3, 4, 5]


def test_tables_and_records_name_kinds_and_contestants(tmp_path):
    trials = [trial("one machine, rank"), trial(), trial("four machines, machine", lost="machine", lost_s=(2.0,) * 3),
              trial("torchft", lost_s=(8.0,) * 3), trial("torchft, short timeouts", trouble="it did not survive")]
    pauses, lost = report.text(trials).split("\n\n")
    assert "at that moment: waits 3" in pauses
    assert pauses.splitlines()[-3].split()[:6] == ["one", "machine,", "rank", "1", "0", "500.0"]
    assert [" ".join(line.split()) for line in lost.splitlines()[-2:]] == [
        "torchft 1 1 500.0 8000.0 8000.0 8000.0 8000.0 8 8 to 8 4 4 to 4",
        "torchft, short timeouts 1 0 - - - - - - - - -"]
    rows = report.records(trials)
    assert [row["section"] for row in rows] == ["pause"] * 3 + ["time lost"] * 3 + ["trial"] * 5
    assert rows[5]["measured"]["times_ours"] == {"four machines, rank": (8.0, 8.0, 8.0),
                                                 "four machines, machine": (4.0, 4.0, 4.0)}
    path = tmp_path / "worker_loss.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [{"bench": "worker_loss"}, *rows]))
    assert {len(each.samples_s) for each in result_file.read(path).series.values()} == {3}
    assert report.text([]) == "" and report.records([]) == []


def test_the_cost_is_the_ratio_of_rounds_that_follow_each_other():
    class Named:
        def __init__(self, name):
            self.name = name

    rows = [Row(Named(mode), cost.IN_PLACE, 4096, "two machines, in place", 2, 1, samples_s, handover_ns=[0.0])
            for mode, samples_s in zip(cost.MODES, ([1.0, 1.0, 2.0, 2.0], [3.0, 3.0, 8.0, 8.0]))]
    assert cost.pairs(rows) == [(rows[0], rows[1])]
    assert cost.ratio(rows) == (3.5, 3.0, 4.0)
    assert cost.text(rows).splitlines()[1].split()[-5:] == ["3.50", "3.00", "to", "4.00", "0"]
    first, second = cost.records(rows)
    assert (first["chosen"]["contestant"], second["chosen"]["contestant"]) == cost.MODES
    assert second["chosen"]["n_nodes"] == 2 and second["measured"]["ratio"] == 3.5 and "ratio" not in first["measured"]


def test_torchft_is_left_out_where_it_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(torchft_trial.importlib.util, "find_spec", lambda name: None)
    assert parts.run({"parts": "torchft"})
    assert capsys.readouterr().out == ("torchft is left out: torch and torchft not installed (pip install "
                                       "bpsfast[ecosystem])\n")


@pytest.mark.slow
def test_both_modes_are_measured_in_a_small_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cost, "MACHINES", {1: "auto"})
    monkeypatch.setattr(cost, "_MOST", 3)
    path = tmp_path / "worker_loss.jsonl"
    assert parts.run({"parts": "cost", "sizes": "4K", "n_rounds": 2, "json_path": str(path)})
    manifest, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert manifest["bench"] == "worker_loss" and "machine" in manifest
    assert [row["chosen"]["contestant"] for row in rows] == ["abort", "continue"] * 2
    assert {row["measured"]["n_wrong"] for row in rows} == {0} and "continue / abort" in capsys.readouterr().out


@pytest.mark.slow
def test_a_loss_is_survived_and_written_down(tmp_path, capsys):
    path = tmp_path / "worker_loss.jsonl"
    assert parts.run({"parts": "pause", "n_trials": 1, "n_silent": 0, "json_path": str(path)})
    _, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["section"] for row in rows] == ["pause", "pause", "trial", "trial"]
    for row in rows[:2]:
        assert len(row["measured"]["pause_s"]) == len(row["measured"]["reported_s"]) == N_RANKS - 1
    assert "one machine, rank" in capsys.readouterr().out
