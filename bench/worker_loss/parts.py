"""The parts of `bench worker_loss`: the cost of a step, pauses at a loss, and the same losses with torchft.

`cost` times a step with on_worker_loss = continue and with the default, in turns. `trial` kills or stops one of four
ranks at a random moment of a training, many times, and measures how long the others stand still; all sums are checked.
`torchft_trial` does the same with torchft, where it is installed, for the same losses. `rejoin` replaces the lost one.
"""
from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.option_lists import parse_names, parse_sizes

from . import cost, rejoin, report, torchft_trial, trial
from .trial import Kind, Trial

PARTS = ("cost", "pause", "torchft", "rejoin")
_SIZES, _QUICK_SIZES = "4K,64K,1M,16M,64M", "4K,1M"
_N_TRIALS, _N_SILENT, _N_TORCHFT, _N_REJOIN, _N_ROUNDS = 100, 5, 20, 9, 11
_SILENT = Kind("four machines", "silent machine")


def run(options: Mapping[str, Any]) -> bool:
    """Measure as *options* say, print tables, write the result file; return whether all sums were right.

    *options*, each of which may be missing or None: parts ("cost,pause"), sizes of the cost (4K,64K,1M,16M,64M),
    n_rounds (11), n_trials (100, of each shape), n_silent (5), n_torchft (20, of each of its settings), n_rejoin (9),
    quick, json_path. A trial of ours that hangs, or ends otherwise than in order, is a failure as a wrong sum is;
    torchft's are only counted. Folders of failed trials are kept.
    """
    given = BenchRun("worker_loss", options)
    parts = parse_names("--parts", given["parts"], PARTS) if "parts" in given else PARTS
    records, is_right = [], True
    if "cost" in parts:
        sizes = parse_sizes(given.get("sizes") or (_QUICK_SIZES if given.quick else _SIZES))
        rows = cost.run(sizes, given.rounds(_N_ROUNDS, quick=5))
        print(cost.text(rows), flush=True)
        records += cost.records(rows)
        is_right = not any(row.n_wrong for row in rows)

    def number(name: str, default: int, quick: int, part: str) -> int:
        return given.get(name, quick if given.quick else default) if part in parts else 0

    n_trials, n_silent = number("n_trials", _N_TRIALS, 2, "pause"), number("n_silent", _N_SILENT, 1, "pause")
    n_torchft, lacking = number("n_torchft", _N_TORCHFT, 1, "torchft"), torchft_trial.missing()
    if n_torchft and lacking is not None:
        print(f"torchft is left out: {lacking}", flush=True)
        n_torchft = 0
    plan = [*losses(n_trials, n_silent, n_torchft)]
    trials = _run(plan)
    if trials:
        print(report.text(trials), flush=True)
    records += report.records(trials)
    is_right = is_right and not any(each.trouble for each in trials if each.contestant not in torchft_trial.LIGHTHOUSES)
    n_rejoin = number("n_rejoin", _N_REJOIN, 1, "rejoin")
    if n_rejoin and (lacking := rejoin.missing()) is not None:
        print(f"rejoin is left out: {lacking}", flush=True)
    elif n_rejoin:
        folder = Path(tempfile.mkdtemp(prefix="bpsfast-rejoin-"))
        joined = rejoin.run(n_rejoin, folder)
        print(rejoin.text(joined), flush=True)
        records += rejoin.records(joined)
        if any(each.trouble for each in joined):
            print(f"kept: {folder}", flush=True)
            is_right = False
        else:
            shutil.rmtree(folder)
    given.finish(records)
    return is_right


def losses(n_trials: int, n_silent: int, n_torchft: int) -> list[tuple[Kind | str, int]]:
    """Return the trials in their order: kind, or torchft's contestant, and index of the schedule.

    Trials of one index follow each other. On four machines every second one loses the node as well; those that are
    compared with torchft are run both ways.
    """
    found: list[tuple[Kind | str, int]] = []
    for i in range(max(n_trials, n_torchft)):
        if i < n_trials:
            found.append((Kind("one machine", "rank"), i))
        found += [(Kind("four machines", lost), i) for is_odd, lost in enumerate(("rank", "machine"))
                  if i < n_torchft or i % 2 == is_odd]
        if i < n_torchft:
            found += [(contestant, i) for contestant in torchft_trial.LIGHTHOUSES]
    return found + [(_SILENT, i) for i in range(n_silent)]


def _run(plan: Sequence[tuple[Kind | str, int]]) -> list[Trial]:
    """Run the trials of *plan*. Folders of those with a trouble are kept, and their paths are printed."""
    folders, found = Path(tempfile.mkdtemp(prefix="bpsfast-worker-loss-")), []
    for kind, index in plan:
        name = kind.name if isinstance(kind, Kind) else kind
        folder = folders / f"{name} {index}".replace(",", "").replace(" ", "_")
        done = trial.run(kind, index, folder) if isinstance(kind, Kind) else torchft_trial.run(kind, index, folder)
        found.append(done)
        if done.trouble:
            print(f"{done.contestant}, trial {index}: {done.trouble} (kept: {folder})", flush=True)
        else:
            shutil.rmtree(folder)
    if not any(each.trouble for each in found):
        shutil.rmtree(folders)
    return found
