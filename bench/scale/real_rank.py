"""A rank of the real jobs of `bench scale`: ``python -m bpsfast.bench.scale.real_rank FILE``."""
from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

import bpsfast

_N_STEPS = 7
_STEP_ELEMENTS = 1_000_000


class _Use(NamedTuple):
    """What the processes of nodes and scheduler have used so far."""

    nodes_cpu_s: float
    scheduler_cpu_s: float
    most_threads: int
    median_nbytes: float
    most_nbytes: int


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


def main(path: Path) -> None:
    """Be the rank: check two sums, time some steps; rank 0 writes the record to *path*."""
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
    main(Path(sys.argv[1]))
