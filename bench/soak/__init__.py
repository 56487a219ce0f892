"""``bpsfast bench soak``: trains for long, and checks that no process's memory, descriptors or threads grow.

After the warm-up, the number of descriptors and threads of a process must not grow, and memory by no more than the
allocator's noise. No process may be declared lost (it would exit with a code of its own), even while other programs
keep all cores busy (load).

With ``--losses N`` it is an elastic job of three workers that goes on without lost ones; N times one of them, but never
worker 0, is killed and replaced. Then worker 0 and the launcher must not grow, which belong to all of the jobs.
"""
from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bpsfast.base.process_identity import folder_prefix
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.table import plain

from ..chaos.processes import Processes
from ..harness.cpu_load import CpuLoad

#: Fraction of the time in which caches fill and memory is touched for the first time.
_WARM_UP = 0.2
#: Two measurements of an unchanged process may differ by this much.
_NOISE_NBYTES = 2 << 20
_LOOK_S = 0.05
#: All processes end within this after the last step.
_END_S = 60.0
_VALUES = {"timeout_s": 60, "start_timeout_s": 240}


@dataclass(frozen=True)
class Usage:
    """Resources of a process at one time: private resident bytes, open descriptors, threads."""

    process: str
    at_s: float
    private_nbytes: int
    n_fds: int
    n_threads: int


def run(options: dict[str, Any]) -> bool:
    """Run the job for *options* (minutes, transport, load, losses, json_path); return whether it passed.

    It passes if sums are right, no process was lost (but for losses), and nothing grew.
    """
    given, seconds = BenchRun("soak", options), 60.0 * options["minutes"]
    if options.get("losses"):
        return _run_with_losses(given, options, seconds)
    with tempfile.TemporaryDirectory(prefix=folder_prefix("soak")) as folder:
        values = {**_VALUES, "transport": options["transport"]}
        with CpuLoad(options.get("load", 0)), \
                Processes(Path(folder), (2, 1), 1, values, "bpsfast.bench.soak.rank", seconds) as processes:
            usages = _watch({name: processes[name].pid for name in processes}, seconds)
            codes = processes.wait(time.monotonic() + _END_S)
            ends = [json.loads(processes.path(rank).read_text().splitlines()[-1]) for rank in range(3)]
    print(_shown(usages))
    troubles = [f"{name} ended with {code}" for name, code in codes.items() if code != 0]
    troubles += [f"rank {rank}: {end}" for rank, end in enumerate(ends) if end.get("wrong") != 0]
    troubles += growth(usages)
    for trouble in troubles:
        print(trouble)
    print(f"{ends[0].get('steps', 0)} steps of {options['minutes']:g} minutes")
    given.finish([{"steps": ends[0].get("steps", 0), "troubles": troubles}, *map(asdict, usages)])
    return not troubles


