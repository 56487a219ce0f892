"""The threads of this process, from the kernel."""
from __future__ import annotations

import os


def ids() -> set[int]:
    """Return their thread ids."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def until_forgotten(joined: set[int]) -> None:
    """Wait until the kernel no longer lists any of *joined*."""
    while ids() & joined:
        os.sched_yield()
