"""``make expr1``: steps on real packets compared with the formulas, and with the share that BytePS's authors reached.

Runs the parts of `bench optimum` and writes ``optimum_*.jsonl`` (raw samples and machine), then from all of them
``expr1.md`` (tables) and, if matplotlib is installed, ``expr1.png``. Needs root: machines are network namespaces.

Source: BytePS (OSDI'20) figure 12: communication alone, 8 machines, k = 0..8 helpers.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bpsfast.base import exit_codes
from bpsfast.base.settings import Settings
from bpsfast.bench import cli_options
from bpsfast.bench.harness import plots, result_file
from bpsfast.bench.paper import optimum, osdi20
from bpsfast.bench.paper.optimum.cells import Cell
from bpsfast.launch.namespaces import netns
from bpsfast.orchestration.placement.shares import Machine, least_time_s
from bpsfast.tools.planner import prediction as plan
from bpsfast.tools.planner.catalog import Model
from bpsfast.tools.simulator.network import Costs, cluster
from bpsfast.tools.simulator.simulation import Options, simulate
from bpsfast.tools.simulator.workload import Layer, workload

#: File name -> options of `bench optimum`.
PIECES: dict[str, dict[str, str]] = {
    "2": {"sets": "equal", "workers": "2"}, "4": {"sets": "equal", "workers": "4"},
    "8": {"sets": "equal", "workers": "8"}, "full": {"sets": "full", "workers": "2,4,8"},
    "unequal": {"sets": "unequal"}, "models": {"sets": "models"},
}
#: Contestant -> its name in `bpsfast plan`.
_LAYOUTS = {"optimal": "optimal", "ps": "ps", "colocated": "colocated", "gloo": "ring"}
_NAMES = {"optimal": "ours", "ps": "naive PS", "colocated": "colocated", "gloo": "gloo's ring"}


@click.command()
@click.option("--only", type=click.Choice(sorted(PIECES)), multiple=True, help="Measure these pieces only.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Turns of each contestant.")
@cli_options.results_folder()
@exit_codes.exit_on_error
def main(only: tuple[str, ...], rounds: int, out: Path) -> None:
    """Measure all parts, in 90 minutes; then write tables and plot of all results."""
    out.mkdir(parents=True, exist_ok=True)
    for name in only or PIECES:
        optimum.run({**PIECES[name], "n_rounds": rounds, "json_path": str(_file(out, name))})
    found = {name: result_file.records(_file(out, name)) for name in PIECES if _file(out, name).exists()}
    (out / "expr1.md").write_text(tables(found), encoding="utf-8")
    click.echo(str(out / "expr1.md"))
    plots.draw_if_possible(functools.partial(plot, found), out / "expr1.png")


def _file(out: Path, name: str) -> Path:
    return out / f"optimum_{name}.jsonl"


def reached(n: int, n_helpers: int) -> float:
    """Return the share of the optimum's goodput that the authors measured with 8 machines (figure 12)."""
    machines = [Machine(True, osdi20.CARD_RATE)] * n + [Machine(False, osdi20.CARD_RATE)] * n_helpers
    nbytes = 1 << 30
    return osdi20.FIGURE_12["BytePS"][n_helpers] * 1e9 / 8 * least_time_s(machines, nbytes) / nbytes


def planned(record: dict[str, Any]) -> float | None:
    """Return the prediction of `bpsfast plan` in units of M/B; None for hash placement and unknown links."""
    chosen, rates = record["chosen"], record["measured"]["rates_bytes"]
    layout = _LAYOUTS.get(chosen["contestant"])
    if layout is None:
        return None
    machines = [Machine(at < chosen["n_workers"], rate) for at, rate in enumerate(rates)]
    found = plan.make(Model(chosen["load"], chosen["load"], _shapes(chosen)), machines,
                      partition_nbytes=chosen["partition_nbytes"], fusion_nbytes=Settings().fusion_bytes)
    [prediction] = [each for each in found.predictions if each.layout == layout]
    return (prediction.placed_s or prediction.formula_s) * max(rates) / chosen["nbytes"]


def simulated(record: dict[str, Any]) -> float | None:
    """Return the simulator's prediction in units of M/B; None for gloo and unknown links."""
    chosen, rates = record["chosen"], record["measured"]["rates_bytes"]
    name, n = chosen["contestant"], chosen["n_workers"]
    if name in ("gloo", "equal") or "credit_nbytes" not in chosen:  # records of earlier versions do not have it
        return None
    shapes = _shapes(chosen)
    job = workload(chosen["load"], [Layer("all", 0.0, 0.0, tuple(shapes))], shapes)
    options = Options(credit_nbytes=chosen["credit_nbytes"], fold=False,
                      partition_nbytes=chosen["partition_nbytes"], fusion_nbytes=Settings().fusion_bytes)
    helpers = [] if name == "colocated" else rates[n:]
    links = Costs(queued_answers=True, burst_nbytes=netns.burst_nbytes(chosen["rate_bits"]))
    found = simulate(job, cluster(rates[:n], helpers, links), name, options, n_steps=1)
    return found.step_s * max(rates) / chosen["nbytes"]


def _shapes(chosen: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in Cell(0, (), chosen["nbytes"], chosen["load"]).specs()}


