"""`bench push_pull` between two nodes over TCP, compared with raw sockets and gloo.

It measures on shaped links, on loopback, and on a long line that a connection fills only with megabytes in flight.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from bpsfast.bench.harness import raw_sockets, table
from bpsfast.bench.harness.launcher import ContestantLauncher
from bpsfast.bench.harness.samples import Row, best, bound_s, take_turns
from bpsfast.bench.push_pull.cliffs import SILENT
from bpsfast.bench.push_pull.options import Plan
from bpsfast.launch.namespaces import Cluster, FaultyLink, faulty_link, netns

_RAW = tuple(raw_sockets.VARIANTS)
#: NumPy arrays with all connections encrypted, which is the default between machines.
ENCRYPTED = "numpy, encrypted"
#: Rate of shaped links, low enough that CPUs are not the bottleneck.
_RATE = "1gbit"
#: The long line: delay each way, rate, and MTU. With smaller packets the forwarder, in Python, would be the bottleneck.
_DELAY_S, _LINE_BITS, _LINE_MTU = 0.06, 200e6, 9000
#: Below this size the round trip of the line dominates the time of every contestant.
_LEAST_ON_LINE_NBYTES = 16 << 20


def run(plan: Plan) -> list[dict[str, Any]]:
    """Measure on shaped links (if namespaces can be made) and on loopback; print tables, return the records."""
    records: list[dict[str, Any]] = []
    lacking = netns.missing()
    if lacking is None:
        with Cluster(["node0", "node1"], rates=_RATE) as cluster:
            records += _measure(plan, f"links of {_RATE}", cluster)
    else:
        plan.say(f"shaped links are left out: {lacking}\n")
    records += _measure(plan, "loopback", None)
    long_plan = replace(plan, sizes=tuple(nbytes for nbytes in plan.sizes if nbytes >= _LEAST_ON_LINE_NBYTES),
                        quick=True)
    lacking = faulty_link.missing()
    if lacking is not None:
        plan.say(f"the long line is left out: {lacking}\n")
    elif long_plan.sizes:
        with FaultyLink("node0", "node1", mtu=_LINE_MTU) as link:
            link.lengthen(_DELAY_S, _LINE_BITS / 8)
            records += _measure(long_plan, f"a line of {_LINE_BITS / 1e6:g} Mbit/s and {_DELAY_S * 1e3:g} ms each way",
                                link)
    return records


def _measure(plan: Plan, where: str, cluster: Cluster | FaultyLink | None) -> list[dict[str, Any]]:
    """Measure on one kind of network. Shaped links are slow, so with fewer operations and without `sums=off`."""
    shaped = cluster is not None
    rows: list[Row] = []
    with ContestantLauncher(plan.n_ranks, 2, cluster) as launcher:
        ours, raw = launcher.bpsfast(transport="tcp"), launcher.raw()
        encrypted = launcher.bpsfast(transport="tcp", encryption="on")
        silent = None if shaped else launcher.bpsfast(transport="tcp", sums="off")
        gloo = launcher.gloo() if "gloo" in plan.peers else None
        for nbytes in plan.sizes:
            rows += [Row(ours, operation, nbytes) for operation in plan.operations]
            rows.append(Row(encrypted, "numpy", nbytes, label=ENCRYPTED))
            if silent is not None:
                rows.append(Row(silent, "numpy", nbytes, label=SILENT))
            rows += [Row(raw, name, nbytes) for name in _RAW]
            if gloo is not None:
                rows.append(Row(gloo, "gloo", nbytes))
        take_turns(rows, 2 if shaped and plan.quick else plan.n_rounds, n=2 if shaped else None)
    return _report(plan, where, rows)


def _report(plan: Plan, where: str, rows: list[Row]) -> list[dict[str, Any]]:
    """Print the tables of one network and return its records."""
    records = []
    raw = {nbytes: [row for row in rows if row.name in _RAW and row.nbytes == nbytes] for nbytes in plan.sizes}
    for name in dict.fromkeys(row.name for row in rows):
        chosen = [row for row in rows if row.name == name]
        title = f"{name} ({chosen[0].group.name}), two nodes, {where}"
        bounds = {row.nbytes: row.nbytes / least_s for row in chosen if (least_s := bound_s(row, raw[row.nbytes]))}
        plan.say(table.block(title, chosen, plan.n_ranks, 2, bounds, has_sums=name != SILENT) + "\n")
        records += [table.record(where, row, plan.n_ranks, 2, raw[row.nbytes]) for row in chosen]
    lines = [[f"two nodes, {where}", "us", "of the raw bound", "times gloo", "CPU busy", "CPU us"]]
    clear = {row.nbytes: row for row in rows if row.name == "numpy"}
    for row in rows:
        if row.name == ENCRYPTED and row.nbytes in clear:
            in_clear = clear[row.nbytes]
            plan.say(f"{row.nbytes} bytes, encrypted: {row.median_s / in_clear.median_s:.2f} times the time, "
                     f"{row.median_cpu_s / in_clear.median_cpu_s:.2f} times the CPU")
    for row in rows:
        gloo, least_s = best(rows, ["gloo"], row.nbytes), bound_s(row, raw[row.nbytes])
        lines.append([f"{row.name} {row.nbytes}", f"{row.median_s * 1e6:.0f}",
                      f"{least_s / row.median_s:.3f}" if least_s else "-",
                      f"{gloo.median_s / row.median_s:.2f}" if gloo else "-",
                      f"{100 * sum(row.cpu_busy) / len(row.cpu_busy):.0f} %",
                      f"{row.median_cpu_s * 1e6:.0f}"])
    plan.say(table.plain(lines))
    return records
