"""``make breakdown``: the gain of each part of BytePS's design, on real packets and simulated on 256 GPUs.

The first bar has all-reduces in the order of arrival; each further bar adds a part: the optimal split of sums over
machines, priority and credit, no barrier between steps, and (simulated only, since machines here have no GPUs) the
strategy inside a machine. Real packets are `bench schedule`'s rows of four workers and two helpers, each a network
namespace; `simulated_breakdown` has the 256 GPUs. Each bar also shows how far it is from linear scaling: the part of a
step's time that is not computing.

Writes ``breakdown.jsonl`` (raw samples and machine, then the simulated bars), ``breakdown.md`` and, if matplotlib is
installed, ``breakdown.png``. Needs root, torch and a run of ``make expr3``, which calibrates the network's constants.
"""
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bpsfast.base import exit_codes
from bpsfast.bench import cli_options, schedule
from bpsfast.bench.harness import plots, result_file
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.result_file import RESULTS
from bpsfast.bench.paper import osdi20, simulated_breakdown as simulated
from bpsfast.bench.paper.expr2 import constants
from bpsfast.orchestration.errors import ConfigError

#: Part of the design -> row of `bench schedule` with this part and all before it.
WAYS = dict(zip((part.name for part in simulated.PARTS),
                ("DDP gloo", "fifo, no credit", "priority", "priority, crossing")))
_Record = Mapping[str, Any]


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="Turns of each row.")
@click.option("--model", default="vgg16/32", show_default=True, metavar="NAME/N",
              help="What is trained on real packets; tensors N times smaller.")
@click.option("--redraw", is_flag=True, help="Measure and simulate nothing: tables and plot of the last run's records.")
@cli_options.results_folder()
@exit_codes.exit_on_error
def main(rounds: int, model: str, redraw: bool, out: Path) -> None:
    """Measure and simulate all bars, in about 15 minutes; then write tables and plot."""
    kept = out / "breakdown.jsonl"
    if redraw:
        if not kept.exists():
            raise ConfigError(f"{kept} is missing, which --redraw reads: run make breakdown first")
        records = result_file.records(kept)
    else:
        wire = constants(RESULTS / "expr3.json")
        out.mkdir(parents=True, exist_ok=True)
        given = BenchRun("breakdown", {"n_rounds": rounds, "model": model, "json_path": str(kept)})
        measured = schedule.run({"ways": "|".join(WAYS.values()), "model": model, "n_rounds": rounds})
        click.echo("simulating 256 GPUs: some two minutes")
        records = [*on_packets(measured[1:]), *on_gpus(simulated.bars(wire))]
        given.finish(records)
    (out / "breakdown.md").write_text(text(records), encoding="utf-8")
    click.echo(text(records))
    plots.draw_if_possible(functools.partial(plot, records), out / "breakdown.png")


def on_packets(records: Sequence[_Record]) -> list[dict[str, Any]]:
    """Return the rows of `bench schedule` as bars, in the order of the parts."""
    by_way = {record["chosen"]["way"]: record for record in records}
    found = []
    for part, way in WAYS.items():
        record = by_way[way]
        measured, step_s = record["measured"], record["simulated"]["step_s"]
        found.append({"section": "packets", "chosen": {"part": part, **record["chosen"]},
                      "measured": {**measured, "efficiency": measured["alone_s"] / measured["median_s"]},
                      "simulated": {"step_s": step_s, "efficiency": measured["alone_s"] / step_s}})
    return found


def on_gpus(bars: Sequence[simulated.Bar]) -> list[dict[str, Any]]:
    """Return the simulated bars as records; seconds."""
    return [{"section": "simulated", "chosen": {"part": bar.part, "model": bar.model, "n_workers": simulated.N,
                                                "n_helpers": simulated.K, "n_gpus": simulated.N * osdi20.GPUS},
             "simulated": {"step_s": bar.step_s, "linear_s": bar.linear_s, "efficiency": bar.efficiency}}
            for bar in bars]


