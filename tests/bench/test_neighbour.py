"""bench neighbour: the steps of a window, refused options, and a short run on this machine."""
from __future__ import annotations

import json

import pytest

from bpsfast.bench import neighbour
from bpsfast.bench.neighbour import Measured, Window
from bpsfast.orchestration.errors import ConfigError, PeerLostError


def window(*samples_s, n_steps=0, begin_s=0.0, end_s=1.0):
    return Window(begin_s, end_s, n_steps, 0.5, list(samples_s))


def test_only_steps_that_lie_in_a_window_count():
    found = window(begin_s=10.0, end_s=11.0)
    found.take([(9.9, 0.2), (10.0, 0.3), (10.7, 0.3), (10.8, 0.3), (11.0, 0.1)])
    assert found.samples_s == [0.3, 0.3]


def test_a_change_is_that_of_percentiles():
    found = Measured("quota", 0.5, 1_000_000, idle=[window(1.0, 1.0), window(1.0, 2.0)],
                     serving=[window(1.1, 1.1, n_steps=2), window(1.1, 4.0, n_steps=3)])
    assert found.change(50) == pytest.approx(0.1) and found.change(95) == pytest.approx(1.0)
    assert found.served_gbps == pytest.approx(2 * 1_000_000 * 5 * 8 / 2.0 / 1e9)
    assert "NOT within 5%" in neighbour.report([found])
    found.serving = [window(1.04, n_steps=1)]
    assert "by at most 5%" in neighbour.report([found])


def test_a_pair_that_others_disturb_is_void():
    found = Measured("quota", 0.5, 1)
    quiet, loud = window(1.0), window(1.0)
    loud.others = 0.2
    for pair in ((quiet, loud), (loud, quiet), (quiet, quiet)):
        found.add(*pair)
    assert (len(found.idle), len(found.serving), found.n_void) == (1, 1, 2)


def test_without_a_step_it_says_what_to_do():
    with pytest.raises(PeerLostError, match="--window-s"):
        Measured("quota", 0.5, 1, idle=[window()], serving=[window()]).change(50)


@pytest.mark.parametrize("loads", ["0", "1.5", "x", ","])
def test_loads_that_cannot_be_are_refused(loads):
    with pytest.raises(ConfigError, match="expected shares above 0 and up to 1"):
        neighbour.run({"loads": loads})


@pytest.mark.slow
def test_a_short_run(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(neighbour, "_MOST_OTHERS", 1.0)  # not a measurement, so other programs may be busy
    path = tmp_path / "out.jsonl"
    neighbour.run({"quick": True, "loads": "0.3", "window_s": 0.5, "json_path": str(path)})
    manifest, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert manifest["bench"] == "neighbour"
    assert [record["chosen"]["contestant"] for record in records] == ["quota", "free"]
    for record in records:
        measured = record["measured"]
        assert len(measured["idle_windows"]) == len(measured["serving_windows"]) >= 2
        assert all(each["samples_s"] for each in measured["idle_windows"] + measured["serving_windows"])
        assert all(each["n_steps"] for each in measured["serving_windows"])
    quota = records[0]
    assert 0 < quota["measured"]["served_gbps"] <= quota["chosen"]["nic_rate_gbps"]
    assert "# steps of another job on this machine" in capfd.readouterr().out
