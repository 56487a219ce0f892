"""``bpsfast bench summation``: why a server should only sum (BytePS's CPU bottleneck, OSDI'20 section 4.2).

It measures the Gbit/s of gradients that a core sums with our kernels, and with updates of parameters on the same CPU by
SGD, momentum, RMSProp and Adam; then it computes cores and memory traffic for each rate of a network card. Partitions
of 4 MB come from DRAM. Figures per core use CPU time, so that other programs on a core do not matter; contestants take
turns.

The memory rate is the highest traffic that any of these operations reached on all CPUs at once. Traffic is counted as
in the paper: every operand passes memory once, and the card's bytes twice, once in each direction.
"""
from __future__ import annotations

import platform
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from bpsfast import kernels
from bpsfast.bench.harness import plots, table
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.cold_memory import PARTITION_NBYTES, cold_nbytes
from bpsfast.bench.harness.option_lists import parse_numbers
from bpsfast.bench.paper.summation import instructions, lines, operations
from bpsfast.bench.paper.summation.operations import SUM_DTYPES, Row
from bpsfast.bench.paper.summation.thread_team import ThreadTeam, n_usable
from bpsfast.orchestration.errors import ConfigError

LINES = "10,25,100,400"
_CALLS, _QUICK_CALLS = 12, 4
_MOST_WORKERS = 8


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print tables and verdicts, and return (and write) the records.

    *options*, each of which may be missing or None: n_workers (4), lines ("10,25": Gbit/s), n_rounds (15), json_path,
    plot_path, quick. Raises `ConfigError` if one makes no sense, or if a requested plot cannot be drawn.
    """
    given = BenchRun("summation", options)
    n_workers = given.get("n_workers", 4)
    if not 2 <= n_workers <= _MOST_WORKERS:
        raise ConfigError(f"bench summation sums gradients of 2 to {_MOST_WORKERS} workers, got {n_workers}")
    rates = [1e9 * gbits for gbits in parse_numbers("--lines", given.get("lines") or LINES, 1e6,
                                                    f"rates in Gbit/s, such as {LINES}")]
    if "plot_path" in given:
        plots.check(given["plot_path"])
    rows = measure(n_workers, SUM_DTYPES, given.rounds(15, quick=4), _QUICK_CALLS if given.quick else _CALLS,
                   cold_nbytes(given.quick))
    found = instructions.count(kernels.assembly("float32")) if platform.machine() == "x86_64" else None
    print(report(rows, n_workers, rates, found))
    if "plot_path" in given:
        with plots.figure() as (made, [panel]):
            draw(panel, rows, rates)
            plots.save(made, given.pop("plot_path"))
    code = [{"section": "instructions", "chosen": {"kernel": "float32"}, "measured": found._asdict()}] if found else []
    return given.finish([*(_record(row) for row in rows), *code])


def measure(n_workers: int, dtypes: Sequence[str], n_rounds: int, n_calls: int, pool_nbytes: int) -> list[Row]:
    """Return rows with samples, for one thread and for one thread on each CPU."""
    kernels.warm(dtypes)
    counts = sorted({1, n_usable()})
    rows: list[Row] = []
    for n_threads in counts:
        mine = operations.rows(n_workers, n_threads, tuple(dtypes))
        calls = [operations.call_of(row) for row in mine]
        with ThreadTeam(n_threads, pool_nbytes) as worker_pool:
            for dtype in dict.fromkeys(row.dtype for row in mine):
                worker_pool.fill(dtype)
                turns = [(row, call) for row, call in zip(mine, calls) if row.dtype == dtype]
                for _ in range(n_rounds):
                    for row, call in turns:
                        turn = worker_pool.turn(call, row.n_arrays, row.dtype, n_calls)
                        row.samples_s.append(turn.wall_s)
                        row.cpu_s.append(turn.cpu_s)
        rows += mine
    return rows


def report(rows: Sequence[Row], n_workers: int, rates: Sequence[float],
           found: instructions.Instructions | None) -> str:
    """Return the tables and the verdicts as text, at most 80 columns wide."""
    here, offered = lines.machine(rows), lines.services(rows, n_workers)
    parts = [_by_operation(rows), "", _by_line(offered, rates, here), ""]
    parts += [textwrap.fill(lines.verdict(offered, rate, here), 80, subsequent_indent="  ") for rate in rates]
    if found is not None:
        parts.append(f"float32's kernel: {found.n_packed} packed instructions of {found.vector_nbytes} bytes, "
                     f"{found.n_past_caches} stores past the caches")
    return "\n".join(parts)


def _by_operation(rows: Sequence[Row]) -> str:
    most = lines.most(rows)
    alone = [row for row in rows if row.n_threads == 1]
    together = {(row.operation, row.dtype): row for row in rows if row.n_threads == most}
    cells = [["Gbit/s of gradients", "dtype", "bytes/byte", "a core", "its memory", f"{most} cores"]]
    for row in alone:
        cells.append([row.operation, row.dtype, f"{row.traffic:.2f}", f"{row.core_bits / 1e9:.1f}",
                      f"{row.core_bits * row.traffic / 1e9:.0f}",
                      f"{together[row.operation, row.dtype].bits / 1e9:.1f}"])
    return f"{table.plain(cells)}\n(bytes/byte: through memory for each that comes in)"


def _by_line(offered: Sequence[lines.Service], rates: Sequence[float], here: lines.Machine) -> str:
    cells = [["cores for a line of (Gbit/s)", "bytes/byte", *(f"{rate / 1e9:g}" for rate in rates)]]
    for service in offered:
        marks = {"memory": " m", "cores": " c", "": "  "}
        cells.append([service.name, f"{service.traffic:.2f}",
                      *(f"{service.cores(rate):.2f}{marks[lines.limit(service, rate, here)]}" for rate in rates)])
    return (f"{table.plain(cells)}\n(m: more memory traffic than the {here.memory_bits / 1e9:.0f} Gbit/s here; c: more "
            f"than {here.n_cores} cores;\nbytes/byte with the card's own two)")


def draw(panel: Any, rows: Sequence[Row], rates: Sequence[float]) -> None:
    """Draw the Gbit/s of a core for each operation, with the rates of network cards as lines."""
    alone = [row for row in rows if row.n_threads == 1 and row.operation != operations.COPY]
    names = [f"{row.operation}\n{row.dtype}" for row in alone]
    colors = ["C0" if row.operation.startswith("sum") else "C1" for row in alone]
    panel.bar(names, [row.core_bits / 1e9 for row in alone], color=colors)
    for rate in rates:
        panel.axhline(rate / 1e9, color="0.5", linewidth=0.8, linestyle="--")
        panel.annotate(f"{rate / 1e9:g} Gbit/s", (len(alone) - 0.45, rate / 1e9), fontsize=7, va="bottom", ha="right")
    panel.set(yscale="log", ylabel="Gbit/s of gradients, one core", title="Sums, and updates of parameters")
    panel.tick_params(axis="x", labelsize=7, rotation=45)


def _record(row: Row) -> dict[str, Any]:
    return {
        "section": "summation",
        "chosen": {"operation": row.operation, "dtype": row.dtype, "n_threads": row.n_threads, "n_in": row.n_in,
                   "nbytes": PARTITION_NBYTES},
        "measured": {"bits": row.bits, "core_bits": row.core_bits, "traffic": row.traffic,
                     "samples_s": row.samples_s, "cpu_s": row.cpu_s},
    }
