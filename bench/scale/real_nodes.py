"""The real nodes of ``bench scale --real``: the CPU time of a start, what each node takes, and the time of a step.

Each node has one rank, and a network namespace of its own where those can be made. Rank 0 reads the processes of nodes
and scheduler in /proc: when all ranks have left `init`, and after the steps.
"""
from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

import bpsfast
from bpsfast.base import settings
from bpsfast.bench.harness import table
from bpsfast.launch import local_job
from bpsfast.launch.namespaces import netns
from bpsfast.orchestration.errors import PeerLostError

#: The promised limits without encryption: CPU seconds of each node, with its share of the scheduler's, until `init` has
#: returned everywhere (25 of 64 nodes); resident bytes of a node besides shared segments.
MOST_START_S, MOST_NBYTES = 25 / 64, 80 << 20
PROMISED = "not encrypted"
#: Name of a row -> the settings of its job, besides transport=tcp.
CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    PROMISED: {"encryption": "off", "checksum": "off", "insecure": True}, "default": {}}
_N_STEPS = 7
_STEP_ELEMENTS = 1_000_000
_START_TIMEOUT_S = 300.0


class _Use(NamedTuple):
    """What the processes of nodes and scheduler have used so far."""

    nodes_cpu_s: float
    scheduler_cpu_s: float
    most_threads: int
    median_nbytes: float
    most_nbytes: int


def measure(n_nodes: int) -> list[dict[str, Any]]:
    """Run a job of *n_nodes* under each of `CONDITIONS`; return the records. Raises `PeerLostError` if one fails."""
    records = []
    for name, values in CONDITIONS.items():
        loaded = settings.load({"transport": "tcp", "start_timeout_s": _START_TIMEOUT_S, **values}, {})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "record.json")
            code = local_job.run(local_job.shape_of(n_nodes, n_nodes, 0),
                                 [sys.executable, "-m", "bpsfast.bench.scale.real_nodes", str(path)], loaded,
                                 netns=netns.missing() is None)
            if code:
                raise PeerLostError(f"the job of {n_nodes} nodes ({name}) ended with exit code {code}; see its output")
            records.append({"phase": "real", "n_nodes": n_nodes, "condition": name, **json.loads(path.read_text())})
    return records


def report(records: list[dict[str, Any]]) -> str:
    """Return the table, and whether the largest job that was not encrypted kept the limits."""
    rows = [["nodes", "", "start CPU s", "scheduler's", "threads", "MB of a node", "at most", "step ms"]]
    rows += [[str(each["n_nodes"]), each["condition"], f"{each['start']['nodes_cpu_s']:.1f}",
              f"{each['start']['scheduler_cpu_s']:.1f}", str(each["end"]["most_threads"]),
              f"{each['start']['median_nbytes'] / 1e6:.0f}", f"{each['start']['most_nbytes'] / 1e6:.0f}",
              f"{statistics.median(each['samples_s']) * 1e3:.0f}"] for each in records]
    last = max((each for each in records if each["condition"] == PROMISED), key=lambda each: each["n_nodes"])
    start, n_nodes = last["start"], last["n_nodes"]
    cpu_s = start["nodes_cpu_s"] + start["scheduler_cpu_s"]
    kept = cpu_s <= MOST_START_S * n_nodes and start["most_nbytes"] <= MOST_NBYTES
    return "\n".join(["# real nodes of one rank each, on this machine (the CPU time of the ranks is not counted)",
                      table.plain(rows),
                      f"# the start of {n_nodes} nodes, {PROMISED}: {cpu_s:.1f} s of CPU time, at most "
                      f"{start['most_nbytes'] / 1e6:.0f} MB a node: {'within' if kept else 'NOT within'} "
                      f"{MOST_START_S * n_nodes:.1f} s and {MOST_NBYTES / 1e6:.0f} MB"])


def _use() -> _Use:
    """Return what the daemons of this rank's job have used; they are children of the launcher, as this rank is."""
    daemons = [each for each in psutil.Process(os.getppid()).children() if each.cmdline()[-2:-1] == ["bpsfast"]]
    cpu_s = {process: sum(process.cpu_times()[:2]) for process in daemons}
    nodes = [process for process in daemons if process.cmdline()[-1] == "node"]
    nbytes = [_resident_nbytes(process.pid) for process in nodes]
    return _Use(sum(cpu_s[process] for process in nodes),
                sum(spent for process, spent in cpu_s.items() if process not in nodes),
                max(process.num_threads() for process in nodes), statistics.median(nbytes), max(nbytes))


def _resident_nbytes(pid: int) -> int:
    """Return the proportional share of resident memory of a process, without memory that it shares as segments."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(found) for found in re.findall(r"^Pss_(?:Anon|File):\s+(\d+)", rollup, re.MULTILINE))


def _be_rank(path: Path) -> None:
    """Be one rank: check two sums, time some steps; rank 0 writes the record to *path*."""
    bpsfast.init()
    rank, size = bpsfast.rank(), bpsfast.size()
    bpsfast.barrier()
    start = _use() if rank == 0 else None
    for n in (1000, 300_000):
        total = bpsfast.push_pull(np.full(n, rank + 1, np.float32), average=False, name=f"of {n}")
        if not (total == size * (size + 1) / 2).all():
            raise ArithmeticError(f"the sum of {n} numbers of {size} ranks is wrong")
    numbers, samples_s = np.ones(_STEP_ELEMENTS, np.float32), []
    for _ in range(_N_STEPS):
        begin_s = time.perf_counter()
        bpsfast.push_pull(numbers, average=False, name="step")
        samples_s.append(time.perf_counter() - begin_s)
    bpsfast.barrier()
    if start is not None:
        path.write_text(json.dumps({"start": start._asdict(), "end": _use()._asdict(), "samples_s": samples_s}))
    bpsfast.barrier()
    bpsfast.shutdown()


if __name__ == "__main__":
    _be_rank(Path(sys.argv[1]))
