"""``make expr3``: the simulator compared with each cell of the BytePS paper's figures, and further predictions.

Calibrates first (`calibration`), then predicts. Writes ``expr3.json`` (all cells, fits, versions), ``expr3.md`` (tables
with the error of each cell) and, if matplotlib is installed, ``expr3.png``.
"""
from __future__ import annotations

import functools
import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from bpsfast._version import __version__
from bpsfast.base import exit_codes
from bpsfast.bench import cli_options
from bpsfast.bench.harness import plots
from bpsfast.bench.paper import claim_tables
from bpsfast.bench.paper.calibration import Fit, calibrate, mean_error
from bpsfast.bench.paper.figures import Constants, Row, figure_12, figure_13, figures_15_16, workload_of

_TITLES = {
    "12": "Figure 12: goodput of communication alone, 8 machines of one GPU (fitted: three numbers)",
    "13": "Figure 13: speed over all-reduce, 64 GPUs, k helpers (predicted)",
    "15/16": "Figures 15 and 16: efficiency (fitted at 256 GPUs: one number for each framework; else predicted)",
    "BERT-large": "BERT-large: speed against all-reduce on 32 GPUs (predicted)",
    "20 Gbit/s TCP": f"Speed over all-reduce at 20 Gbit/s, {claim_tables.TCP_MACHINES} machines (predicted; the claim "
                     "does not say how many)",
}


@click.command()
@cli_options.results_folder()
@exit_codes.exit_on_error
def main(out: Path) -> None:
    """Simulate all figures, in a few minutes on one core."""
    began = time.monotonic()
    constants, fits = calibrate()
    for fit in fits:
        click.echo(f"calibrated {fit.name} = {fit.value:.4g} {fit.unit} to figure {fit.figure}, {fit.n_cells} cells; "
                   f"mean error left {fit.residual:.3f}")
    rows: list[Row] = []
    figures: Iterable[Callable[[Constants], list[Row]]] = (
        figure_12, figure_13, figures_15_16, claim_tables.bert_large, claim_tables.tcp_gains)
    for figure in figures:
        new = figure(constants)
        click.echo(f"{new[0].figure}: {len(new)} cells, mean absolute error {mean_error(new):.3f} {new[0].unit}")
        rows += new
    points = claim_tables.sweep(constants)
    sizes = claim_tables.scale(constants, workload_of("bert-large"))
    out.mkdir(parents=True, exist_ok=True)
    (out / "expr3.json").write_text(json.dumps(_document(fits, rows, points, sizes, time.monotonic() - began), indent=1)
                                    + "\n", encoding="utf-8")
    (out / "expr3.md").write_text(tables(fits, rows, points, sizes), encoding="utf-8")
    click.echo(f"{out / 'expr3.json'}, {out / 'expr3.md'}")
    plots.draw_if_possible(functools.partial(plot, rows, points), out / "expr3.png")


def _document(fits: Sequence[Fit], rows: Sequence[Row], points: Sequence[claim_tables.Point],
              sizes: Sequence[claim_tables.Size], took_s: float) -> dict[str, Any]:
    return {
        "bpsfast": __version__, "python": platform.python_version(), "machine": platform.machine(),
        "took_s": round(took_s, 1), "calibration": [fit._asdict() for fit in fits],
        "cells": [{**row._asdict(), "error": row.error} for row in rows],
        "sweep": [point._asdict() for point in points], "scale": [size._asdict() for size in sizes],
    }


