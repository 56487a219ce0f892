"""One trial of `bench chaos` on an elastic job: kills one or two workers; the others must continue with right sums.

Every sum of every job has the input of each of its ranks exactly once, except of lost ranks that a job goes on without
until they are replaced. All workers that reach the end have the same weights, to which each step has added its sum
once; where jobs end at a loss and lost workers are replaced, these are the weights of an undisturbed job.
"""
from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bpsfast.launch.daemons import clean_environment

from .history import HANG_S, SIZES, STOP, digest, expected, summed
from .scenario import GOES_ON, LOST_WORKER, Scenario
from .worker import KEPT


@dataclass
class WorkerHistory:
    """The history of one worker: digests by job and step, and of which ranks' inputs; `nodes` of each job's ranks; how
    it ended ("": unknown).
    """

    sums: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    ranks: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)
    nodes: dict[int, list[int]] = field(default_factory=dict)
    end: str = ""
    text: str = ""
    weights: str = ""


def run(scenario: Scenario, folder: Path) -> tuple[str, str]:
    """Run the trial; return outcome and words as in `trial.Verdict`. All its processes have ended then."""
    n_workers = sum(scenario.ranks)
    goes_on = scenario.kind in GOES_ON
    command = [sys.executable, "-m", "bpsfast", "run", "--elastic", "--lost-worker", LOST_WORKER[scenario.kind],
               "--set", f"on_worker_loss={'continue' if goes_on else 'abort'}", "--ranks",
               ",".join(map(str, scenario.ranks)), "--", sys.executable, "-m", "bpsfast.bench.chaos.worker",
               str(folder), str(folder / STOP)]
    environ = {**clean_environment(os.environ), "BPSFAST_TRANSPORT": scenario.transport, "BPSFAST_TIMEOUT_S": "60"}
    with (folder / "output").open("wb") as output:
        launcher = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
    try:
        for fault in scenario.faults:
            _await(launcher, folder, functools.partial(has_made, n_steps=fault.step))
            time.sleep(fault.delay_s)
            _kill(folder / f"pid_{fault.role.split()[1]}")
        _await(launcher, folder, lambda found: has_made(found, scenario.n_steps) and (
            not goes_on or sum(bool(history.sums) for history in found.values()) >= n_workers + len(scenario.faults)))
        (folder / STOP).touch()
        code = launcher.wait(HANG_S)
    except subprocess.TimeoutExpired:
        return "hung", f"the job did not end within {HANG_S:g} s"
    finally:
        launcher.kill()
        launcher.wait()
    histories = _histories(folder)
    killed = {int(fault.role.split()[1]) for fault in scenario.faults}
    return judge(scenario, histories, killed, code, n_workers)


def read(path: Path) -> WorkerHistory:
    """Return the history in *path*, as far as it was written."""
    found, job = WorkerHistory(), 0
    for line in path.read_text().split("\n")[:-1]:
        fields: dict[str, Any] = json.loads(line)
        if "job" in fields:
            job = fields["job"]
            found.nodes[job] = fields["nodes"]
        elif "step" in fields:
            found.sums[job, fields["step"]], found.ranks[job, fields["step"]] = fields["sums"], fields["ranks"]
        else:
            found.end, found.text, found.weights = fields["end"], fields.get("text", ""), fields.get("weights", "")
    return found


def judge(scenario: Scenario, histories: dict[int, WorkerHistory], killed: set[int], code: int,
          n_workers: int) -> tuple[str, str]:
    """Return outcome and words of a job of at first *n_workers*, whose launcher has ended with *code*."""
    nodes = {job: each for history in histories.values() for job, each in history.nodes.items()}
    named: dict[tuple[int, int], list[list[int]]] = {}
    for number, history in sorted(histories.items()):
        for (job, step), sums in history.sums.items():
            if named.setdefault((job, step), history.ranks[job, step]) != history.ranks[job, step]:
                return "wrong", f"worker {number}, job {job}, step {step}: others name other contributors"
            for i, have in enumerate(sums):
                if have != expected(machines_of(nodes[job], history.ranks[job, step][i]), step, i):
                    return "wrong", f"worker {number}, job {job}, step {step}, gradient {i}: {have}"
    alive = {number: history for number, history in histories.items() if number not in killed}
    silent = [number for number, history in alive.items() if not history.end]
    if silent:
        return "crashed", f"workers {silent} ended without a word"
    errors = {history.text for history in alive.values() if history.end != "ok"}
    if errors or code:
        words = sorted(errors)[0] if errors else f"the launcher ended with exit code {code}"
        return ("raised" if words.startswith("no quorum") else "wrong"), words
    sizes = [len(each) for _, each in sorted(nodes.items())]
    if LOST_WORKER[scenario.kind] == "wait" and scenario.kind not in GOES_ON and set(sizes) != {n_workers}:
        return "wrong", f"ranks of the jobs: {sizes}"
    right = _weights(histories, nodes)
    wrong = [number for number, history in alive.items() if history.weights != right]
    return ("wrong", f"weights of workers {wrong} are not the sum of all steps") if wrong else ("recovered", "")


def machines_of(nodes: list[int], ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return those of *ranks* that each machine has; *nodes* has the machine of each rank."""
    return tuple(tuple(rank for rank in ranks if nodes[rank] == node)
                 for node in dict.fromkeys(nodes[rank] for rank in ranks))


def _weights(histories: dict[int, WorkerHistory], nodes: dict[int, list[int]]) -> str:
    """Return the digest of weights to which each step has added its sum of the last job that made the step."""
    made: dict[int, tuple[int, list[int]]] = {}
    for history in histories.values():
        for job, step in history.sums:
            made[step] = max((job, history.ranks[job, step][KEPT]), made.get(step, (0, [])))
    weights = np.zeros(SIZES[KEPT] // 4, np.float32)
    for step, (job, ranks) in sorted(made.items()):
        weights += summed(machines_of(nodes[job], ranks), step, KEPT)
    return digest(weights)


def has_made(histories: dict[int, WorkerHistory], n_steps: int) -> bool:
    """Whether some worker has made *n_steps*."""
    return any(step >= n_steps for history in histories.values() for _, step in history.sums)


def _await(launcher: subprocess.Popen[bytes], folder: Path,
           is_reached: Callable[[dict[int, WorkerHistory]], bool]) -> None:
    """Wait until *is_reached* by the histories, or the job has ended."""
    deadline = time.monotonic() + HANG_S
    while launcher.poll() is None and time.monotonic() < deadline:
        if is_reached(_histories(folder)):
            return
        time.sleep(0.002)


def _histories(folder: Path) -> dict[int, WorkerHistory]:
    return {int(path.stem[7:]): read(path) for path in folder.glob("worker_*.jsonl")}


def _kill(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the job has already ended
        os.kill(int(path.read_text()), signal.SIGKILL)
