"""One trial of `bench worker_loss`: a training of four ranks, one of which is killed or stopped at a random moment."""
from __future__ import annotations

import random
import signal
import statistics
import subprocess
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bpsfast.bench.chaos.processes import Processes
from bpsfast.orchestration.errors import BpsError, StallError

from .training import N_RANKS, PHASES, History, Progress

#: The lease of the trials in which a machine is silent, and the time between its heartbeats.
LEASE_S, HEARTBEAT_S = 2.0, 0.5
#: Steps over which the lost time is counted, from the one in which the rank is lost.
N_AROUND = 20
#: Steps at the start that no median includes: they allocate memory.
N_WARMUP = 8
_FIRST_KILL, _LAST_KILL = 25, 45
#: A rank dies at most this long after the step of its schedule, the time of several steps: so in any part of a step.
_MOST_DELAY_S = 0.1
_START_S = 120.0
#: The remaining ranks must end within this time of the loss.
END_S = 60.0
_PROGRAM = "bpsfast.bench.worker_loss.rank"

#: The ranks of each machine.
SHAPES = {"one machine": (N_RANKS,), "four machines": (1,) * N_RANKS}


class Kind(NamedTuple):
    """Kind of a trial: a key of `SHAPES`, and what is lost: "rank", "machine" (its node, too), "silent machine"."""

    shape: str
    lost: str

    @property
    def name(self) -> str:
        """Words for tables."""
        return f"{self.shape}, {self.lost}"


class Schedule(NamedTuple):
    """When a trial's loss is: rank *victim* is killed *delay_s* after it has made *step* steps."""

    victim: int
    step: int
    delay_s: float


def draw(index: int) -> Schedule:
    """Return the schedule of trial *index*, the same for all contestants."""
    chance = random.Random(f"worker loss {index}")
    return Schedule(chance.randrange(N_RANKS), chance.randrange(_FIRST_KILL, _LAST_KILL),
                    chance.uniform(0.0, _MOST_DELAY_S))


@dataclass(frozen=True)
class Around:
    """The steps of one rank around a loss, in seconds.

    `longest_s` is the longest step from the loss until the one after the first without the lost rank, `calm_s` the
    longest of as many steps before the loss, `median_s` the median step before it. `lost_s`: how much longer `N_AROUND`
    steps, which took `around_s`, took than as many median steps (those without the lost rank: of its kind).
    """

    longest_s: float
    calm_s: float
    median_s: float
    around_s: float
    lost_s: float

    @property
    def pause_s(self) -> float:
        """How much longer than the median the longest step was."""
        return self.longest_s - self.median_s


@dataclass(frozen=True)
class Trial:
    """The result of one trial: `around` and `reported_s` (`Loss.pause_s`) of each remaining rank; `trouble` if bad."""

    contestant: str
    index: int
    lost: str
    victim: int
    phase: str = ""
    around: list[Around] = field(default_factory=list)
    reported_s: list[float] = field(default_factory=list)
    trouble: str = ""


def run(kind: Kind, index: int, folder: Path) -> Trial:
    """Run trial *index* of *kind*; outputs are in *folder*. All its processes have ended when this returns."""
    folder.mkdir(parents=True, exist_ok=True)
    schedule, ranks = draw(index), SHAPES[kind.shape]
    progress = [Progress.create(folder / f"rank_{rank}.progress") for rank in range(N_RANKS)]
    lost = [f"rank {schedule.victim}"]
    if kind.lost != "rank":
        lost.insert(0, f"node {schedule.victim}")
    number = signal.SIGSTOP if kind.lost == "silent machine" else signal.SIGKILL
    with Processes(folder, ranks, 0, _values(kind), _PROGRAM) as processes:
        paths = [processes.path(rank) for rank in range(N_RANKS)]
        try:
            struck_s, phase = strike(progress[schedule.victim], [processes[name] for name in lost], schedule, number)
        except BpsError as exc:
            return Trial(kind.name, index, kind.lost, schedule.victim, trouble=str(exc))
        # the node of a rank that was alone there has nothing left to do, and may end with any code
        gone = {*lost, f"node {schedule.victim}"} if len(ranks) > 1 else {*lost}
        alive = {name: processes[name] for name in processes if name not in gone
                 and (number == signal.SIGKILL or name != "scheduler")}
        trouble = await_ends(alive)
    return judge(Trial(kind.name, index, kind.lost, schedule.victim, phase, trouble=trouble), paths, struck_s)