def _run_with_losses(given: BenchRun, options: dict[str, Any], seconds: float) -> bool:
    n_losses, chance = options["losses"], random.Random("soak")
    with tempfile.TemporaryDirectory(prefix=folder_prefix("soak")) as name, CpuLoad(options.get("load", 0)):
        folder = Path(name)
        command = [sys.executable, "-m", "bpsfast", "run", "-n", "3", "--elastic", "--lost-worker", "wait",
                   "--max-replaced", str(n_losses), "--set", "on_worker_loss=continue",
                   "--set", f"transport={options['transport']}", "--set", "timeout_s=60", "--",
                   sys.executable, "-m", "bpsfast.bench.soak.worker", name, str(time.monotonic() + seconds)]
        with (folder / "output").open("wb") as output:
            launcher = subprocess.Popen(command, stdout=output, stderr=output)
        killed: set[int] = set()

        def lose(at_s: float) -> None:
            """Kill a worker that was not killed before, once it is time for one more."""
            if at_s < (len(killed) + 1) * seconds / (n_losses + 1):
                return
            alive = sorted({int(path.name[4:]) for path in folder.glob("pid_*")} - killed - {0})
            if alive:
                killed.add(victim := chance.choice(alive))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int((folder / f"pid_{victim}").read_text()), signal.SIGKILL)

        try:
            while not (folder / "pid_0").exists() and launcher.poll() is None:
                time.sleep(_LOOK_S)
            pids = {"launcher": launcher.pid, "worker 0": int((folder / "pid_0").read_text())}
            usages = _watch(pids, seconds, lose)
            code = launcher.wait(_END_S)
        finally:
            launcher.kill()
            launcher.wait()
        ends = {int(path.name[4:]): json.loads(path.read_text()) for path in folder.glob("end_*")}
        words = (folder / "output").read_text(errors="replace")
    print(_shown(usages))
    end = ends.get(0, {"steps": 0, "jobs": 0})
    troubles = [f"worker {number}: {end['wrong']} wrong sums" for number, end in sorted(ends.items()) if end["wrong"]]
    troubles += [] if 0 in ends and code == 0 else [f"the launcher ended with {code}: {words[-2000:]}"]
    troubles += [] if len(killed) == n_losses else [f"{len(killed)} of {n_losses} workers were killed"]
    troubles += growth(usages)
    for trouble in troubles:
        print(trouble)
    print(f"{end['steps']} steps of {options['minutes']:g} minutes, {len(killed)} losses, {end['jobs']} jobs")
    given.finish([{**end, "losses": len(killed), "troubles": troubles}, *map(asdict, usages)])
    return not troubles


def _watch(pids: Mapping[str, int], seconds: float, at_each: Callable[[float], None] = lambda at_s: None
           ) -> list[Usage]:
    """Return the usages of the processes *pids*, measured up to 300 times while the ranks train.

    *at_each* is called each time, with the seconds since the beginning.
    """
    known = {name: psutil.Process(pid) for name, pid in pids.items()}
    begin, usages = time.monotonic(), []
    pause_s = max(0.2, seconds / 300)
    while time.monotonic() - begin + pause_s < seconds:
        time.sleep(pause_s)
        at_each(time.monotonic() - begin)
        for name, process in known.items():
            try:
                memory, at_s = process.memory_full_info(), time.monotonic() - begin
                usages.append(Usage(name, at_s, memory.uss, process.num_fds(), process.num_threads()))
            except psutil.NoSuchProcess:
                return usages
    return usages


def growth(usages: list[Usage]) -> list[str]:
    """Return a line for each value whose median grew from the first quarter after the warm-up to the last."""
    if not usages:
        return ["nothing was seen: the job ended at once"]
    end_s = max(usage.at_s for usage in usages)
    found = []
    for process in dict.fromkeys(usage.process for usage in usages):
        mine = [usage for usage in usages if usage.process == process and usage.at_s >= _WARM_UP * end_s]
        quarter = max(1, len(mine) // 4)
        for what, noise in (("private_nbytes", _NOISE_NBYTES), ("n_fds", 0), ("n_threads", 0)):
            first, last = (statistics.median(getattr(usage, what) for usage in part)
                           for part in (mine[:quarter], mine[-quarter:]))
            if last > first + noise:
                found.append(f"{process}: {what} has grown from {first:g} to {last:g}")
    return found


def _shown(usages: list[Usage]) -> str:
    """Return a table of each process's resources after the warm-up and at the end."""
    lines = [["process", "private MB", "descriptors", "threads"]]
    for process in dict.fromkeys(usage.process for usage in usages):
        mine = [usage for usage in usages if usage.process == process]
        first, last = mine[len(mine) // 5], mine[-1]
        lines.append([process, f"{first.private_nbytes / 1e6:.1f} -> {last.private_nbytes / 1e6:.1f}",
                      f"{first.n_fds} -> {last.n_fds}", f"{first.n_threads} -> {last.n_threads}"])
    return plain(lines)
