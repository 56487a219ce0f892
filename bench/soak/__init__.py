"""``bpsfast bench soak``: trains for long, and checks that no process's memory, descriptors or threads grow.

After the warm-up, the number of descriptors and threads of a process must not grow, and memory by no more than the
allocator's noise. No process may be declared lost (it would exit with a code of its own), even while other programs
keep all cores busy (load).
"""
from __future__ import annotations

import json
import statistics
import tempfile
import time
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
    """Run the job for *options* (minutes, transport, load, json_path); return whether it passed.

    It passes if sums are right, no process was lost, and nothing grew.
    """
    given, seconds = BenchRun("soak", options), 60.0 * options["minutes"]
    with tempfile.TemporaryDirectory(prefix=folder_prefix("soak")) as folder:
        values = {**_VALUES, "transport": options["transport"]}
        with CpuLoad(options.get("load", 0)), \
                Processes(Path(folder), (2, 1), 1, values, "bpsfast.bench.soak.rank", seconds) as processes:
            usages = _watch(processes, seconds)
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


def _watch(processes: Processes, seconds: float) -> list[Usage]:
    """Return the usages of all processes, measured up to 300 times while the ranks train."""
    known = {name: psutil.Process(processes[name].pid) for name in processes}
    begin, usages = time.monotonic(), []
    pause_s = max(0.2, seconds / 300)
    while time.monotonic() - begin + pause_s < seconds:
        time.sleep(pause_s)
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
