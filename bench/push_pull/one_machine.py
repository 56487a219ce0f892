"""`bench push_pull` on one machine: sizes beside peers and the memory bound; latency; a busy GIL; a model's list."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bpsfast.bench.harness import memory_bound, peers, table
from bpsfast.bench.harness.contestant_group import Group
from bpsfast.bench.harness.launcher import ContestantLauncher
from bpsfast.bench.harness.samples import Row, best, bound_s, find, take_turns
from bpsfast.bench.push_pull import cliffs, steady_state
from bpsfast.bench.push_pull.options import Plan
from bpsfast.tools.planner import catalog

_LATENCY_NBYTES = 4 << 10
_BESIDE_NBYTES = 64 << 20
#: Smallest size with a memory bound; below, a round trip between threads takes longer.
_BOUND_FROM_NBYTES = 64 << 10
#: Factor of more rounds if it is uncertain whether our curves have a cliff. They are added once only, because repeating
#: until no cliff is left would bias the result.
_MOST_TIMES = 3


def run(plan: Plan) -> list[dict[str, Any]]:
    """Measure everything, print tables, and return the records of the result file."""
    records: list[dict[str, Any]] = []
    with ContestantLauncher(plan.n_ranks, 1) as launcher:
        ours = launcher.bpsfast()
        others = {name: getattr(launcher, name)() for name in plan.peers}
        records += _by_size(plan, ours, others)
        records += _latency(plan, ours, others)
        records += _beside_python(plan, ours)
        records += _gradient_list(plan, ours)
    with ContestantLauncher(plan.n_ranks, 1) as launcher:  # a separate job, whose memory is that of one model
        records += steady_state.run(plan, launcher.bpsfast())
    return records


def _by_size(plan: Plan, ours: Group, others: dict[str, Group]) -> list[dict[str, Any]]:
    rows: list[Row] = []
    for nbytes in plan.sizes:
        rows += [Row(ours, variant, nbytes) for variant in plan.operations]
        for name, group in others.items():
            rows += [Row(group, variant, nbytes) for variant in peers.VARIANTS[name]
                     if nbytes > peers.PIECE_NBYTES or variant == name]
        if nbytes >= _BOUND_FROM_NBYTES:
            rows += [Row(ours, name, nbytes) for variant in plan.operations for name in memory_bound.rows(variant)]
    take_turns(rows, plan.n_rounds)  # not size by size, so that other load affects one turn of each size
    records = _records(plan, rows)
    if any(step.is_ours and not step.is_certain for step in cliffs.cliffs(cliffs.curves(records))):
        take_turns(rows, (_MOST_TIMES - 1) * plan.n_rounds)
        records = _records(plan, rows)
    for name in dict.fromkeys(row.name for row in rows if not memory_bound.is_row(row.name)):
        chosen = [row for row in rows if row.name == name]
        bounds = {row.nbytes: row.nbytes / least_s for row in chosen if (least_s := bound_s(row, _bounds(rows, row)))}
        plan.say(table.block(f"{name} ({chosen[0].group.name})", chosen, plan.n_ranks, 1, bounds) + "\n")
    if plan.peers:
        plan.say(ratios(plan, rows) + "\n")
    plan.say(_memory(plan, rows) + "\n")
    return records


def _records(plan: Plan, rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [table.record("by size", row, plan.n_ranks, 1, _bounds(rows, row))
            for row in sorted(rows, key=lambda row: row.name)]


def _bounds(rows: Sequence[Row], row: Row) -> list[Row]:
    return [each for each in rows if each.name in memory_bound.rows(row.variant) and each.nbytes == row.nbytes]


def ratios(plan: Plan, rows: Sequence[Row]) -> str:
    """Return a table: the median of each peer's best variant divided by ours."""
    heads = [f"{operation} / {peer}" for operation in plan.operations for peer in plan.peers]
    lines = [["times faster, by size (B)", *heads]]
    for nbytes in plan.sizes:
        line = [str(nbytes)]
        for operation in plan.operations:
            mine = find(rows, operation, nbytes)
            for peer in plan.peers:
                theirs = best(rows, peers.VARIANTS[peer], nbytes)
                line.append(f"{theirs.median_s / mine.median_s:.2f}" if mine and theirs else "-")
        lines.append(line)
    return table.plain(lines)


