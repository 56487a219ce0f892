"""``bpsfast bench chaos``: kills and stops processes of training jobs, and checks every sum of their ranks.

Each seed is one trial: a job of real processes that trains; one or two of them are killed or stopped at a random
moment, or the link is cut, or connections are reset (`scenario`). Ranks write a history (`rank`), and an oracle checks
it (`history`): each rank's input is in every sum exactly once, except for lost ranks that the job names and goes on
without; or the job ends with an error that names who is lost, soon after that can be known. A wrong sum, a hang and a
crash are failures.
"""
from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.table import plain

from ..harness.cpu_load import CpuLoad
from . import trial
from .scenario import MAY_RAISE, MUST_RECOVER, draw

_OUTCOMES = ("recovered", "raised", "late", "wrong", "crashed", "hung", "skipped")


def run(options: dict[str, Any]) -> bool:
    """Run the trials of *options* (seeds, first, load, json_path); return whether all of them ended as they must.

    The folder of a trial that did not is kept, and its path is printed.
    """
    given, counts = BenchRun("chaos", options), Counter[tuple[str, str]]()
    rows, folders = [], Path(tempfile.mkdtemp(prefix="bpsfast-chaos-"))
    bad = 0
    for seed in range(options["first"], options["first"] + options["seeds"]):
        scenario, folder = draw(seed), folders / f"seed_{seed}"
        with CpuLoad(options.get("load", 0)):
            verdict = trial.run(scenario, folder)
        counts[scenario.kind, verdict.outcome] += 1
        rows.append(asdict(verdict))
        if verdict.is_good:
            shutil.rmtree(folder)
        else:
            bad += 1
            print(f"seed {seed}: {scenario.kind}: {verdict.outcome}: {verdict.words} (kept: {folder})")
    print(_shown(counts))
    if not bad:
        shutil.rmtree(folders)
    given.finish(rows)
    return not bad


def _shown(counts: Counter[tuple[str, str]]) -> str:
    """Return a table: the number of trials of each kind, by outcome."""
    lines = [["what happened", "must", *_OUTCOMES]]
    for kind in (*MUST_RECOVER, *MAY_RAISE):
        of = [counts[kind, outcome] for outcome in _OUTCOMES]
        if any(of):
            lines.append([kind, "recover" if kind in MUST_RECOVER else "recover or raise", *map(str, of)])
    return plain(lines)
