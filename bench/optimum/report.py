"""The cells beside the model: t*B/M as measured, by the formula, and by the placement of whole partitions."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bpsfast.bench import table
from bpsfast.bench.optimum import formulas
from bpsfast.bench.optimum.cell import MOST_BUSY, Measured, busiest
from bpsfast.bench.optimum.cells import Cell, Layout
from bpsfast.bench.samples import Row
from bpsfast.orchestration import placement
from bpsfast.orchestration.placement import Machine

#: Contestants whose owners `placement` tells; the others have no partitions, or ignore the machines.
_PLACED = ("optimal", "colocated", "ps")


def block(layout: Layout, measured: Sequence[Measured]) -> str:
    """Return one layout's table. t, in units of M / B: B is the fastest link's; dev.: measured beside the formula."""
    lines = [["helpers", "contestant", "t*B/M", "formula", "dev. %", "whole parts", "sent/model", "CPU %", ""]]
    for each in measured:
        for row in each.rows:
            found = figures(each, row)
            lines.append([
                str(each.cell.n_helpers), row.name, f"{found['time']:.3f}", f"{found['formula']:.3f}",
                f"{100 * (found['time'] / found['formula'] - 1):+.1f}",
                f"{found['whole_parts']:.3f}" if found["whole_parts"] else "-",
                f"{found['sent']:.3f}" if found["sent"] else "-", f"{100 * max(row.cpu_busy):.0f}",
                "" if not row.n_wrong else f"{row.n_wrong} WRONG"])
            if busiest([row]) > MOST_BUSY:
                lines[-1][-1] += " VOID: the CPU was the limit"
    rates = ", ".join(f"{rate * 8 / 1e6:.1f}" for rate in sorted({m.rate for m in measured[0].machines}))
    return (f"# {layout.title}: links that move {rates} Mbit/s of payload each way, "
            f"{measured[0].cell.nbytes / 1e6:.1f} MB a step\n{table.plain(lines)}\n")


def figures(measured: Measured, row: Row) -> dict[str, float | None]:
    """Return a contestant's times in units of M/B, and the worst machine's sent bytes beside the model's."""
    cell, machines = measured.cell, measured.machines
    if row.name in ("colocated", "gloo"):
        machines = [machine for machine in machines if machine.has_ranks]
    unit_s = cell.nbytes / max(machine.rate for machine in machines)
    parts = _parts(cell, machines, row.name)
    whole = placement.step_time_s(parts, machines) / unit_s if parts else None
    predicted = max(wire.tx for wire in placement.predict_wire(parts, machines)) if parts else 0
    return {
        "time": row.median_s / unit_s,
        "formula": formulas.time_s(row.name, cell.nbytes, machines) / unit_s,
        "whole_parts": whole,
        "sent": max(measured.sent[row.name]) / predicted if predicted else None,
    }


def _parts(cell: Cell, machines: Sequence[Machine], name: str) -> list[tuple[int, int]]:
    """Return (nbytes, owner) of each partition as the job places them, or nothing if the model does not say."""
    if name not in _PLACED or cell.load != "tensor":
        return []
    nbytes_of = [cell.partition_nbytes] * (cell.nbytes // cell.partition_nbytes)
    return list(zip(nbytes_of, placement.assign(nbytes_of, machines, name)))


def records(layout: Layout, measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return one record a contestant and cell for the result file; bytes, seconds, and units of M/B."""
    return [{
        "section": layout.title,
        "chosen": {"contestant": row.name, "n_workers": len(layout.workers), "n_helpers": each.cell.n_helpers,
                   "links": [*layout.workers, *layout.helpers[: each.cell.n_helpers]], "rate_bits": layout.rate_bits,
                   "nbytes": each.cell.nbytes, "partition_nbytes": each.cell.partition_nbytes, "load": each.cell.load},
        "measured": {"samples_s": row.samples_s, "median_s": row.median_s, "n_wrong": row.n_wrong,
                     "cpu_busy": row.cpu_busy, "void": busiest([row]) > MOST_BUSY,
                     "rates_bytes": [machine.rate for machine in each.machines], "sent_nbytes": each.sent[row.name],
                     **figures(each, row)},
    } for each in measured for row in each.rows]
