"""Trials of `bench worker_loss` in which a lost worker is replaced: what the others lose until it trains with them.

A training of digits on one machine, as an elastic job that goes on (``--lost-worker wait``, on_worker_loss = continue).
One worker is killed at a random step. Its replacement has to load PyTorch first; then it asks to join, and until it has
made its first step the time counts in which the others make fewer steps than before the loss.
"""
from __future__ import annotations

import importlib.util
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bpsfast.bench.harness import table

SECTION = "rejoin"
N_WORKERS = 3
N_STEPS, _FIRST_LOSS, _LAST_LOSS = 900, 60, 150
_TIMEOUT_S = 180.0
_PROGRAM = "bpsfast.bench.worker_loss.rejoin_rank"


@dataclass
class WorkerHistory:
    """What one worker tells of its training.

    `comes_s`: when it asked to join its first job (CLOCK_MONOTONIC). `jobs`: number and rank of each job. Of each step:
    its number, its end, the digest of the parameters after it, and the number of ranks.
    """

    pid: int = 0
    comes_s: float = 0.0
    jobs: list[tuple[int, int]] = field(default_factory=list)
    first_digests: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    n_members: list[int] = field(default_factory=list)
    accuracy: float = 0.0

    def write(self, path: Path) -> None:
        """Write everything to *path*."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> WorkerHistory:
        """Return the history in *path*."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Rejoin:
    """The result of one trial; `trouble` if bad.

    `rate` and `rate_during`: steps a second of the remaining workers before the loss, and from when the replacement
    asked to join (`window_s` long) to the end of its first step. `pause_s`: the longest step in that time.
    """

    victim: int
    step: int
    rate: float = 0.0
    rate_during: float = 0.0
    window_s: float = 0.0
    pause_s: float = 0.0
    accuracy: float = 0.0
    trouble: str = ""


def missing() -> str | None:
    """Return what these trials lack here, in words; None: nothing."""
    lacking = [package for module, package in (("torch", "torch"), ("sklearn", "scikit-learn"))
               if importlib.util.find_spec(module) is None]
    return f"{' and '.join(lacking)} not installed (pip install {' '.join(lacking)})" if lacking else None


def run(n_trials: int, folder: Path) -> list[Rejoin]:
    """Run a trial without a loss (the first result, with its accuracy alone), then *n_trials* with one."""
    found = [_run(-1, -1, folder / "undisturbed")]
    for index in range(n_trials):
        chance = random.Random(f"rejoin {index}")
        found.append(_run(index % N_WORKERS, chance.randrange(_FIRST_LOSS, _LAST_LOSS), folder / f"trial_{index}"))
    return found


def _run(victim: int, step: int, folder: Path) -> Rejoin:
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "bpsfast", "run", "-n", str(N_WORKERS), "--elastic", "--lost-worker", "wait",
               "--set", "on_worker_loss=continue", "--set", "timeout_s=60", "--timeout", str(_TIMEOUT_S), "--",
               sys.executable, "-m", _PROGRAM, str(folder), str(N_STEPS), str(victim), str(step)]
    with (folder / "output.txt").open("wb") as output:
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    histories = {int(path.stem.rpartition("_")[2]): WorkerHistory.read(path) for path in folder.glob("worker_*.json")}
    if code:
        return Rejoin(victim, step, trouble=f"exit code {code}: see {folder / 'output.txt'}")
    return judge(victim, step, histories)


def judge(victim: int, step: int, histories: dict[int, WorkerHistory]) -> Rejoin:
    """Return the result of a trial by what the workers tell, by number."""
    remaining = sorted(set(range(N_WORKERS)) - {victim})
    newcomers = sorted(set(histories) - set(range(N_WORKERS)))
    troubles = [f"worker {number} ended without a word" for number in remaining if number not in histories]
    if not troubles:
        troubles += _differences(histories)
        troubles += [f"worker {number} has not made each step once" for number in remaining
                     if histories[number].steps != [*range(1, N_STEPS + 1)]]
    if victim >= 0 and len(newcomers) != 1:
        troubles.append(f"workers {newcomers} have replaced one")
    accuracy = min(each.accuracy for each in histories.values()) if histories else 0.0
    if troubles or victim < 0:
        return Rejoin(victim, step, accuracy=accuracy, trouble="; ".join(troubles))
    newcomer = histories[newcomers[0]]
    first_s = newcomer.ends_s[0]
    during, before, pauses = [], [], []
    for number in remaining:
        ends_s = histories[number].ends_s
        within = [end_s for end_s in ends_s if newcomer.comes_s < end_s <= first_s]
        during.append(len(within) / (first_s - newcomer.comes_s))
        before.append(1.0 / statistics.median(b - a for a, b in pairwise(ends_s[:step])))
        pauses.append(max(b - a for a, b in pairwise(ends_s) if b > newcomer.comes_s and a < first_s))
    return Rejoin(victim, step, statistics.median(before), statistics.median(during), first_s - newcomer.comes_s,
                  max(pauses), accuracy)


def _differences(histories: dict[int, WorkerHistory]) -> list[str]:
    """Return where workers have different parameters: at the start of a job, or after a step."""
    found: dict[str, set[str]] = {}
    for history in histories.values():
        for (job, _), digest in zip(history.jobs, history.first_digests):
            found.setdefault(f"at the start of job {job}", set()).add(digest)
        for number, digest in zip(history.steps, history.digests):
            found.setdefault(f"after step {number}", set()).add(digest)
    return [f"parameters differ {where}" for where, digests in found.items() if len(digests) > 1][:3]


def text(trials: Sequence[Rejoin]) -> str:
    """Return the table."""
    lines = [["victim", "at step", "steps/s", "while it joins", "ratio", "for s", "longest step ms", "accuracy", ""]]
    for each in trials:
        ratio = f"{each.rate_during / each.rate:.2f}" if each.rate else "-"
        lines.append(["-" if each.victim < 0 else str(each.victim), "-" if each.step < 0 else str(each.step),
                      f"{each.rate:.1f}", f"{each.rate_during:.1f}", ratio, f"{each.window_s:.2f}",
                      f"{1e3 * each.pause_s:.0f}", f"{each.accuracy:.4f}", each.trouble])
    return ("# A lost worker is replaced: steps a second before the loss, and from when the replacement asks to join\n"
            f"# to the end of its first step\n{table.plain(lines)}")


def records(trials: Sequence[Rejoin]) -> list[dict[str, Any]]:
    """Return the rows of the result file: one, with all trials."""
    good = [each for each in trials if each.rate and not each.trouble]
    if not good:
        return []
    return [{"section": SECTION, "chosen": {"n_workers": N_WORKERS, "n_steps": N_STEPS, "n_per_round": 1},
             "measured": {"samples_s": [each.pause_s for each in good],
                          "ratio": statistics.median(each.rate_during / each.rate for each in good),
                          "undisturbed_accuracy": trials[0].accuracy, "trials": [asdict(each) for each in trials]}}]
