"""Formats tables (nccl-tests' columns and three more, or plain ones), and writes the result file (JSON Lines)."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bpsfast.base import output
from bpsfast.bench.harness import samples
from bpsfast.bench.harness.samples import Row

HEADER = (
    "#       size         count    type   redop    root     time   algbw   busbw  #wrong   srvbw   bound    eff%\n"
    "#        (B)    (elements)                            (us)  (GB/s)  (GB/s)           (GB/s)  (GB/s)"
)
PERCENTILES = (50, 95, 99, 100)


def columns(nbytes: int, time_s: float, n_ranks: int, n_servers: int, bound: float | None) -> dict[str, float | None]:
    """Return the derived columns in bytes per second: algbw and busbw as nccl-tests defines them, srvbw per server.

    *bound* is the best possible algbw; `efficiency` is algbw / bound.
    """
    algbw = nbytes / time_s
    return {
        "algbw": algbw,
        "busbw": algbw * 2 * (n_ranks - 1) / n_ranks,
        "srvbw": n_ranks * algbw / n_servers,
        "bound": bound,
        "efficiency": algbw / bound if bound else None,
    }


def line(row: Row, n_ranks: int, n_servers: int, bound: float | None) -> str:
    """Return one line under `HEADER`."""
    found = columns(row.nbytes, row.median_s, n_ranks, n_servers, bound)
    bandwidths = [found["algbw"], found["busbw"]]
    shown = "".join(f"{value / 1e9:8.2f}" for value in bandwidths if value is not None)
    limit = f"{bound / 1e9:8.2f}{100 * (found['efficiency'] or 0):8.1f}" if bound else f"{'-':>8}{'-':>8}"
    return (f"{row.nbytes:12d}{row.nbytes // 4:14d}{'float':>8}{'sum':>8}{-1:8d}{row.median_s * 1e6:9.1f}{shown}"
            f" {row.n_wrong:7d}{(found['srvbw'] or 0) / 1e9:8.2f}{limit}")


def block(title: str, rows: Sequence[Row], n_ranks: int, n_servers: int, bounds: dict[int, float],
          has_sums: bool = True) -> str:
    """Return the table of one contestant, with nccl-tests' two lines at the end; *bounds* by size.

    With ``sums=off`` wrong values are no failure.
    """
    lines = [f"# {title}", HEADER]
    lines += [line(row, n_ranks, n_servers, bounds.get(row.nbytes)) for row in rows]
    n_wrong = sum(row.n_wrong for row in rows)
    average = sum(row.nbytes / row.median_s for row in rows) / len(rows) * 2 * (n_ranks - 1) / n_ranks
    verdict = "OK" if n_wrong == 0 else "FAILED" if has_sums else "as it has to be: nothing is summed"
    lines.append(f"# Out of bounds values : {n_wrong} {verdict}")
    lines.append(f"# Avg bus bandwidth    : {average / 1e9:.2f}")
    return "\n".join(lines)


def plain(cells: Sequence[Sequence[str]]) -> str:
    """Return lines of right-justified columns; the first row is the head, the first column left-justified."""
    return output.columns(cells, right=range(1, len(cells[0])))


def record(section: str, row: Row, n_ranks: int, n_nodes: int, bounds: Sequence[Row] = ()) -> dict[str, Any]:
    """Return the row for the result file: chosen and measured values, in bytes and seconds.

    *bounds* are the rows that bound it, named in `bounds`; `bound_s` is the best of them in each turn (None: cores were
    moved).
    """
    best_s = samples.bound_s(row, bounds)
    bound = row.nbytes / best_s if best_s else None
    beside = {"bounds": [each.name for each in bounds], "bound_s": samples.bounds_s(row, bounds)}
    return {
        "section": section,
        "chosen": {"contestant": row.group.name, "operation": row.name, "nbytes": row.nbytes, "dtype": "float32",
                   "redop": "sum", "n_ranks": n_ranks, "n_nodes": n_nodes, "n_per_round": row.n_per_round,
                   "n_warmup": row.n_warmup},
        "measured": {"median_s": row.median_s, "n_wrong": row.n_wrong, "cpu_busy": row.cpu_busy, "cpu_s": row.cpu_s,
                     "handover_ns": row.handover_ns, **(beside if bounds else {}),
                     **{f"p{percent}_s": row.percentile_s(percent) for percent in PERCENTILES},
                     **columns(row.nbytes, row.median_s, n_ranks, n_nodes, bound), "samples_s": row.samples_s},
    }


def write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object per line; the first is the manifest."""
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
