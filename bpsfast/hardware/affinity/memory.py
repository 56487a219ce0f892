"""Segments on the NUMA nodes that are their homes: by mbind, else by who touches their pages first."""
from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ...base.value_formats import format_cpus
from ...pyx import pages
from ...pyx.pages import Segment
from .device_threads import on_cores
from .refusal_warning import refused


class NumaMemory:
    """Makes segments. *cpus*: of each NUMA node, those that this process may run on. Any thread.

    mbind's MPOL_PREFERRED gives pages of another node where the home is full. Where it is refused, the thread that
    makes a segment runs at the home meanwhile, so that the pages it faults in are there: only the policy is lost.
    """

    def __init__(self, cpus: Mapping[int, frozenset[int]]) -> None:
        self._cpus = cpus
        self._binds: dict[int, bool] = {}

    def segment(self, home: int | None, nbytes: int, **options: Any) -> Segment:
        """Return a new segment on node *home* (None: anywhere); *options* and errors are `Segment`'s."""
        if home is None:
            return Segment(nbytes, **options)
        if self._is_bound(home):
            return Segment(nbytes, node=home, **options)
        cpus = self._cpus.get(home, frozenset())
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(on_cores(cpus))
            except OSError as exc:
                refused(f"sched_setaffinity(CPUs {format_cpus(cpus)})", exc.errno or 0, "Memory is anywhere")
                self._cpus = {}
            return Segment(nbytes, **options)

    def _is_bound(self, home: int) -> bool:
        if home not in self._binds:
            code = pages.bind_errno(home)
            self._binds[home] = not code
            if code:
                refused(f"mbind(MPOL_PREFERRED, node {home})", code, "Memory is placed by who touches it first")
        return self._binds[home]