def text(records: Sequence[_Record]) -> str:
    """Return all bars as Markdown."""
    packets, gpus = _sections(records)
    chosen, alone_s = packets[0]["chosen"], packets[0]["measured"]["alone_s"]
    rate_bits, first_s = packets[0]["measured"]["rate_bytes"] * 8, packets[0]["measured"]["median_s"]
    lines = ["# What each part is worth", "",
             "Each bar has all parts of those above it. *Linear*: the share of linear scaling, what a step computes by "
             "what it takes; *distance* is what is missing to 100 %. Written by `make breakdown`.", "",
             f"## Real packets: {chosen['n_workers']} machines that train, {chosen['n_helpers']} helpers", "",
             f"{chosen['model']}, every tensor {chosen['divisor']} times smaller ({chosen['nbytes'] / 1e6:.1f} MB); "
             f"network namespaces whose links move {rate_bits / 1e6:.1f} Mbit/s of payload each way; a step computes "
             f"{alone_s:.2f} s (slept). *Simulated*: the same step by the simulator. All-reduces are "
             "DistributedDataParallel's over gloo, which overlaps them with the backward pass.", "",
             "| part | step s | simulated | speed | linear | distance |", "|---|---|---|---|---|---|"]
    for record in packets:
        measured = record["measured"]
        notes = " void: the CPU was the limit" if measured["void"] else ""
        notes += f" {measured['n_wrong']} WRONG" if measured["n_wrong"] else ""
        lines.append(f"| {record['chosen']['part']} | {measured['median_s']:.2f}{notes} | "
                     f"{record['simulated']['step_s']:.2f} | {first_s / measured['median_s']:.2f} | "
                     f"{_percents(measured['efficiency'])} |")
    parts = list(dict.fromkeys(record["chosen"]["part"] for record in gpus))
    lines += ["", f"## Simulated: {gpus[0]['chosen']['n_gpus']} GPUs", "",
              f"{gpus[0]['chosen']['n_workers']} machines as BytePS's authors had them (8 V100 with NVLink, a card of "
              f"100 Gbit/s), {gpus[0]['chosen']['n_helpers']} helpers; batches and computing times of their figures 15 "
              "and 16. The all-reduce begins when the backward pass is over, as it was calibrated. Before the last bar "
              "all GPUs copy to memory, as without a choice; then GPUs 2 and 3, below the switch without the card. "
              "Cells are *linear (distance)*.", "",
              "| model | " + " | ".join(parts) + " |", "|---|" + "---|" * len(parts)]
    for model in dict.fromkeys(record["chosen"]["model"] for record in gpus):
        cells = {record["chosen"]["part"]: record["simulated"]["efficiency"] for record in gpus
                 if record["chosen"]["model"] == model}
        lines.append(f"| {model} | " + " | ".join(_percents(cells[part], "{} ({})") for part in parts) + " |")
    return "\n".join(lines) + "\n"


def _sections(records: Sequence[_Record]) -> tuple[list[_Record], list[_Record]]:
    """Return the records of real packets, and the simulated ones."""
    packets, gpus = ([record for record in records if record["section"] == name] for name in ("packets", "simulated"))
    return packets, gpus


def _percents(efficiency: float, form: str = "{} | {}") -> str:
    return form.format(f"{100 * efficiency:.1f} %", f"{100 * (1 - efficiency):.1f} %")


def plot(records: Sequence[_Record], path: Path) -> None:
    """Draw the bars: real packets with all samples on the left, the models on 256 GPUs on the right."""
    packets, gpus = _sections(records)
    with plots.figure(7.5, 4.2, 2) as (made, (left, right)):
        at = [float(x) for x in range(len(packets))]
        left.bar([x - 0.2 for x in at], [record["measured"]["efficiency"] for record in packets], 0.4, label="measured")
        left.bar([x + 0.2 for x in at], [record["simulated"]["efficiency"] for record in packets], 0.4,
                 label="simulated", color="C7")
        for x, record in enumerate(packets):
            samples = [record["measured"]["alone_s"] / sample for sample in record["measured"]["samples_s"]]
            left.plot([x - 0.2] * len(samples), samples, ".", color="black", markersize=3)
        left.set_xticks(at, [record["chosen"]["part"].replace(" ", "\n", 2) for record in packets], fontsize=8)
        left.set(title=f"{packets[0]['chosen']['n_workers']} machines, real packets", ylabel="share of linear scaling")
        parts = list(dict.fromkeys(record["chosen"]["part"] for record in gpus))
        models = list(dict.fromkeys(record["chosen"]["model"] for record in gpus))
        width = 0.8 / len(parts)
        for place, part in enumerate(parts):
            at = [x + (place - (len(parts) - 1) / 2) * width for x in range(len(models))]
            heights = [record["simulated"]["efficiency"] for record in gpus if record["chosen"]["part"] == part]
            right.bar(at, heights, width, label=part)
        right.set_xticks(list(range(len(models))), models, fontsize=8)
        right.set(title=f"{gpus[0]['chosen']['n_gpus']} GPUs, simulated", ylabel="share of linear scaling")
        for panel in (left, right):
            panel.axhline(1.0, color="black", linewidth=0.8)
            panel.set_ylim(0, 1.05)
            panel.legend(fontsize=8, loc="lower right")
        plots.save(made, str(path))


if __name__ == "__main__":
    main()
