"""The tables of `bench optimum`: t*B/M as measured, by the formula, and from the placement of whole partitions."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bpsfast.base.settings import Settings
from bpsfast.bench.harness import table
from bpsfast.bench.harness.samples import Row
from bpsfast.bench.paper.optimum.cells import Cell, Layout
from bpsfast.bench.paper.optimum.measurement import MOST_BUSY, Measured, busiest
from bpsfast.orchestration.placement import assignment, forecast
from bpsfast.orchestration.placement.assignment import machine_times_s
from bpsfast.orchestration.placement.layout import lay_out
from bpsfast.orchestration.placement.shares import Machine, least_time_s, optimal_shares


def time_s(contestant: str, nbytes: int, machines: Sequence[Machine]) -> float | None:
    """Return the time of a step of *nbytes* for each worker, or None if the placement depends on names."""
    formula = _FORMULAS.get(contestant)
    return formula(machines, nbytes) if formula else None


def _equal(machines: Sequence[Machine], nbytes: float) -> float:
    """Return the step time of the paper's split, which is optimal for equal machines, on *machines*."""
    alike = [Machine(machine.has_ranks) for machine in machines]
    return max(machine_times_s(optimal_shares(alike, nbytes).owned, machines, nbytes))


_FORMULAS: Mapping[str, Callable[[Sequence[Machine], float], float]] = {
    "optimal": least_time_s, "colocated": forecast.colocated_s, "ps": forecast.ps_s,
    "gloo": forecast.ring_s, "equal": _equal,
}


def block(layout: Layout, measured: Sequence[Measured]) -> str:
    """Return one layout's table. t is in units of M / B (fastest link); dev.: measured relative to the formula."""
    lines = [["helpers", "contestant", "t*B/M", "formula", "dev. %", "whole parts", "sent/model", "CPU %", ""]]
    for each in measured:
        for row in each.rows:
            found = figures(each, row)
            lines.append([
                str(each.cell.n_helpers), row.name, f"{found['time']:.3f}", _shown(found["formula"]),
                _shown(found["dev"], "+.1f", 100), _shown(found["whole_parts"]), _shown(found["sent"]),
                f"{100 * max(row.cpu_busy):.0f}",
                "" if not row.n_wrong else f"{row.n_wrong} WRONG"])
            if busiest([row]) > MOST_BUSY:
                lines[-1][-1] += " VOID: the CPU was the limit"
    rates = ", ".join(f"{rate * 8 / 1e6:.1f}" for rate in sorted({m.rate for m in measured[0].machines}))
    return (f"# {layout.title}: links that move {rates} Mbit/s of payload each way, "
            f"{measured[0].cell.nbytes / 1e6:.1f} MB a step\n{table.plain(lines)}\n")


def _shown(value: float | None, form: str = ".3f", factor: float = 1.0) -> str:
    return "-" if value is None else format(factor * value, form)


def figures(measured: Measured, row: Row) -> dict[str, float | None]:
    """Return a contestant's times in units of M/B, and the sent bytes relative to the model, of the worst machine."""
    cell, machines = measured.cell, measured.machines
    if row.name in ("colocated", "gloo"):
        machines = [machine for machine in machines if machine.has_ranks]
    unit_s = cell.nbytes / max(machine.rate for machine in machines)
    parts = _parts(cell, machines, row.name)
    formula_s = time_s(row.name, cell.nbytes, machines)
    predicted = max(wire.tx for wire in assignment.predict_wire(parts, machines)) if parts else 0
    return {
        "time": row.median_s / unit_s,
        "formula": formula_s and formula_s / unit_s,
        "dev": formula_s and row.median_s / formula_s - 1,
        "whole_parts": assignment.step_time_s(parts, machines) / unit_s if parts else None,
        "sent": max(measured.sent[row.name]) / predicted if predicted else None,
    }


def _parts(cell: Cell, machines: Sequence[Machine], name: str) -> list[tuple[int, int]]:
    """Return (nbytes, owner) of each partition as the job places them; [] for contestants without partitions."""
    if name == "gloo":
        return []
    known = [Machine(machine.has_ranks) for machine in machines] if name == "equal" else machines
    units = lay_out(cell.specs(), known, policy="optimal" if name == "equal" else name,
                    partition_nbytes=cell.partition_nbytes(name), fusion_nbytes=Settings().fusion_bytes)
    return [(part.nbytes, part.owner) for unit in units for part in unit.parts]


def records(layout: Layout, measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return one record for each contestant and cell for the result file; bytes, seconds, and units of M/B."""
    return [{
        "section": layout.title,
        "chosen": {"contestant": row.name, "n_workers": len(layout.workers), "n_helpers": each.cell.n_helpers,
                   "links": [*layout.workers, *layout.helpers[: each.cell.n_helpers]], "rate_bits": layout.rate_bits,
                   "nbytes": each.cell.nbytes, "partition_nbytes": each.cell.partition_nbytes(row.name),
                   "credit_nbytes": each.cell.credit_nbytes(row.name), "load": each.cell.load},
        "measured": {"samples_s": row.samples_s, "median_s": row.median_s, "n_wrong": row.n_wrong,
                     "cpu_busy": row.cpu_busy, "void": busiest([row]) > MOST_BUSY,
                     "rates_bytes": [machine.rate for machine in each.machines], "sent_nbytes": each.sent[row.name],
                     **figures(each, row)},
    } for each in measured for row in each.rows]