def _memory(plan: Plan, rows: Sequence[Row]) -> str:
    """Return a table of measured times and of those that memory alone takes."""
    lines = [["what memory alone takes", "bytes", "GB/s of memory", "memory us", "us", "memory/us"]]
    for operation in plan.operations:
        for nbytes in plan.sizes:
            row = find(rows, operation, nbytes)
            if row is None or (least_s := bound_s(row, _bounds(rows, row))) is None:
                continue
            moved = memory_bound.N_STREAMS * plan.n_ranks * nbytes
            lines.append([operation, str(nbytes), f"{moved / least_s / 1e9:.1f}", f"{least_s * 1e6:.0f}",
                          f"{row.median_s * 1e6:.0f}", f"{least_s / row.median_s:.2f}"])
    return table.plain(lines)


def _latency(plan: Plan, ours: Group, others: dict[str, Group]) -> list[dict[str, Any]]:
    rows = [Row(ours, operation, _LATENCY_NBYTES) for operation in plan.operations]
    rows += [Row(group, name, _LATENCY_NBYTES) for name, group in others.items()]
    take_turns(rows, plan.n_rounds, n=100 if plan.quick else 400, n_warmup=20)
    plan.say(_percentiles(f"latency of {_LATENCY_NBYTES} B (us)", rows) + "\n")
    return [table.record("latency", row, plan.n_ranks, 1) for row in rows]


def _percentiles(title: str, rows: Sequence[Row]) -> str:
    names = [f"p{percent}" if percent < 100 else "max" for percent in table.PERCENTILES]
    lines = [["", *names, "p50 / ours", "p99 / p50", "CPU us"]]
    for row in rows:
        lines.append([row.name, *(f"{row.percentile_s(percent) * 1e6:.1f}" for percent in table.PERCENTILES),
                      f"{row.median_s / rows[0].median_s:.2f}", f"{row.percentile_s(99) / row.percentile_s(50):.2f}",
                      f"{row.median_cpu_s * 1e6:.0f}"])
    return f"# {title}\n{table.plain(lines)}"


def _beside_python(plan: Plan, ours: Group) -> list[dict[str, Any]]:
    """Measure in turns with and without a thread on rank 0 that runs Python."""
    quiet = [Row(ours, operation, _BESIDE_NBYTES, label=f"{operation}, quiet") for operation in plan.operations]
    beside = [Row(ours, operation, _BESIDE_NBYTES, label=f"{operation}, beside Python")
              for operation in plan.operations]

    def around(row: Row, begins: bool) -> None:
        if row in beside:
            ours.ask("burn", begins, only=[0])

    take_turns(quiet + beside, plan.n_rounds, n=8 if plan.quick else 24, n_warmup=2, around=around)
    rows = [row for pair in zip(quiet, beside) for row in pair]
    plan.say(_percentiles(f"{_BESIDE_NBYTES} B, and a rank that runs Python in another thread (us)", rows) + "\n")
    return [table.record("beside Python", row, plan.n_ranks, 1) for row in rows]


def _gradient_list(plan: Plan, ours: Group) -> list[dict[str, Any]]:
    model = catalog.load("resnet50")
    nbytes = model.nbytes
    rows = [Row(ours, "gradients", nbytes), Row(ours, "one tensor", nbytes)]
    take_turns(rows, plan.n_rounds, n=4, n_warmup=1)
    ratio = rows[0].median_s / rows[1].median_s
    plan.say(_percentiles(f"ResNet-50, {len(model.shapes)} gradients, {nbytes} B (us)", rows))
    plan.say(f"the list costs {ratio:.3f} of one tensor of the same bytes\n")
    return [table.record("gradient list", row, plan.n_ranks, 1) for row in rows]
