"""``bpsfast bench neighbour``: how much a helper (a node without ranks) on spare cores slows the machine's own job.

That job has one process for each core, which computes, streams through memory and waits (`victim`). At the same time
runs a job of ours whose helper owns all keys. Windows with steps through the helper alternate with idle windows; the
result is the victim's step time. There are two contestants: `quota`, a helper limited to a core, a rate and a niceness,
and `free`, a helper without limits. The two pushing nodes and their ranks run on this machine, too (with the same
niceness for `quota`), so the measured slowdown is larger than the helper's alone. A pair of windows is discarded if
other programs took CPU time.
"""
from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import psutil

from bpsfast.bench.harness import table
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.contestant_group import Group, cpu_s_of
from bpsfast.bench.harness.launcher import SLOW_CONTROL_PLANE, ContestantLauncher
from bpsfast.bench.harness.option_lists import parse_numbers
from bpsfast.launch.daemons import tie_to_parent
from bpsfast.launch.namespaces import CpuMeter
from bpsfast.orchestration.errors import PeerLostError, StallError

#: Promised limits of the slowdown with a quota.
MOST_CHANGE = 0.05
CONTESTANTS = ("quota", "free")
_STEP_S = 0.1  # of the job with the quota
_START_S = 60.0
_SETTINGS = {**SLOW_CONTROL_PLANE, "lease_s": 60.0, "start_timeout_s": 120.0, "log_level": "ERROR"}
#: Part of a window that is requested at once, because a request takes time.
_BATCH_SHARE = 0.2
#: A window is discarded if other programs took more than this share of all CPUs.
_MOST_OTHERS = 0.03

Step = tuple[float, float]


@dataclass
class Window:
    """An interval, in seconds of the monotonic clock, in which the helper was idle or served our steps.

    `others`: share of all CPUs that programs outside this bench and the hypervisor took.
    """

    begin_s: float
    end_s: float
    n_steps: int
    cpu_busy: float
    samples_s: list[float] = field(default_factory=list)
    others: float = 0.0

    def take(self, steps: Sequence[Step]) -> None:
        """Keep the durations of the *steps* that lie in the window."""
        self.samples_s += [took_s for begin_s, took_s in steps
                           if begin_s >= self.begin_s and begin_s + took_s <= self.end_s]


