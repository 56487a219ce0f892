"""bench device: evaluation of profiles, traces and samples, and a run on the host device. No test asserts a time."""
from __future__ import annotations

import json

import pytest

from bpsfast.bench import device
from bpsfast.bench.device import overlap, parts, profiled, report
from bpsfast.bench.device.plan import Plan
from bpsfast.orchestration.errors import ConfigError

MAIN, AUTOGRAD, LINE = 10, 11, 12


def event(name, category, tid, ts, dur=1.0):
    return {"ph": "X", "name": name, "cat": category, "tid": tid, "ts": ts, "dur": dur}


def profile(*more, control="cudaDeviceSynchronize"):
    """Return events of a backward pass from 100 to 200 whose hooks run in autograd's thread."""
    events = [event(profiled.BACKWARD, "user_annotation", MAIN, 100, 100),
              event(profiled.BACKWARD, "gpu_user_annotation", 7, 100, 300),
              event(profiled.HOOK, "user_annotation", AUTOGRAD, 150),
              event("cudaEventRecord", "cuda_runtime", AUTOGRAD, 151, 3.0),
              event("cudaEventSynchronize", "cuda_runtime", LINE, 160, 50),  # the thread of a line may wait
              event("cudaStreamSynchronize", "cuda_runtime", MAIN, 250),  # the program itself, after backward
              event(profiled.CONTROL, "user_annotation", MAIN, 300, 10), {"ph": "M", "name": "process_name"}]
    return [*events, event(control, "cuda_runtime", MAIN, 301), *more]


def test_waits_of_other_threads_and_times_are_none_of_backwards():
    assert profiled.judged(profile()) == {"n_backwards": 1, "n_hooks": 1, "threads": 2, "n_calls": 1,
                                          "longest_us": 3.0, "waits": {}, "sees_waits": True}


@pytest.mark.parametrize(("name", "category", "tid"), [
    ("cudaStreamSynchronize", "cuda_runtime", AUTOGRAD), ("cudaDeviceSynchronize", "cuda_runtime", MAIN),
    ("cuStreamSynchronize", "cuda_driver", AUTOGRAD)])
def test_a_wait_within_backward_is_found(name, category, tid):
    found = profiled.judged(profile(event(name, category, tid, 170, 20)))
    assert found["waits"] == {name: 1} and found["longest_us"] == 20
    said = report.troubles([parts.record("profile", {}, found)], is_gpu=True)
    assert len(said) == 1 and name in said[0]


def test_a_profiler_that_sees_no_wait_on_purpose_shows_nothing():
    said = report.troubles([parts.record("profile", {}, profiled.judged(profile(control="cudaMalloc")))], is_gpu=True)
    assert said == ["profile: the profiler saw neither hooks nor a wait on purpose, so nothing is known"]


def test_so_many_stages_at_once():
    times = {"to host": [(0, 40), (40, 50)], "sum": [(20, 60)], "wire": [(30, 70)], "receive": [(35, 80)],
             "to device": [(60, 100)]}
    found = overlap.overlap(3, times)
    assert found.at_least == [1.0, 0.6, 0.4, 0.15, 0.0]
    assert found.whole_s == pytest.approx(1e-7) and found.stages["to host"] == [(0.0, pytest.approx(5e-8))]
    lines = found.picture().splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[0].count("#") == 36 and lines[4].endswith("#|")


def test_what_nobody_covers_twice():
    assert overlap.covered([[(0, 10), (20, 30)], [(10, 20)]], 2) == []
    assert overlap.covered([[(0, 10), (20, 30)], [(10, 20)]], 1) == [(0, 30)]
    assert overlap.covered([[(0, 30)], [(5, 10), (12, 20)], [(8, 15)]], 2) == [(5, 20)]


def stream(nbytes, reaches):
    return parts.record("sums", {"operation": "push_pull of a stream", "nbytes": nbytes},
                        {"reaches_bound": reaches, "n_wrong": 0})


@pytest.mark.parametrize(("reaches", "least"), [
    ((True, True, True), 1), ((False, True, True), 2), ((True, False, True), 4), ((True, True, False), None)])
def test_from_which_size_on_the_bound_is_reached(reaches, least):
    records = [stream(nbytes, each) for nbytes, each in zip((1, 2, 4), reaches)]
    assert report.reached_from(records) == least
    assert bool(report.troubles(records, is_gpu=True)) == (least is None)
    assert not report.troubles(records, is_gpu=False)


@pytest.mark.parametrize("changed", [{"n_differing": 1}, {"n_differing_parameters": 1}, {"ranks_agree": False}])
def test_other_bits_are_a_trouble_on_every_device(changed):
    same = {"n_differing": 0, "n_differing_parameters": 0, "ranks_agree": True}
    assert not report.troubles([parts.record("training", {}, same)], is_gpu=False)
    assert report.troubles([parts.record("training", {}, same | changed)], is_gpu=False)


@pytest.mark.parametrize(("options", "text"), [
    ({"device": "tpu"}, "expected cuda or host"), ({"device": "host", "n_ranks": 1}, "2 or more, got 1"),
    ({"device": "host", "parts": "sums,speed"}, "'speed' is none of sums, "),
    ({"device": "host", "sizes": "3"}, "no size")])
def test_what_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        device.run(options)


def test_a_part_that_fails_does_not_end_the_others(monkeypatch, capsys, tmp_path):
    def fails(plan: Plan):
        raise ValueError("of this part")

    monkeypatch.setitem(parts.PARTS, "sums", fails)
    monkeypatch.setitem(parts.PARTS, "memory", lambda plan: [])
    path = tmp_path / "device.jsonl"
    assert not device.run({"device": "host", "parts": "sums,memory", "json_path": str(path)})
    assert "ValueError: of this part" in capsys.readouterr().out
    assert "of this part" in json.loads(path.read_text().splitlines()[1])["measured"]["error"]


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_all_of_it_on_the_host_device(tmp_path, capsys):
    pytest.importorskip("torch", reason="torch is not installed")
    path = tmp_path / "device.jsonl"
    assert device.run({"device": "host", "quick": True, "n_rounds": 1, "json_path": str(path)})
    manifest, *found = map(json.loads, path.read_text().splitlines())
    assert manifest["bench"] == "device" and manifest["machine"]["cpu"]
    by_section = {section: [each for each in found if each["section"] == section]
                  for section in ("device", "sums", "backward", "stages", "training", "memory", "error")}
    assert not by_section.pop("error") and all(by_section.values())
    for each in by_section["sums"]:
        assert each["measured"]["n_wrong"] == 0 and len(each["measured"]["samples_s"]) >= 2
    (backward,) = by_section["backward"]
    assert backward["measured"]["n_wrong"] == 0 and len(backward["measured"]["alone"]["stream_s"]) == 6
    shares = by_section["stages"][0]["measured"]["at_least"]
    assert shares == sorted(shares, reverse=True) and 0 < shares[1] <= shares[0] <= 1
    for each in by_section["training"]:
        assert each["measured"]["n_averages"] == 80 and each["measured"]["n_differing"] == 0
    for each in by_section["memory"]:
        share = each["measured"]["nbytes"] * (0.5 if "fp16" in each["measured"]["method"] else 1)
        assert each["measured"]["input_nbytes"] == pytest.approx(share, rel=0.15)
        assert each["measured"]["result_nbytes"] == pytest.approx(2 * share, rel=0.15)
        assert each["measured"]["pinned_nbytes"] == pytest.approx(3 * share, rel=0.15)
    assert "nothing is claimed of a GPU" in capsys.readouterr().out
