"""``python -m bpsfast.bench.drawn``: draws the README's plots from existing result files, without measuring.

``push_pull_one_machine.png``: time and speed by size of ours, gloo and three MPI libraries (from
`push_pull_one_machine.jsonl`); ``schedule.png``: a step of each method, measured and simulated (from `schedule.jsonl`);
``helpers.png``: the steps of a training that loses helpers, and of one that does not (from `helpers.jsonl`).
"""
from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from bpsfast.base import exit_codes
from bpsfast.bench import cli_options
from bpsfast.bench.harness import plots, result_file
from bpsfast.bench.harness.result_file import RESULTS
from bpsfast.bench.push_pull import mpi_environments, paired
from bpsfast.orchestration.errors import ConfigError

#: File name -> its bench, if that is not the name.
_BENCHES = {"push_pull_one_machine": "push_pull --compare gloo,mpi,mpich,impi"}
#: Names of the file -> names in the plot.
_OURS = {"numpy": "bpsfast, NumPy", "torch": "bpsfast, PyTorch", "backend": "bpsfast, torch.distributed",
         "gloo": "gloo, torch.distributed"}
_Record = Mapping[str, Any]


def records(path: Path) -> list[_Record]:
    """Return the rows of a result file; raises `ConfigError` if *path* does not exist."""
    if not path.exists():
        raise ConfigError(f"{path} is missing: `bpsfast bench {_BENCHES.get(path.stem, path.stem)} --json {path}` "
                          "writes it")
    return [*result_file.records(path)]


def times_us(rows: Sequence[_Record]) -> dict[str, dict[int, float]]:
    """Return for each contestant, by bytes, its median time in us; of MPI's ways the faster one.

    Raises `ConfigError` if one was not measured.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for (library, nbytes), medians in sorted(paired.samples_us(rows).items()):
        named = {_OURS[name]: each for name, each in medians.items() if name in _OURS}
        for name, each in {**named, mpi_environments.TITLES[library]: paired.best_mpi_us(medians)}.items():
            found.setdefault(name, {}).setdefault(nbytes, []).extend(each)
    lacking = [name for name in (*_OURS.values(), *mpi_environments.TITLES.values()) if name not in found]
    if lacking:
        raise ConfigError(f"the run of push_pull has no rows of {', '.join(lacking)}: `bpsfast bench "
                          f"{_BENCHES['push_pull_one_machine']}` measures all that is drawn")
    return {name: {nbytes: statistics.median(each) for nbytes, each in of.items()} for name, of in found.items()}


def steps(rows: Sequence[_Record]) -> dict[str, tuple[float, float]]:
    """Return for each method a step's median and simulated time, divided by the time without communication."""
    return {row["chosen"]["way"]: (row["measured"]["median_s"] / row["measured"]["alone_s"],
                                   row["simulated"]["step_s"] / row["measured"]["alone_s"]) for row in rows}


def seconds_and_steps(training: _Record) -> tuple[list[float], list[float]]:
    """Return for each step its end, in seconds since the end of the first, and its milliseconds."""
    at_s = training["at_s"]
    return [end - at_s[0] for end in at_s[1:]], [1e3 * (end - begin) for begin, end in pairwise(at_s)]


@click.command()
@cli_options.results_folder("plots")
@exit_codes.exit_on_error
def main(out: Path) -> None:
    """Draw the plots of the existing results."""
    plots.check()
    out.mkdir(parents=True, exist_ok=True)
    with plots.figure(5.5, 4.5, n_panels=2) as (made, (times, speeds)):
        for name, of in times_us(records(RESULTS / "push_pull_one_machine.jsonl")).items():
            line = "o-" if name.startswith("bpsfast") else "s--"
            times.plot(list(of), list(of.values()), line, label=name, markersize=3)
            speeds.plot(list(of), [nbytes / us / 1e3 for nbytes, us in of.items()], line, markersize=3)
        for panel, what in ((times, "microseconds of a sum"), (speeds, "GB/s: bytes of the array by time")):
            panel.set(xscale="log", yscale="log", xlabel="bytes of an array, two ranks of one machine", ylabel=what)
        made.legend(fontsize=8, loc="outside upper center", ncols=4)
        plots.save(made, str(out / "push_pull_one_machine.png"))
    with plots.figure(7.0, 4.0) as (made, (panel,)):
        found = steps(records(RESULTS / "schedule.jsonl"))
        panel.barh(list(found), [measured for measured, _ in found.values()], label="measured")
        panel.plot([simulated for _, simulated in found.values()], list(found), "k|", markersize=14, label="simulated")
        panel.axvline(1.0, color="black", linewidth=1.0, label="the same step without any exchange")
        panel.set(xlabel="time of a step, in times of the same without any exchange")
        panel.invert_yaxis()
        panel.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        plots.save(made, str(out / "schedule.png"))
    with plots.figure(9.0, 4.0) as (made, (panel,)):
        _, calm, disturbed = records(RESULTS / "helpers.jsonl")
        panel.plot(*seconds_and_steps(calm), ".", markersize=3, color="tab:gray", label="4 helpers that stay")
        panel.plot(*seconds_and_steps(disturbed), ".", markersize=4, label="4, then 2, then 4 helpers")
        for said, name in (("two are killed", "lost_at_s"), ("two others are started", "started_at_s")):
            panel.axvline(disturbed[name] - disturbed["at_s"][0], color="black", linewidth=1.0)
            panel.annotate(said, (disturbed[name] - disturbed["at_s"][0], 1.0), xycoords=("data", "axes fraction"),
                           xytext=(4, -12), textcoords="offset points", fontsize=8)
        panel.set(xlabel="seconds since the first step", ylabel="milliseconds of a step", ylim=(0, None))
        panel.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        plots.save(made, str(out / "helpers.png"))
    click.echo(", ".join(f"{out}/{name}.png" for name in ("push_pull_one_machine", "schedule", "helpers")))


if __name__ == "__main__":
    main()
