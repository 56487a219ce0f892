"""The threads of this process, as the kernel counts them."""
from __future__ import annotations

import os


def ids() -> set[int]:
    """Return their thread ids."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def until_forgotten(joined: set[int]) -> None:
    """Return when none of *joined* is counted any more: the kernel may take a moment to forget them."""
    while ids() & joined:
        os.sched_yield()
