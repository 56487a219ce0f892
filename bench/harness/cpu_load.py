"""Processes that take CPU time from a job, to measure how it behaves on a busy machine."""
from __future__ import annotations

import os
import subprocess
import sys

from bpsfast.launch.daemons import tie_to_parent


class CpuLoad:
    """A context manager that runs *per_core* busy processes for each core that this process may use, and *n_more*.

    They also end if this process dies.
    """

    def __init__(self, per_core: int, n_more: int = 0) -> None:
        spin = tie_to_parent([sys.executable, "-S", "-E", "-c", "while True: pass"])
        self._popen: list[subprocess.Popen[bytes]] = []
        for _ in range(per_core * len(os.sched_getaffinity(0)) + n_more):
            self._popen.append(subprocess.Popen(spin, stdin=subprocess.DEVNULL))

    @property
    def pids(self) -> list[int]:
        """Return the ids of the busy processes."""
        return [process.pid for process in self._popen]

    def __enter__(self) -> CpuLoad:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._popen:
            process.kill()
        for process in self._popen:
            process.wait()
