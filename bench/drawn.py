"""``python -m bpsfast.bench.drawn``: draws the README's plots from existing result files, without measuring.

``push_pull_one_machine.png``: the time of gloo and MPI relative to ours, over size (from
`push_pull_one_machine.jsonl`); ``schedule.png``: a step of each method, measured and simulated (from `schedule.jsonl`);
``helpers.png``: the steps of a training that loses helpers, and of one that does not (from `helpers.jsonl`).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from bpsfast.base import exit_codes
from bpsfast.bench import cli_options
from bpsfast.bench.harness import plots, result_file
from bpsfast.bench.harness.result_file import RESULTS
from bpsfast.orchestration.errors import ConfigError

#: File name -> its bench, if that is not the name.
_BENCHES = {"push_pull_one_machine": "push_pull --compare gloo,mpi"}
_CONTESTANTS = ("torch", "numpy", "gloo", "mpi")
_Record = Mapping[str, Any]


def records(path: Path) -> list[_Record]:
    """Return the rows of a result file; raises `ConfigError` if *path* does not exist."""
    if not path.exists():
        raise ConfigError(f"{path} is missing: `bpsfast bench {_BENCHES.get(path.stem, path.stem)} --json {path}` "
                          "writes it")
    return [*result_file.records(path)]


def times_ours(rows: Sequence[_Record]) -> dict[str, dict[int, float]]:
    """Return for each other contestant, by bytes: its median time divided by ours, which includes copies in and out.

    Raises `ConfigError` if one was not measured.
    """
    medians: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["section"] == "by size":
            chosen = row["chosen"]
            medians.setdefault(chosen["operation"], {})[chosen["nbytes"]] = row["measured"]["median_s"]
    lacking = [name for name in _CONTESTANTS if name not in medians]
    if lacking:
        raise ConfigError(f"the run of push_pull has no rows of {', '.join(lacking)}: `bpsfast bench "
                          f"{_BENCHES['push_pull_one_machine']}` measures all that is drawn")
    ours = medians.pop("torch")
    fastest = {nbytes: min(of[nbytes] for name, of in medians.items() if name.startswith("mpi") and nbytes in of)
               for nbytes in ours}
    others = {"gloo": medians["gloo"], "Open MPI, the best of three ways": fastest,
              "bpsfast, arrays of bpsfast.empty": medians["numpy"]}
    return {name: {nbytes: of[nbytes] / ours[nbytes] for nbytes in sorted(ours)} for name, of in others.items()}


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
    with plots.figure(7.0, 4.0) as (made, (panel,)):
        for name, ratios in times_ours(records(RESULTS / "push_pull_one_machine.jsonl")).items():
            panel.plot(list(ratios), list(ratios.values()), "o-", label=name)
        panel.axhline(1.0, color="black", linewidth=1.0, label="bpsfast, PyTorch's tensors in place")
        panel.set(xscale="log", yscale="log", xlabel="bytes of an array, two ranks of one machine",
                  ylabel="median time, in times of bpsfast's")
        panel.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
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
