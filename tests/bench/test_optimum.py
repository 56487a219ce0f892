"""bench optimum: cells and figures, refused options, and one small cell on real packets."""
from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from bpsfast.bench.harness.launcher import ContestantLauncher
from bpsfast.bench.harness.samples import Row
from bpsfast.bench.paper import optimum
from bpsfast.bench.paper.optimum import cells, report
from bpsfast.bench.paper.optimum.cells import Cell, Layout
from bpsfast.bench.paper.optimum.measurement import LayoutCluster, Measured
from bpsfast.launch.namespaces import Cluster, netns
from bpsfast.orchestration.errors import ConfigError, PeerLostError
from bpsfast.orchestration.placement.shares import Machine


@pytest.fixture
def namespaces():
    """Skip without namespaces, and name what is missing: root, ip, tbf."""
    lacking = netns.missing()
    if lacking is not None:
        pytest.skip(lacking)


def test_every_number_of_helpers_has_a_cell():
    found = cells.chosen("equal", "2,4,8", quick=False)
    assert [[cell.n_helpers for cell in planned] for _, planned in found] == [[0, 1], [*range(4)], [*range(8)]]
    full = cells.chosen("full", "2,4,8", quick=False)
    assert [[cell.n_helpers for cell in planned] for _, planned in full] == [[2], [4], [8]]
    for layout, planned in found:
        assert all(cell.nbytes // cell.partition_nbytes("optimal") >= 200 for cell in planned)
        assert 2 * len(layout.workers) * layout.rate_bits == pytest.approx(0.4e9 if len(planned) > 5 else 0.8e9)
        assert all("ps" not in cell.contestants for cell in planned if not cell.n_helpers)
        assert all("gloo" in planned[k].contestants for k in (0, len(planned) // 2))


def test_the_hash_has_the_partitions_that_byteps_makes_of_the_list():
    [(_, planned)] = cells.chosen("models", "8", quick=False)
    found = [(cell.load, cell.partition_nbytes(name), cell.credit_nbytes(name))
             for cell in planned for name in cell.contestants]
    assert found == [("gradients of vgg16/16", 32 << 10, 64 << 10), ("gradients of vgg16/128", *[28672] * 2),
                     ("gradients of bert-large/32", 32 << 10, 64 << 10), ("gradients of bert-large/128", *[28672] * 2)]
    assert 28672 == 4_096_000 // 128 // 4096 * 4096


def test_naive_ps_keeps_a_shorter_queue_in_smaller_pieces_where_helpers_are_few():
    [(_, planned)] = cells.chosen("equal", "8", quick=False)
    assert [cell.credit_nbytes("ps") // cell.partition_nbytes("ps") for cell in planned[1:]] == [3] * 4 + [2] * 3
    assert [cell.credit_nbytes("ps") >> 10 for cell in planned[1:]] == [48] * 4 + [64] * 3
    assert {cell.credit_nbytes("optimal") for cell in planned} == {64 << 10}


def test_where_every_link_is_full_pieces_are_smaller_and_as_many_bytes_are_under_way():
    [(layout, [cell])] = cells.chosen("full", "8", quick=False)
    assert {cell.partition_nbytes(name) for name in ("optimal", "ps", "colocated")} == {16 << 10}
    assert {cell.credit_nbytes(name) for name in ("optimal", "ps", "colocated")} == {64 << 10}
    assert layout.rate_bits == pytest.approx(0.5 * 0.4e9 / 16) and cell.n_helpers == 8
    assert cell.awake_us == 0


@pytest.mark.parametrize(("sets", "workers", "text"), [
    ("equal,odd", "2", "no set 'odd': expected equal, full, unequal, models"), ("equal", "1", "from 2 to 32"),
    ("equal", "2,x", "from 2 to 32"), ("equal", "2,33", "from 2 to 32"),
])
def test_what_is_refused(sets, workers, text):
    with pytest.raises(ConfigError, match=text):
        cells.chosen(sets, workers, quick=True)


def test_without_namespaces_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(netns, "missing", lambda: "network namespaces need root")
    with pytest.raises(ConfigError, match="links of their own: network namespaces need root"):
        optimum.run({})


@pytest.mark.parametrize(("contestant", "expected"), [
    ("optimal", 2 * 4 * 3 / (16 + 8 - 4)), ("colocated", 1.5), ("gloo", 1.5), ("ps", 2.0), ("equal", 1.2),
])
def test_formulas_are_those_of_the_paper(contestant, expected):
    machines = [Machine(True, 1e6)] * 4 + [Machine(False, 1e6)] * 2
    assert report.time_s(contestant, 10**6, machines) == pytest.approx(expected)
    assert report.time_s("hash:mixed", 10**6, machines) is None


def test_a_slow_worker_costs_who_does_not_know_of_it():
    machines = [Machine(True, 1e6)] * 7 + [Machine(True, 0.25e6)]
    assert report.time_s("equal", 10**6, machines) == pytest.approx(7.0)
    assert report.time_s("optimal", 10**6, machines) == pytest.approx(4.0)


def measured(busy=0.5):
    """Return a cell of 4 workers and 2 helpers in which each took 1.5 times M / B."""
    cell = Cell(2, ("optimal", "gloo"), 208 << 15)
    machines = [Machine(True, 1e6)] * 4 + [Machine(False, 1e6)] * 2
    rows = [Row(SimpleNamespace(name=name), "numpy", cell.nbytes, label=name, samples_s=[1.5 * cell.nbytes / 1e6],
                cpu_busy=[0.2, busy]) for name in cell.contestants]
    return Measured(cell, machines, rows, {name: [1.2 * cell.nbytes] * 6 for name in cell.contestants})


def test_figures_are_in_units_of_bytes_over_rate():
    found = measured()
    ours, gloo = (report.figures(found, row) for row in found.rows)
    assert ours["time"] == pytest.approx(1.5) and ours["formula"] == pytest.approx(1.2)
    assert ours["dev"] == pytest.approx(0.25) and ours["whole_parts"] == pytest.approx(1.2, rel=0.02)
    assert ours["sent"] == pytest.approx(1.0, rel=0.02)
    assert gloo["formula"] == pytest.approx(1.5) and gloo["whole_parts"] is None and gloo["sent"] is None


@pytest.mark.parametrize(("busy", "void"), [(0.5, False), (0.9, True)])
def test_a_turn_in_which_the_cpus_were_the_limit_is_void(busy, void):
    layout = Layout("four and two", (1.0,) * 4, (1.0,) * 2, 1e8)
    assert ("VOID" in report.block(layout, [measured(busy)])) is void
    assert [each["measured"]["void"] for each in report.records(layout, [measured(busy)])] == [void] * 2


@pytest.mark.slow
@pytest.mark.root
def test_one_small_cell_on_real_packets(namespaces):
    layout = Layout("two and one", (1.0, 1.0), (1.0,), 2e8)
    with LayoutCluster(layout) as cluster:
        found = cluster.measure(Cell(1, ("optimal",), 64 << 15), 1)
    (row,) = found.rows
    figures = report.figures(found, row)
    assert row.n_wrong == 0 and len(row.samples_s) == 2
    assert figures["sent"] == pytest.approx(1.0, abs=0.05), "the kernel counted what the placement predicts"
    assert all(0 < machine.rate < 1.05 * 2e8 / 8 for machine in found.machines)


@pytest.mark.slow
@pytest.mark.root
def test_an_interface_that_goes_away_mid_run_ends_it_in_words(namespaces):
    with Cluster(["node0", "node1"], rates=2e8) as cluster, ContestantLauncher(2, 2, cluster) as launcher:
        names = {machine.namespace for machine in cluster}
        group = launcher.bpsfast(transport="tcp", heartbeat_s=0.5, lease_s=3.0)
        group.measure("numpy", 1 << 20, 0, 1)
        before = cluster["node1"].traffic().tx
        with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
            turn = pool.submit(group.measure, "numpy", 32 << 20, 0, 50)  # a step takes more than a second
            deadline = time.monotonic() + 30
            while cluster["node1"].traffic().tx < before + (4 << 20):
                assert time.monotonic() < deadline, "nothing moves"
            netns.ip("-n", cluster["node1"].namespace, "link", "del", "eth0")
            stack.callback(launcher.dismiss, group)  # otherwise the pool hangs if the job hangs
            with pytest.raises(PeerLostError, match=r"(node 1 \(host|scheduler at) .* has been silent for 3\.\d s"):
                turn.result(60)
        with pytest.raises(ConfigError, match="eth0"):
            cluster["node1"].traffic()
    assert not names & {path.name for path in Path("/run/netns").iterdir()}