@dataclass
class Measured:
    """One contestant with a victim of *load*: alternating windows, an idle one first."""

    name: str
    load: float
    nbytes: int
    idle: list[Window] = field(default_factory=list)
    serving: list[Window] = field(default_factory=list)
    n_void: int = 0

    def add(self, idle: Window, serving: Window) -> None:
        """Keep a pair of windows unless other programs disturbed it."""
        if max(idle.others, serving.others) > _MOST_OTHERS:
            self.n_void += 1
        else:
            self.idle.append(idle)
            self.serving.append(serving)

    def change(self, percent: float) -> float:
        """Return by how much longer the victim's steps are while the helper serves, at percentile *percent*."""
        return _percentile(self.serving, percent) / _percentile(self.idle, percent) - 1.0

    @property
    def served_gbps(self) -> float:
        """Gbit/s of gradients that the helper received, and sent, for both pushing nodes."""
        took_s = sum(window.end_s - window.begin_s for window in self.serving)
        return 2 * self.nbytes * sum(window.n_steps for window in self.serving) * 8 / took_s / 1e9


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print a table, and return (and write) the records.

    *options*, each of which may be missing or None: cores, nic_rate (Gbit/s) of the helper; loads ("0.5,1"); n_windows
    of each kind, window_s; at_most_s for one load; json_path, quick. Raises `ConfigError` if one makes no sense,
    `StallError` if other programs do not leave the machine alone for long enough.
    """
    given = BenchRun("neighbour", options)
    cores, gbps = given.get("cores") or 1, given.get("nic_rate") or 0.2
    loads = parse_numbers("--loads", given.get("loads") or "0.5,1", 1.0, "shares above 0 and up to 1, such as 0.5,1")
    n_windows, window_s = given.get("n_windows") or (2 if given.quick else 20), given.get("window_s") or 1.0
    at_most_s = given.get("at_most_s") or 600.0
    found = [each for load in loads for each in _beside(load, cores, gbps, n_windows, window_s, at_most_s)]
    print(report(found), flush=True)
    return given.finish([_record(each, cores, gbps) for each in found])


def report(found: Sequence[Measured]) -> str:
    """Return the table, and whether the quota kept its limits."""
    rows = [["load", "helper", "serves Gbit/s", "idle ms", "serving ms", "median", "p95", "CPU busy",
             "windows", "void"]]
    for each in found:
        rows.append([f"{each.load:.0%}", each.name, f"{each.served_gbps:.3f}",
                     *(f"{_percentile(windows, 50) * 1e3:.2f}" for windows in (each.idle, each.serving)),
                     f"{each.change(50):+.1%}", f"{each.change(95):+.1%}",
                     f"{statistics.mean(window.cpu_busy for window in each.serving):.0%}",
                     str(2 * len(each.idle)), str(2 * each.n_void)])
    bound = [each for each in found if each.name == "quota"]
    kept = all(each.change(50) <= MOST_CHANGE for each in bound)
    words = "at most" if kept else "NOT within"
    return "\n".join(["# steps of another job on this machine, by its load on every core", table.plain(rows),
                      f"# a quota-bound helper changes its median step by {words} {MOST_CHANGE:.0%}"])


def _beside(load: float, cores: int, gbps: float, n_windows: int, window_s: float,
            at_most_s: float) -> list[Measured]:
    """Measure all contestants with one victim of *load*."""
    nbytes = max(1 << 16, int(gbps * 1e9 / 8 * _STEP_S / 2)) // 4096 * 4096
    nice = {"BPSFAST_NICE": "1"}
    quota = {"node0": nice, "node1": nice, "helper0": nice | {
        "BPSFAST_CORES": str(cores), "BPSFAST_NIC_LIMIT": str(gbps), "BPSFAST_SUM_RATE": str(gbps)}}
    with ContestantLauncher(2, 2) as launcher, ExitStack() as stack:
        groups = {name: launcher.bpsfast(n_helpers=1, more=more, placement="ps", transport="tcp", awake_us=0,
                                     partition_bytes=256 << 10, **_SETTINGS)
                  for name, more in zip(CONTESTANTS, (quota, {}))}
        for group in groups.values():
            group.measure("numpy", nbytes, 0, 1)  # checks its sums once
        groups["quota"].ask("yield_to_all")
        victims = [stack.enter_context(_Victim(load)) for _ in os.sched_getaffinity(0)]
        for victim in victims:
            victim.await_ready()
        found = [Measured(name, load, nbytes) for name in groups]

        own = {os.getpid(), *(pid for group in groups.values() for pid in group.pids()),
               *(victim.pid for victim in victims)}
        deadline = time.monotonic() + at_most_s
        while any(len(each.idle) < n_windows for each in found):
            for each in found:
                idle = _window(None, nbytes, window_s, own)
                each.add(idle, _window(groups[each.name], nbytes, window_s, own))
            if time.monotonic() > deadline:
                if not all(each.idle for each in found):
                    raise StallError(f"within {at_most_s:g} s other programs left no pair of windows of {window_s:g} s "
                                     "alone: measure on a machine that does nothing else")
                break
        steps = [step for victim in victims for step in victim.steps()]
    for each in found:
        for window in each.idle + each.serving:
            window.take(steps)
    return found


def _window(group: Group | None, nbytes: int, window_s: float, own: Set[int]) -> Window:
    """Let *group*, if any, make steps for *window_s*. *own* are the processes of this bench."""
    n_steps, batch = 0, 1
    before, stolen = _others_s(own), _stolen_s()
    with CpuMeter() as meter:
        begin_s = time.monotonic()
        while (left_s := begin_s + window_s - time.monotonic()) > 0:
            if group is None:
                time.sleep(left_s)
            else:
                turn = group.measure("numpy", nbytes, 0, batch)
                n_steps += batch
                batch = max(1, int(_BATCH_SHARE * window_s / max(turn.samples_s)))
        end_s = time.monotonic()
    others_s = sum(now_s - before.get(pid, 0.0) for pid, now_s in _others_s(own).items()) + _stolen_s() - stolen
    return Window(begin_s, end_s, n_steps, meter.busy, others=others_s / (end_s - begin_s) / (os.cpu_count() or 1))


def _others_s(own: Set[int]) -> dict[int, float]:
    """Return the CPU seconds of every process that is not in *own*."""
    return {pid: cpu_s_of(pid) for pid in psutil.pids() if pid not in own}


def _stolen_s() -> float:
    """Return the seconds that the hypervisor has taken from all CPUs."""
    return float(psutil.cpu_times().steal)


class _Victim:
    """The process of `victim`, a context manager; `steps` ends the process."""

    def __init__(self, load: float) -> None:
        argv = tie_to_parent([sys.executable, "-m", "bpsfast.bench.neighbour.victim", str(load)])
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(argv, env=os.environ | threads, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True)
        self.pid = self._process.pid

    def __enter__(self) -> _Victim:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()

    def await_ready(self) -> None:
        """Wait until its steps have their normal pace."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise PeerLostError(f"the other job (pid {self._process.pid}) ended before its first steps; see its output")

    def steps(self) -> list[Step]:
        """End the process; return its steps."""
        out, _ = self._process.communicate(timeout=_START_S)
        return [(begin_s, took_s) for begin_s, took_s in json.loads(out)]


def _percentile(windows: Sequence[Window], percent: float) -> float:
    samples = sorted(sample for window in windows for sample in window.samples_s)
    if not samples:
        raise PeerLostError("the other job made no step in a whole kind of windows: let them be longer (--window-s)")
    return samples[min(len(samples) - 1, int(len(samples) * percent / 100))]


def _record(each: Measured, cores: int, gbps: float) -> dict[str, Any]:
    kinds = {"idle": each.idle, "serving": each.serving}
    return {
        "section": "neighbour",
        "chosen": {"contestant": each.name, "load": each.load, "cores": cores, "nic_rate_gbps": gbps,
                   "nbytes": each.nbytes, "n_windows": len(each.idle), "n_void": each.n_void},
        "measured": {"change_median": each.change(50), "change_p95": each.change(95), "served_gbps": each.served_gbps,
                     **{f"{kind}_median_s": _percentile(windows, 50) for kind, windows in kinds.items()},
                     **{f"{kind}_windows": [{"samples_s": window.samples_s, "n_steps": window.n_steps,
                                             "seconds": window.end_s - window.begin_s, "cpu_busy": window.cpu_busy,
                                             "others": window.others}
                                            for window in windows] for kind, windows in kinds.items()}},
    }