def strike(progress: Progress, victims: Sequence[subprocess.Popen[bytes]], schedule: Schedule, number: int
           ) -> tuple[float, str]:
    """Send signal *number* to *victims*, the last of which is the rank, at the moment of *schedule*.

    Returns when that was (CLOCK_MONOTONIC), and in which of `PHASES` the rank was. Raises `StallError` if the rank does
    not come so far.
    """
    deadline = time.monotonic() + _START_S
    while progress.step < schedule.step:
        if victims[-1].poll() is not None or time.monotonic() > deadline:
            raise StallError(f"rank {schedule.victim} has made {progress.step} steps, and "
                             + ("ended" if victims[-1].poll() is not None else f"hangs after {_START_S:g} s"))
        time.sleep(0.002)
    time.sleep(schedule.delay_s)
    at_s = time.monotonic()
    for victim in victims:
        victim.send_signal(number)
    if number == signal.SIGKILL:
        victims[-1].wait()
    return at_s, PHASES[progress.phase]


def await_ends(alive: Mapping[str, subprocess.Popen[bytes]]) -> str:
    """Wait until the processes *alive* have ended; return which hang, or end badly, in words."""
    deadline, odd = time.monotonic() + END_S, {}
    for name, process in alive.items():
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"{name} hangs: it has not ended within {END_S:g} s of the loss"
        if code:
            odd[name] = code
    return f"exit codes are {odd}" if odd else ""


def judge(trial: Trial, paths: Sequence[Path], struck_s: float, tells_losses: bool = True) -> Trial:
    """Return *trial* with what the remaining ranks tell in *paths* of a loss at *struck_s*, and what is wrong there.

    *tells_losses*: whether each must have learned of exactly this loss.
    """
    around, reported_s, troubles = [], [], [trial.trouble] if trial.trouble else []
    for rank, path in enumerate(paths):
        if rank == trial.victim:
            continue
        if not path.exists():
            troubles.append(f"rank {rank} ended without a word")
            continue
        history = History.read(path)
        troubles += [f"rank {rank}: {words}" for words in [history.error, *history.wrong[:3]] if words]
        if history.error:
            continue
        if tells_losses and [ranks for ranks, _ in history.losses] != [[trial.victim]]:
            troubles.append(f"rank {rank} knows of the losses {history.losses}, and only rank {trial.victim} was lost")
        try:
            around.append(measure(history.ends_s, history.n_members, struck_s))
        except ValueError as exc:
            troubles.append(f"rank {rank}: {exc}")
        reported_s += [pause_s for _, pause_s in history.losses]
    values: dict[str, Any] = vars(trial) | {"around": around, "reported_s": reported_s, "trouble": "; ".join(troubles)}
    return Trial(**values)


def measure(ends_s: Sequence[float], n_members: Sequence[int], struck_s: float) -> Around:
    """Return the times around a loss at *struck_s* of a rank whose steps ended at *ends_s*, with sums of *n_members*.

    Raises `ValueError` if too few steps are known.
    """
    first = bisect_right(ends_s, struck_s)  # the first step that ended after the loss
    without = next((i for i in range(first, len(ends_s)) if n_members[i] < N_RANKS), len(ends_s))
    if first <= N_WARMUP or first + N_AROUND > len(ends_s) or without + 3 > len(ends_s):
        raise ValueError(f"{len(ends_s)} steps, {first} of them before the loss, are too few")
    steps_s = [0.0, *(after - before for before, after in pairwise(ends_s))]
    window = steps_s[first : without + 2]
    before, after = steps_s[N_WARMUP:first], steps_s[without + 2 :]
    median_s, median_after_s = statistics.median(before), statistics.median(after)
    around_s = ends_s[first - 1 + N_AROUND] - ends_s[first - 1]
    n_before = min(without - first, N_AROUND)
    return Around(longest_s=max(window), calm_s=max(before[-len(window):]) - median_s, median_s=median_s,
                  around_s=around_s, lost_s=around_s - n_before * median_s - (N_AROUND - n_before) * median_after_s)


def _values(kind: Kind) -> dict[str, Any]:
    values: dict[str, Any] = {"on_worker_loss": "continue", "encryption": "off", "timeout_s": 60,
                              "start_timeout_s": 240, "transport": "tcp" if len(SHAPES[kind.shape]) > 1 else "auto"}
    return values | ({"lease_s": LEASE_S, "heartbeat_s": HEARTBEAT_S} if kind.lost == "silent machine" else {})


