"""The benches count correctly and write complete records. No test asserts a time."""
from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from bpsfast.bench import push_pull
from bpsfast.bench.harness import option_lists, pattern, samples, table
from bpsfast.bench.harness.contestant import Operation, Timer
from bpsfast.bench.harness.contestant_group import Group, Turn
from bpsfast.bench.push_pull import one_machine, two_nodes
from bpsfast.bench.push_pull.options import Plan
from bpsfast.launch.namespaces import FaultyLink, faulty_link
from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.doctor.facts import CacheLineLatency


class NamedGroup(Group):
    """A group without processes: rows need only its name."""

    def __init__(self, name):
        self.name = name


@pytest.fixture
def row():
    found = samples.Row(NamedGroup("bpsfast"), "numpy", 4 << 20)
    found.samples_s = [0.004, 0.002, 0.001, 0.003, 0.1]
    found.cpu_busy, found.cpu_s = [0.5], [0.001]
    return found


def test_sizes_are_powers_of_two_or_a_list():
    assert option_lists.parse_sizes("4K:32K") == (4096, 8192, 16384, 32768)
    assert option_lists.parse_sizes("4k, 1MiB,12") == (4096, 1 << 20, 12)


@pytest.mark.parametrize("text", ["8K:4K", "4.5K", "0", "3", "x", "", "4K:"])
def test_impossible_sizes_are_refused(text):
    with pytest.raises(ConfigError):
        option_lists.parse_sizes(text)


