"""`bench scale`: every phase of a small modelled job ends, and each list goes to the scheduler once."""
from __future__ import annotations

import json

from bpsfast.bench import scale
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


def test_the_table_says_whether_the_limits_are_kept():
    record = {"n_nodes": 2, "n_ranks": 4, "n_tensors": 1, "n_helpers": 1, "wall_s": 1.0, "cpu_s": 0.5,
              "most_nbytes": 1 << 20, "n_sent": 1, "n_received": 1, "sent_nbytes": 1, "received_nbytes": 1}
    records = [record | {"phase": phase} for phase in PHASES]
    assert "1.5 s of one core; a lost helper: 0.5 s; at most 1 MB: within 30 s, 3 s" in scale.report(records)
    records[3]["cpu_s"] = 3.5
    assert "a lost helper: 3.5 s; at most 1 MB: NOT within" in scale.report(records)
