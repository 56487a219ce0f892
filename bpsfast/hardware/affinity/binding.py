"""Threads of this process kept to CPUs, and let go again. Never to CPUs that it might not run on before."""
from __future__ import annotations

import errno
import os

from ...base.value_formats import format_cpus
from .device_threads import for_each_thread
from .refusal_warning import refused

#: CPUs of this process before it was first pinned, and not let go since: what it starts is not to inherit its seat.
_before: list[frozenset[int]] = []


class ThreadBinding:
    """All threads of this process on *cpus*, those to come included, until `undo`; none: nothing is done.

    A thread that is kept to less than the calling one, by whomever, is left there. Where the kernel refuses, threads
    stay where they are, and a warning says so. Not thread-safe.
    """

    def __init__(self, cpus: frozenset[int]) -> None:
        self._pid = os.getpid()
        before = frozenset(os.sched_getaffinity(0))
        self._before, self.cpus = before, cpus & before
        if not self.cpus or self.cpus == before:
            if cpus and not self.cpus:
                refused(f"sched_setaffinity(CPUs {format_cpus(cpus)})", errno.EINVAL,
                        f"This process stays on CPUs {format_cpus(before)}")
            self.cpus = frozenset()
            return
        try:
            _move(before, self.cpus)
        except OSError as exc:
            refused(f"sched_setaffinity(CPUs {format_cpus(cpus)})", exc.errno or 0, "Threads run anywhere")
            self.cpus = frozenset()
            return
        _before.append(before)

    def undo(self) -> None:
        """Let the threads run where they might before. Idempotent; does nothing in a fork."""
        if self.cpus and os.getpid() == self._pid:
            cpus, self.cpus = self.cpus, frozenset()
            _before.remove(self._before)
            try:
                _move(cpus, self._before)
            except OSError as exc:  # the cpuset has changed
                refused(f"sched_setaffinity(CPUs {format_cpus(self._before)})", exc.errno or 0,
                        "Threads stay where they are")


def unbound_cpus() -> frozenset[int]:
    """Return the CPUs that this process might run on before it was pinned; none if it is not."""
    return _before[0] if _before else frozenset()


def _move(begin: frozenset[int], end: frozenset[int]) -> None:
    """Keep to *end* the threads that are kept to *begin*."""
    for_each_thread(lambda thread: os.sched_setaffinity(thread, end) if os.sched_getaffinity(thread) == begin else None)
