"""``make expr2``: BytePS's strategies inside a machine, simulated, and the twelve bars of figure 14 of OSDI'20.

Takes the network's constants from a run of ``make expr3``, and fits one more number for each model (`figure_14`).
Writes ``expr2.json`` (bars, fits, and the rates that each strategy leaves), ``expr2.md`` (tables) and, if matplotlib is
installed, ``expr2.png``. Exits with 1 if two bars of a machine and model have another order than in the paper.

Source: BytePS (OSDI'20) figure 14: 64 GPUs, no helpers; the artifact's Expr2.
"""
from __future__ import annotations

import functools
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bpsfast._version import __version__
from bpsfast.base import exit_codes
from bpsfast.bench import cli_options
from bpsfast.bench.harness import plots
from bpsfast.bench.harness.result_file import RESULTS
from bpsfast.bench.paper import figure_14
from bpsfast.bench.paper.calibration import Fit
from bpsfast.bench.paper.figures import Constants, Row
from bpsfast.bench.paper.intra_machine import IntraMachine
from bpsfast.orchestration.errors import ConfigError

_PERCENT = f"{100 * figure_14.TOLERANCE:.0f} %"


@click.command()
@cli_options.results_folder()
@exit_codes.exit_on_error
def main(out: Path) -> None:
    """Simulate the bars, in a few seconds on one core."""
    known = constants(RESULTS / "expr3.json")
    insides = figure_14.insides(known)
    rows, fits = figure_14.figure_14(known)
    out.mkdir(parents=True, exist_ok=True)
    (out / "expr2.json").write_text(json.dumps(_document(rows, fits, insides), indent=1) + "\n", encoding="utf-8")
    text = tables(rows, fits, insides)
    (out / "expr2.md").write_text(text, encoding="utf-8")
    click.echo(text)
    plots.draw_if_possible(functools.partial(plot, rows), out / "expr2.png")
    wrong = [f"{of}, {at}" for (of, at), is_right in figure_14.in_order(rows).items() if not is_right]
    if wrong:
        click.echo(f"not in the paper's order: {'; '.join(wrong)}", err=True)
        sys.exit(exit_codes.FAILED)


def constants(path: Path) -> Constants:
    """Return the calibrated constants in *path*, written by ``make expr3``; raises `ConfigError` if it is missing."""
    if not path.exists():
        raise ConfigError(f"{path} is missing, which has the constants of the wire: run make expr3 first")
    fits = {fit["name"]: fit["value"] for fit in json.loads(path.read_text(encoding="utf-8"))["calibration"]}
    return Constants(fits["ring_overhead_s"], fits["message_overhead_s"], fits["server_rate"],
                     (("PyTorch", fits["PyTorch"]),))


def _document(rows: Sequence[Row], fits: Sequence[Fit], insides: Mapping[tuple[str, str], IntraMachine]
              ) -> dict[str, Any]:
    ordered = figure_14.in_order(rows)
    return {
        "bpsfast": __version__, "python": platform.python_version(), "machine": platform.machine(),
        "calibration": [fit._asdict() for fit in fits], "tolerance": figure_14.TOLERANCE,
        "insides": [{"machine": machine, "way": way, **each._asdict()} for (machine, way), each in insides.items()],
        "cells": [{**row._asdict(), "error": row.error, "in_order": ordered[row.of, row.at],
                   "has_size": figure_14.has_size(row)} for row in rows],
    }


def tables(rows: Sequence[Row], fits: Sequence[Fit], insides: Mapping[tuple[str, str], IntraMachine]) -> str:
    """Return all results as Markdown."""
    ordered = figure_14.in_order(rows)
    n_right, n_pairs = figure_14.pairs_in_order(rows)
    lines = ["# Figure 14: summing inside a machine", "",
             "Speed over all-reduce, 64 GPUs, no helpers. Written by `make expr2`. *Order*: stands to the other bars "
             "of its machine and model, and to all-reduce's 1.00, as measured (equal: within 0.5 %). *Size*: within "
             f"{_PERCENT} of the measured bar.", "",
             "| machine, model | way | paper | simulated | error | order | size |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {row.of} | {row.at} | {row.paper:.2f} | {row.simulated:.3f} | {100 * row.error / row.paper:+.1f} % | "
              f"{_yes(ordered[row.of, row.at])} | {_yes(figure_14.has_size(row))} |" for row in rows]
    errors = [abs(row.error) / row.paper for row in rows]
    lines += ["", f"Mean absolute error {100 * sum(errors) / len(errors):.1f} %, largest {100 * max(errors):.1f} %. Of "
                  f"the {n_pairs} pairs of any two bars, also of two models or machines, {n_right} are in the measured "
                  "order.", "",
              "## What a way leaves of a machine", "",
              "From the loads of its links: the card's rate on the wire, and how fast one gradient is reduced into "
              "memory and, at the same time, another handed back.", "",
              "| machine | way | card, Gbit/s | stages, Gbit/s |", "|---|---|---|---|"]
    lines += [f"| {machine} | {way} | {each.card_rate * 8e-9:.1f} | {each.stage_rate * 8e-9:.1f} |"
              for (machine, way), each in insides.items()]
    lines += ["", "## Fitted, besides the constants of expr3", "", "| number | value | unit | fitted to figure |",
              "|---|---|---|---|"]
    lines += [f"| {fit.name} | {fit.value:.4g} | {fit.unit} | {fit.figure} |" for fit in fits]
    return "\n".join(lines) + "\n"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "**no**"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the measured and simulated bars."""
    with plots.figure(5.5, 4.0, 2, sharey=True) as (made, panels):
        for panel, machine in zip(panels, figure_14.BARS):
            cells = [row for row in rows if row.of.split()[0] == machine]
            at = range(len(cells))
            panel.bar([x - 0.2 for x in at], [row.paper for row in cells], 0.4, label="measured")
            panel.bar([x + 0.2 for x in at], [row.simulated for row in cells], 0.4, label="simulated")
            panel.axhline(1.0, color="black", linewidth=0.8)
            panel.set(title=f"{machine} machines, 64 GPUs", ylabel="speed over all-reduce", ylim=(0.9, 1.4))
            panel.set_xticks(list(at), [f"{row.of.split()[1]}\n{row.at}" for row in cells], fontsize=7)
            panel.legend(fontsize=8)
        plots.save(made, str(path))


if __name__ == "__main__":
    main()