def tables(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return all results as Markdown; times in units of M/B."""
    lines = ["# The optimum in real packets", "",
             "Times of a step in units of M/B: M the bytes of the gradients, B what two machines exchange both ways at "
             "once. Cells are *measured / formula (deviation)*; `void`: the CPUs were busier than 80 %. Written by "
             "`make expr1`.", ""]
    for records in found.values():
        for section in dict.fromkeys(record["section"] for record in records):
            lines += _section(section, [record for record in records if record["section"] == section])
    if "8" in found:
        lines += ["## Of the optimum, 8 machines: BytePS in figure 12 of its paper, and ours here", "",
                  "| helpers | the paper | here |", "|---|---|---|"]
        lines += [f"| {k} | {reached(8, k):.3f} | {1 / (1 + record['measured']['dev']):.3f} |"
                  for k, record in _by_helpers(_equal_links(found, 8), "optimal").items()]
    lines += ["", *_predictions([each for records in found.values() for each in records])]
    return "\n".join(lines) + "\n"


def _predictions(records: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["## What was predicted of these cells", "",
             "By `bpsfast plan` and by `bpsfast simulate`, from the links' rates, with no costs but bytes; the "
             "simulation knows that acknowledgements wait in the links' queues with bytes, and the shapers' burst. The "
             "deviation is that of the measurement from them. Cells that were void are left out.", "",
             "| cluster | helpers | load | placement | measured | planned | simulated |",
             "|---|---|---|---|---|---|---|"]
    errors: dict[str, list[float]] = {"planned": [], "simulated": []}
    for record in records:
        chosen, time = record["chosen"], record["measured"]["time"]
        expected = {"planned": planned(record), "simulated": simulated(record)}
        if record["measured"]["void"] or not any(expected.values()):
            continue
        cells = []
        for name, value in expected.items():
            if value is not None:
                errors[name].append(time / value - 1)
            cells.append("" if value is None else f"{value:.3f} ({100 * (time / value - 1):+.1f} %)")
        lines.append(f"| {record['section']} | {chosen['n_helpers']} | {chosen['load']} | "
                     f"{_NAMES.get(chosen['contestant'], chosen['contestant'])} | {time:.3f} | {' | '.join(cells)} |")
    for name, found in errors.items():
        percents = [100 * abs(error) for error in found]
        if percents:
            lines += ["", f"{name}: {len(percents)} cells, mean deviation {sum(percents) / len(percents):.1f} %, "
                          f"largest {max(percents):.1f} %; {sum(percent <= 5 for percent in percents)} within 5 %, "
                          f"{sum(percent <= 10 for percent in percents)} within 10 %."]
    return lines


def _equal_links(found: dict[str, list[dict[str, Any]]], n: int) -> list[dict[str, Any]]:
    """Return the records of *n* workers with equal links, sorted by the number of helpers."""
    return [record for name in (str(n), "full") for record in found.get(name, ())
            if record["chosen"]["n_workers"] == n]


def _section(title: str, records: Sequence[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(record["chosen"]["contestant"] for record in records))
    helpers = sorted({record["chosen"]["n_helpers"] for record in records})
    loads = list(dict.fromkeys(record["chosen"]["load"] for record in records))
    lines = [f"## {title}", "", "| helpers | load | " + " | ".join(_NAMES.get(name, name) for name in names) + " |",
             "|---|---|" + "---|" * len(names)]
    for k in helpers:
        for load in loads:
            cells = {record["chosen"]["contestant"]: record["measured"] for record in records
                     if (record["chosen"]["n_helpers"], record["chosen"]["load"]) == (k, load)}
            lines.append(f"| {k} | {load} | " + " | ".join(_cell(cells.get(name)) for name in names) + " |")
    return [*lines, ""]


def _cell(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return ""
    void = " void" if measured["void"] else ""
    if measured["formula"] is None:
        return f"{measured['time']:.3f}{void}"
    return f"{measured['time']:.3f} / {measured['formula']:.3f} ({100 * measured['dev']:+.1f} %){void}"


def _by_helpers(records: Sequence[dict[str, Any]], contestant: str) -> dict[int, dict[str, Any]]:
    return {record["chosen"]["n_helpers"]: record for record in records
            if record["chosen"]["contestant"] == contestant}


def plot(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the steps with equal links over the number of helpers: measurements as points, formulas as lines."""
    equal = [name for name in ("2", "4", "8") if name in found]
    with plots.figure(4.5, 4.2, max(1, len(equal))) as (made, panels):
        for panel, name in zip(panels, equal):
            for color, (contestant, label) in enumerate(_NAMES.items()):
                records = _by_helpers(_equal_links(found, int(name)), contestant)
                panel.plot(list(records), [record["measured"]["time"] for record in records.values()], "o",
                           color=f"C{color}", label=label)
                panel.plot(list(records), [record["measured"]["formula"] for record in records.values()], "-",
                           color=f"C{color}")
            panel.set(title=f"{name} workers, real packets", xlabel="helpers k", ylabel="t in units of M/B",
                      ylim=(0, 4.2))
            panel.legend(fontsize=8)
        plots.save(made, str(path))


if __name__ == "__main__":
    main()