@pytest.mark.parametrize(
    "options", [{"n_nodes": 3}, {"n_ranks": 1}, {"dtype": "int8"}, {"api": "x"}, {"compare": "nccl"}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        push_pull.run(options)


def test_columns_are_those_of_nccl_tests():
    found = table.columns(nbytes=1000, time_s=2.0, n_ranks=4, n_servers=2, bound=1000.0)
    assert found == {"algbw": 500.0, "busbw": 750.0, "srvbw": 1000.0, "bound": 1000.0, "efficiency": 0.5}
    assert table.columns(1000, 2.0, 2, 1, None)["efficiency"] is None


def test_a_line_has_a_cell_for_every_column(row):
    names = table.HEADER.splitlines()[0].split()[1:]
    assert len(table.line(row, 2, 1, 2e9).split()) == len(names) == 12
    assert table.line(row, 2, 1, None).split()[-2:] == ["-", "-"]
    assert table.line(row, 2, 1, 2e9).split()[:5] == ["4194304", "1048576", "float", "sum", "-1"]


def test_a_table_says_whether_results_were_wrong(row):
    assert "# Out of bounds values : 0 OK" in table.block("numpy", [row], 2, 1, {})
    row.n_wrong = 3
    assert "# Out of bounds values : 3 FAILED" in table.block("numpy", [row], 2, 1, {})
    assert "# Out of bounds values : 3 as it has to be: " in table.block("sums off", [row], 2, 1, {}, has_sums=False)


def test_percentiles_are_samples(row):
    assert row.median_s == 0.003
    assert [row.percentile_s(percent) for percent in (1, 50, 95, 100)] == [0.001, 0.003, 0.1, 0.1]


def test_the_best_row_is_the_fastest(row):
    slow = samples.Row(NamedGroup("mpi"), "mpi", 4 << 20, samples_s=[1.0])
    assert samples.best([slow, row], ["mpi", "numpy"], 4 << 20) is row
    assert samples.best([slow, row], ["mpi"], 4 << 20) is slow
    assert samples.best([slow, row], ["mpi"], 8) is None


def test_a_record_says_what_was_possible_in_each_turn(row):
    row.samples_s, row.n_per_round = [0.004, 0.004, 0.003, 0.003, 0.1, 0.1], 2

    def bound(samples_s, handover_ns):
        return samples.Row(NamedGroup("bpsfast"), "memory of numpy", 4 << 20, n_per_round=2, samples_s=samples_s,
                           handover_ns=handover_ns)

    bounds = [bound([0.001, 0.003, 0.004, 0.004, 0.001, 0.001], [40, 190, 190]),
              bound([0.003, 0.003, 0.0015, 0.0015, 0.001, 0.001], [0, 40, 190])]
    row.handover_ns = [40, 40, 190]
    measured = table.record("by size", row, 2, 1, bounds)["measured"]
    assert measured["bounds"] == ["memory of numpy"] * 2
    assert measured["bound_s"] == [0.002, None, 0.001]  # only turns with the row's distance of cores
    assert measured["efficiency"] == pytest.approx((0.002 / 0.004 + 0.001 / 0.1) / 2)  # of the same turns
    row.handover_ns = [0, 0, 0]
    assert table.record("by size", row, 2, 1, bounds)["measured"]["bound_s"] == [0.002, 0.0015, 0.001]
    row.handover_ns = [190, 40, 40]
    measured = table.record("by size", row, 2, 1, bounds)["measured"]
    assert measured["bound_s"] == [None] * 3 and measured["efficiency"] is None is measured["bound"]
    assert table.record("by size", row, 2, 1)["measured"]["bound"] is None


def test_the_pattern_finds_wrong_elements():
    total = np.zeros(1000, np.float32)
    for rank in range(3):
        one = np.empty(1000, np.float32)
        pattern.fill(one, rank, known=True)
        total += one
    assert pattern.n_wrong(total, 3) == 0
    total[[1, 500]] += 1
    assert pattern.n_wrong(total, 3) == 2


def test_a_timer_checks_once_and_times_every_operation():
    calls = []

    class Alone:
        def operation(self, variant, nbytes):
            return Operation(run=lambda: calls.append("run"), fill=lambda known: calls.append(known), n_wrong=lambda: 7)

        def barrier(self):
            calls.append("barrier")

    timer = Timer(Alone())
    answer = timer.measure("x", 4, 1, 2)
    assert len(answer["samples_s"]) == 2 and answer["n_wrong"] == 7
    assert calls == [True, "barrier", "run", False, "barrier", "run", "run", "run"]
    timer.measure("x", 4, 0, 1)
    assert calls[8:] == [False, "barrier", "run"]
    timer.prepare("y", 4)
    timer.measure("y", 4, 0, 1)
    assert calls[11:] == [True, "barrier", "run", False, "barrier", "run"]


def test_what_a_check_takes_is_in_no_turn():
    """Turns of the largest arrays have two operations, so a check would dominate the CPU time of the first one."""
    calls = []

    class Noted(NamedGroup):
        def prepare(self, variant, nbytes):
            calls.append("prepare")

        def measure(self, variant, nbytes, n_warmup, n):
            calls.append("measure")
            return Turn(samples_s=[1.0] * n, n_wrong=0, cpu_busy=0.5, cpu_s=1.0)

    samples.take_turns([samples.Row(Noted("bpsfast"), "numpy", 4)], 2, n=1,
                       around=lambda row, begins: calls.append(begins))
    assert calls == ["prepare", *[True, "measure", False] * 2]


def test_each_turn_knows_how_near_the_cores_were(monkeypatch):
    class Quick(NamedGroup):
        def prepare(self, variant, nbytes):
            pass

        def measure(self, variant, nbytes, n_warmup, n):
            return Turn(samples_s=[1.0] * n, n_wrong=0, cpu_busy=0.5, cpu_s=1.0)

    measured = iter([40.0, 41.0, 190.0, 191.0, 0.0, 42.0])
    monkeypatch.setattr(samples.hardware, "measure", lambda host: CacheLineLatency(3, 5, 39.0))
    monkeypatch.setattr(samples.hardware, "again", lambda found: dataclasses.replace(found, ns=next(measured)))
    handovers = {"numpy": [40.0, 190.0, 0.0], "torch": [41.0, 191.0, 42.0]}
    rows = [samples.Row(Quick("bpsfast"), name, 4) for name in handovers]
    samples.take_turns(rows, 3, n=2)
    for each in rows:
        assert len(each.handover_ns) == 3 and each.turns_s == [1.0] * 3
        assert each.handover_ns == handovers[each.variant]
        assert table.record("by size", each, 2, 1)["measured"]["handover_ns"] == each.handover_ns


def test_tables_of_one_machine_are_at_most_120_columns_wide():
    rows = [samples.Row(NamedGroup("bpsfast"), name, 64 << 20, samples_s=[0.0123456, 0.1], cpu_s=[0.01])
            for name in ("numpy", "torch", "memory of numpy", "memory of torch, past caches")]
    for each in rows:
        each.n_per_round, each.handover_ns = 2, [0.0]
    plan = Plan((4096, 64 << 20), 2, ("numpy", "torch"), (), quick=True)
    memory = one_machine._memory(plan, rows).splitlines()
    assert [line.split()[:2] for line in memory[1:]] == [["numpy", "67108864"], ["torch", "67108864"]]
    rows[0].label = "numpy, beside Python"
    latency = one_machine._percentiles("a title that says of how many bytes, and what else the ranks do (us)", rows)
    assert max(map(len, [*memory, *latency.splitlines()])) <= 120


@pytest.mark.parametrize(("large_s", "n_turns"), [([2.2] * 3, 3), ([4.0] * 9, 9), ([4.0, 2.0, 4.0, *[2.0] * 6], 9)])
def test_there_are_more_rounds_if_a_cliff_is_not_certain(large_s, n_turns):
    """More rounds of all rows, but only once; three rounds make nothing certain."""

    class Known(NamedGroup):
        def __init__(self, name):
            super().__init__(name)
            self.n_asked = {}

        def prepare(self, variant, nbytes):
            pass

        def measure(self, variant, nbytes, n_warmup, n):
            at = self.n_asked[variant, nbytes] = self.n_asked.get((variant, nbytes), -1) + 1
            times_s = large_s if (self.name, nbytes) == ("bpsfast", 8192) else [nbytes / 4096] * 9
            return Turn(samples_s=[times_s[at]] * n, n_wrong=0, cpu_busy=0.5, cpu_s=1e-9 * nbytes)

    ours, gloo = Known("bpsfast"), Known("gloo")
    plan = Plan((4096, 8192), 2, ("numpy",), ("gloo",), quick=True, say=lambda text: None)
    records = one_machine._by_size(plan, ours, {"gloo": gloo})
    assert set(ours.n_asked.values()) | set(gloo.n_asked.values()) == {n_turns - 1}
    assert [len(each["measured"]["cpu_s"]) for each in records] == [n_turns] * 4


@pytest.mark.slow
def test_one_machine_writes_what_it_measured(tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    push_pull.run({"sizes": "4K,1M", "api": "numpy", "quick": True, "json_path": str(path)})
    manifest, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert manifest["bench"] == "push_pull" and "numpy" in manifest["machine"]["versions"]
    by_size = {(row["chosen"]["operation"], row["chosen"]["nbytes"]): row["measured"] for row in rows
               if row["section"] == "by size"}
    assert set(by_size) == {("numpy", 4 << 10), ("numpy", 1 << 20), ("memory of numpy", 1 << 20),
                            ("memory of numpy, past caches", 1 << 20)}
    assert len(by_size["numpy", 1 << 20]["bound_s"]) == len(by_size["numpy", 1 << 20]["cpu_s"]) >= 3
    assert "bound_s" not in by_size["numpy", 4 << 10]
    sections = {row["section"] for row in rows}
    assert sections == {"by size", "latency", "beside Python", "gradient list", "steady state"}
    for row in rows[:-1]:
        assert row["measured"]["n_wrong"] == 0
        assert row["measured"]["samples_s"] and row["chosen"]["nbytes"] > 0
        assert row["measured"]["p50_s"] <= row["measured"]["p99_s"] <= row["measured"]["p100_s"]
    per_step = rows[-1]["measured"]["per_step"]
    assert per_step["registrations"] == per_step["engine_allocations"] == per_step["memory_segments"] == 0
    assert per_step["control_messages"] * 50 <= rows[-1]["measured"]["barriers_and_asks"]
    assert rows[-1]["measured"]["segments_nbytes"] <= rows[-1]["measured"]["segments_limit_nbytes"]
    assert all("numba" not in rank["modules"] for rank in rows[-1]["measured"]["ranks"])
    assert "#       size" in capsys.readouterr().out


@pytest.mark.slow
def test_two_nodes_measure_loopback_against_raw_sockets(capsys):
    plan = Plan(sizes=(1 << 20,), n_ranks=2, operations=("numpy",), peers=(), quick=True)
    rows = two_nodes._measure(plan, "loopback", None)
    wrong = {row["chosen"]["operation"]: row["measured"]["n_wrong"] for row in rows}
    assert set(wrong) == {"numpy", "numpy, encrypted", "numpy, sums off", "raw 1", "raw 2", "raw 2 small"}
    assert wrong["numpy"] == wrong["numpy, encrypted"] == 0 < wrong["numpy, sums off"]
    assert "of the raw bound" in capsys.readouterr().out


@pytest.mark.skipif(faulty_link.missing() is not None, reason=str(faulty_link.missing()))
def test_two_nodes_measure_a_long_line(monkeypatch):
    monkeypatch.setattr(two_nodes, "_LEAST_ON_LINE_NBYTES", 1 << 16)
    monkeypatch.setattr(two_nodes, "_DELAY_S", 0.001)
    measure = two_nodes._measure

    def only_the_line(plan, where, link):
        return measure(plan, where, link) if isinstance(link, FaultyLink) else []

    monkeypatch.setattr(two_nodes, "_measure", only_the_line)
    measured = two_nodes.run(Plan(sizes=(4096, 1 << 16), n_ranks=2, operations=("numpy",), peers=(), quick=True))
    assert {row["section"] for row in measured} == {"a line of 200 Mbit/s and 1 ms each way"}
    assert {row["chosen"]["nbytes"] for row in measured} == {1 << 16}
    wrong = {row["chosen"]["operation"]: row["measured"]["n_wrong"] for row in measured}
    assert wrong == dict.fromkeys(("numpy", "numpy, encrypted", "raw 1", "raw 2", "raw 2 small"), 0)
