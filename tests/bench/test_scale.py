"""`bench scale`: every phase of a small modelled job ends, and each list goes to the scheduler once."""
from __future__ import annotations

import json

from bpsfast.bench import scale
from bpsfast.bench.scale import real_nodes
from bpsfast.orchestration import messages as m

PHASES = ["join", "declare", "commit", "loss", "rejoin"]


def test_a_small_job_goes_through_every_phase(tmp_path):
    out = tmp_path / "scale.jsonl"
    manifest, *records = scale.run({"nodes": "2,6", "n_local": 2, "n_tensors": 300, "n_helpers": 2,
                                    "json_path": str(out)})
    assert [(each["n_nodes"], each["phase"]) for each in records] == [(n, phase) for n in (2, 6) for phase in PHASES]
    assert all(each["cpu_s"] >= 0 and each["most_nbytes"] > 1 << 20 and each["wall_s"] < 60 for each in records)
    list_nbytes = len(m.encode(m.Declare(rank=0, tensors=scale.tensors_of(300))))
    declared = {each["n_nodes"]: each for each in records if each["phase"] == "declare"}
    assert declared[6]["sent_nbytes"] < declared[2]["sent_nbytes"] + list_nbytes / 4, "one node has sent the list"
    assert [json.loads(line) for line in out.read_text().splitlines()] == [manifest, *records]


def test_real_nodes_are_counted_in_both_conditions(tmp_path):
    records = real_nodes.measure(2)
    assert [(each["phase"], each["n_nodes"], each["condition"]) for each in records] == [
        ("real", 2, condition) for condition in real_nodes.CONDITIONS]
    for each in records:
        start, end = each["start"], each["end"]
        assert 0 < start["nodes_cpu_s"] <= end["nodes_cpu_s"] and start["scheduler_cpu_s"] > 0
        assert 4 << 20 < start["median_nbytes"] <= start["most_nbytes"] < 1 << 30 and end["most_threads"] > 1
        assert len(each["samples_s"]) > 1 and all(seconds > 0 for seconds in each["samples_s"])
    start = records[0]["start"]
    start |= {"nodes_cpu_s": 0.7, "scheduler_cpu_s": 0.08, "most_nbytes": 50_000_000}
    assert "2 nodes, not encrypted: 0.8 s of CPU time, at most 50 MB a node: within 0.8 s" in real_nodes.report(records)
    start["nodes_cpu_s"] = 0.71
    assert "NOT within" in real_nodes.report(records)


def test_the_table_says_whether_the_limits_are_kept():
    record = {"n_nodes": 2, "n_ranks": 4, "n_tensors": 1, "n_helpers": 1, "wall_s": 1.0, "cpu_s": 0.5,
              "most_nbytes": 1 << 20, "n_sent": 1, "n_received": 1, "sent_nbytes": 1, "received_nbytes": 1}
    records = [record | {"phase": phase} for phase in PHASES]
    assert "1.5 s of one core; a lost helper: 0.5 s; at most 1 MB: within 30 s, 3 s" in scale.report(records)
    records[3]["cpu_s"] = 3.5
    assert "a lost helper: 3.5 s; at most 1 MB: NOT within" in scale.report(records)
