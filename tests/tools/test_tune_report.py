"""What people and programs read of a run: medians and spreads in units they know, counters, advice where it is due."""
from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec

from bpsfast.hardware.nic_counters import CounterDelta
from bpsfast.tools.doctor.finding import passed, skipped, warned
from bpsfast.tools.tune import tunables, tuning_run
from bpsfast.tools.tune.search import Outcome, Tunable, TuneStep, compare
from bpsfast.tools.tune.testbed import RailPair
from bpsfast.tools.tune.tunables import INCAST, LATENCY, ONE_WAY, TWO_WAY
from tests.support import measurement_schemas as schemas
from tests.tools.test_tunables import rail, side

LOADS = (ONE_WAY, TWO_WAY, INCAST, LATENCY)
BEFORE = {load: [1e9, 1.1e9, 0.9e9] for load in LOADS} | {LATENCY: [2e5, 2e5, 2e5]}
AFTER = {load: [2e9, 2.1e9, 1.9e9] for load in LOADS} | {LATENCY: [2.5e5, 2.5e5, 2.5e5]}


def session(changes):
    return SimpleNamespace(
        own=side("a", rail()), partners=[side("b", rail()), side("c", rail())], loads=LOADS, goal=INCAST,
        budget_s=60.0, sample_s=0.15, start={"rdma_mtu": 0},
        ways=lambda config, load: [RailPair(0, rail(), rail()), RailPair(1, rail(), rail())],
        choice=tunables.Choice([Tunable("rdma_mtu", (1024,), INCAST)], {"huge_pages": "no pool"}),
        counted=lambda config, load: [CounterDelta("a mlx5_0", 1, 0.0, changes, False, False)])


def outcome():
    return Outcome({"rdma_mtu": 0}, {"rdma_mtu": 1024}, True, "better", [TuneStep("rdma_mtu", 1024, 0, True, "taken")],
                   ["credit_bytes"], {}, BEFORE, AFTER, {load: compare(BEFORE[load], AFTER[load]) for load in LOADS},
                   100, 59.0)


def test_the_table_has_medians_and_spreads_before_and_after():
    text = tuning_run.text(session({"np_cnp_sent": 0}), outcome(), passed("all is well"), ["written to x"])
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows[INCAST][1:9] == ["8.000", "+-", "1.186", "Gb/s", "16.000", "+-", "1.186", "Gb/s"]
    assert rows[LATENCY][1:9] == ["5.000", "+-", "0.000", "us", "4.000", "+-", "0.000", "us"]
    assert "+25.0 % (noise 0.0 %): better" in text and "rdma_mtu = 0 -> 1024" in text
    assert "100 samples in 59 s: better" in text and "did not suffice for: credit_bytes" in text
    assert text.count("# NIC counters (delta) : a mlx5_0/1  np_cnp_sent 0") == 2 * len(LOADS)
    assert text.endswith("written to x")


def test_loss_brings_the_doctor_s_advice_and_its_absence_does_not():
    advice = warned("eth0: PFC on no priority", switch="PFC on priority 3 of all ports")
    lossy = tuning_run.text(session({"out_of_sequence": 7}), outcome(), advice, [])
    assert "packets were lost and sent again (out_of_sequence 7)" in lossy
    assert "switch:  PFC on priority 3 of all ports" in lossy
    clean = tuning_run.text(session({"out_of_sequence": 0}), outcome(), advice, [])
    assert "network (RD09): eth0: PFC on no priority" in clean and "switch:" not in clean
    assert "RD09" not in tuning_run.text(session({}), outcome(), skipped("the device is software"), [])


def test_the_head_says_who_measures_what_and_what_not():
    text = tuning_run.head(session({}))
    assert "a with b, c, budget 60 s, 0.15 s a sample, judged by incast" in text
    assert "a mlx5_0:1 -> c mlx5_0:1" in text and "not tried: huge_pages: no pool" in text
    step = TuneStep("rdma_cores", "numa", "", False, "no gain")
    assert tuning_run.step(step) == "  rdma_cores (empty) -> numa: no gain"


def test_json_has_base_units_and_everything_that_was_tried():
    shown = json.loads(json.dumps(tuning_run.data(session({"out_of_sequence": 7}), outcome(), passed("well"), None)))
    msgspec.convert(shown, schemas.TunedRdma, strict=True)
    assert shown["loads"][LATENCY]["unit"] == "s" and shown["loads"][LATENCY]["before"]["median"] == 1 / 2e5
    assert shown["loads"][INCAST]["after"]["median"] == 2e9 and shown["loads"][INCAST]["verdict"] == "better"
    assert shown["changes"] == {"rdma_mtu": 1024} and shown["network"]["troubled"]
    assert shown["not_tried"] == {"huge_pages": "no pool", "credit_bytes": "the budget did not suffice"}
    assert shown["steps"] == [{"knob": "rdma_mtu", "value": 1024, "was": 0, "taken": True, "words": "taken"}]
    unchanged = Outcome({"rdma_mtu": 0}, {"rdma_mtu": 0}, before=BEFORE, words="nothing was better")
    assert tuning_run.data(session({}), unchanged, passed("well"), None)["loads"][INCAST]["after"] is None
    assert "after" in tuning_run.text(session({}), unchanged, passed("well"), []).splitlines()[0]