def tables(fits: Sequence[Fit], rows: Sequence[Row], points: Sequence[claim_tables.Point],
           sizes: Sequence[claim_tables.Size]) -> str:
    """Return all results as Markdown."""
    lines = ["# The simulator beside the paper", "", "Cells are *paper / simulated (error)*. Written by `make expr3`.",
             "", "## Calibration", "", "| number | value | unit | fitted to figure | cells | mean error left |",
             "|---|---|---|---|---|---|"]
    lines += [f"| {f.name} | {f.value:.4g} | {f.unit} | {f.figure} | {f.n_cells} | {f.residual:.3f} |" for f in fits]
    lines += ["", "## Errors", "", "| figure | cells | mean absolute error | largest |", "|---|---|---|---|"]
    groups = [(title, [row for row in rows if row.figure == figure]) for figure, title in _TITLES.items()]
    groups.insert(3, ("of these, 256 GPUs", [r for r in rows if r.figure == "15/16" and r.at == "256 GPUs"]))
    lines += [f"| {title} | {len(of)} | {mean_error(of):.3f} {of[0].unit} | {max(abs(r.error) for r in of):.3f} |"
              for title, of in groups]
    for figure, title in _TITLES.items():
        lines += ["", f"## {title}", "", *_pivot([row for row in rows if row.figure == figure])]
    lines += ["", "## Efficiency by the rate of the cards, 64 GPUs: all-reduce / BytePS k=0 / k=n (not measured)",
              "", "| model | " + " | ".join(f"{g} Gbit/s" for g in claim_tables.SWEEP_GBITS) + " |",
              "|---|" + "---|" * len(claim_tables.SWEEP_GBITS)]
    for model in dict.fromkeys(point.model for point in points):
        lines.append(f"| {model} | " + " | ".join(f"{p.all_reduce:.2f} / {p.k0:.2f} / {p.kn:.2f}" for p in points
                                                  if p.model == model) + " |")
    lines += ["", "## BERT-large on more machines, 100 Gbit/s, no overhead but the ring's (folded simulation)", "",
              "| machines | all-reduce | ours, k = 0 | ours, k = n | events |", "|---|---|---|---|---|"]
    lines += [f"| {s.machines} | {s.all_reduce:.3f} | {s.k0:.3f} | {s.kn:.3f} | {s.n_events} |" for s in sizes]
    return "\n".join(lines) + "\n"


def _pivot(rows: Sequence[Row]) -> list[str]:
    """Return a table with a line for each `of` and a column for each `at`."""
    columns = sorted({row.at for row in rows}, key=lambda at: (len(at), at))
    lines = [f"| {rows[0].unit} | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for of in dict.fromkeys(row.of for row in rows):
        cells = {row.at: row for row in rows if row.of == of}
        digits = 1 if rows[0].unit == "Gbit/s" else 3 if rows[0].unit == "efficiency" else 2
        lines.append(f"| {of} | " + " | ".join(
            f"{cells[at].paper:.{digits}f} / {cells[at].simulated:.{digits}f} ({cells[at].error:+.{digits}f})"
            if at in cells else "" for at in columns) + " |")
    return lines


def plot(rows: Sequence[Row], points: Sequence[claim_tables.Point], path: Path) -> None:
    """Draw figures 12, 13 and 15/16 at 256 GPUs, measured and simulated, and the sweep."""
    with plots.figure(6.5, 4.5, 2, n_rows=2) as (made, (first, second, third, fourth)):
        for panel, name, title, unit in ((first, "12", "Figure 12", "goodput [Gbit/s]"),
                                         (second, "13", "Figure 13 (predicted)", "speed over all-reduce")):
            for color, of in enumerate(dict.fromkeys(row.of for row in rows if row.figure == name)):
                cells = [row for row in rows if row.figure == name and row.of == of]
                ks = [int(row.at[2:]) for row in cells]
                panel.plot(ks, [row.paper for row in cells], "o", color=f"C{color}", label=of)
                panel.plot(ks, [row.simulated for row in cells], "-", color=f"C{color}")
            panel.set(title=f"{title}: points measured, lines simulated", xlabel="helpers k", ylabel=unit)
            panel.legend(fontsize=8)
        panel = third
        cells = [row for row in rows if row.figure == "15/16" and row.at == "256 GPUs"]
        at = range(len(cells))
        panel.barh([y - 0.2 for y in at], [row.paper for row in cells], 0.4, label="measured")
        panel.barh([y + 0.2 for y in at], [row.simulated for row in cells], 0.4, label="simulated")
        panel.set(title="Figures 15 and 16: 256 GPUs", xlabel="efficiency")
        panel.set_yticks(list(at), [row.of for row in cells], fontsize=7)
        panel.invert_yaxis()
        panel.legend(fontsize=8, loc="lower left")
        panel = fourth
        for color, model in enumerate(dict.fromkeys(point.model for point in points)):
            curve = [point for point in points if point.model == model]
            rates = [point.gbits for point in curve]
            panel.plot(rates, [point.kn for point in curve], "-", color=f"C{color}", label=model)
            panel.plot(rates, [point.all_reduce for point in curve], ":", color=f"C{color}")
        panel.set(title="64 GPUs by network card: BytePS k = n (lines), all-reduce (dotted)", xlabel="Gbit/s",
                  xscale="log", ylabel="efficiency")
        panel.legend(fontsize=8)
        plots.save(made, str(path))


if __name__ == "__main__":
    main()
