"""``bpsfast bench helpers``: compares a training that loses and replaces half of its helpers with an undisturbed one.

A helper is a node without ranks, which only sums. Both trainings make the same steps on the same machine, one after the
other. Their parameters must be the same, bit for bit, and no step may take longer than two median steps and the time in
which a loss is noticed.
"""
from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bpsfast.base.process_identity import folder_prefix
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.table import plain
from bpsfast.orchestration.errors import StallError

from ..chaos.processes import Processes

_RANKS = (1, 1, 1)
_N_HELPERS = 4
#: Helpers that are killed at a quarter of the steps; others are started in their place at half of them.
_STRUCK = ("helper 2", "helper 3")
#: The death of a process must be noticed within this time.
_DETECTED_S = 0.1
_END_S = 300.0


@dataclass(frozen=True)
class Training:
    """One training: when rank 0's steps ended, what all ranks reported at their end, and when helpers changed."""

    at_s: list[float]
    ends: list[dict[str, Any]]
    lost_at_s: float = 0.0
    started_at_s: float = 0.0

    def steps_s(self, begin_s: float = 0.0, end_s: float = math.inf) -> list[float]:
        """Return the durations of steps that ended between two times, without the first ones, which allocate memory."""
        return [after - before for before, after in itertools.pairwise(self.at_s[4:]) if begin_s <= after <= end_s]


def run(options: dict[str, Any]) -> bool:
    """Run both for *options* (steps, size_mb, placement, json_path); return whether bits and pauses are right."""
    given = BenchRun("helpers", options)
    disturbed = train(options, is_disturbed=True)
    calm = train({**options, "steps": len(disturbed.at_s)}, is_disturbed=False)
    rows, troubles = judge(calm, disturbed)
    print(plain([["", "median step, ms", "longest step, ms"], *rows]))
    for trouble in troubles:
        print(trouble)
    given.finish([{"troubles": troubles}, asdict(calm), asdict(disturbed)])
    return not troubles


def train(options: dict[str, Any], is_disturbed: bool) -> Training:
    """Run one training; a disturbed one has 4, then 2, then 4 helpers, and does not end before that."""
    n_steps, times = options["steps"], [0.0, 0.0]
    values = {"transport": "tcp", "placement": options["placement"], "timeout_s": 60, "start_timeout_s": 240}
    with tempfile.TemporaryDirectory(prefix=folder_prefix("helpers")) as folder, Processes(
            Path(folder), _RANKS, _N_HELPERS, values, "bpsfast.bench.helpers.rank", n_steps, options["size_mb"],
            len(_STRUCK) if is_disturbed else 0) as processes:
        if is_disturbed:
            _until(processes, n_steps // 4)
            times[0] = time.monotonic()
            for name in _STRUCK:
                processes[name].kill()
            _until(processes, n_steps // 2)
            times[1] = time.monotonic()
            for name in _STRUCK:
                processes.restart(name)
        codes = processes.wait(time.monotonic() + _END_S)
        histories = [[json.loads(line) for line in processes.path(rank).read_text().splitlines()]
                     for rank in range(sum(_RANKS))]
    odd = {name: code for name, code in codes.items() if code != 0}
    if odd:
        raise StallError(f"the training did not end well within {_END_S:g} s: exit codes are {odd}")
    return Training([line["at_s"] for line in histories[0][:-1]], [history[-1] for history in histories], *times)


def judge(calm: Training, disturbed: Training) -> tuple[list[list[str]], list[str]]:
    """Return a table's rows, and what is wrong in words."""
    end_s = disturbed.at_s[-1]
    phases = [("helpers stay", calm, calm.at_s[0], calm.at_s[-1]),
              ("4 helpers", disturbed, disturbed.at_s[0], disturbed.lost_at_s),
              ("two are lost", disturbed, disturbed.lost_at_s, disturbed.started_at_s),
              ("two others come", disturbed, disturbed.started_at_s, end_s)]
    rows, troubles = [], []
    median_s = statistics.median(calm.steps_s())
    allowed_s = 2 * median_s + _DETECTED_S
    for name, training, begin_s, until_s in phases:
        steps_s = training.steps_s(begin_s, until_s)
        longest_s = max(steps_s, default=0.0)
        rows.append([name, f"{1e3 * statistics.median(steps_s):.1f}", f"{1e3 * longest_s:.1f}"])
        if training is disturbed and longest_s > allowed_s:
            troubles.append(f"{name}: a step took {longest_s:.3f} s; one of {median_s:.3f} s, another for the pause "
                            f"and {_DETECTED_S:g} s to notice are allowed: {allowed_s:.3f} s")
    if len({end["digest"] for end in (*calm.ends, *disturbed.ends)}) != 1:
        troubles.append("the parameters are not the same to the bit")
    for rank, end in enumerate(disturbed.ends):
        if end["lost"] < 1 or end["joined"] < len(_STRUCK):
            troubles.append(f"the node of rank {rank} has lost helpers {end['lost']} times and got {end['joined']}: "
                            "nothing is shown")
    return rows, troubles


def _until(processes: Processes, n_steps: int) -> None:
    """Wait until rank 0 has made *n_steps*."""
    deadline = time.monotonic() + _END_S
    path = processes.path(0)
    while not path.exists() or path.read_text().count("\n") < n_steps:
        if processes["rank 0"].poll() is not None or time.monotonic() > deadline:
            raise StallError(f"rank 0 has not made {n_steps} steps within {_END_S:g} s: it hangs, or has ended")
        time.sleep(0.002)
