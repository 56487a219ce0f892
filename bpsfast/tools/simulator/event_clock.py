"""Simulated time: events in order of their time, those of one moment in the order they were planned.

A heap of our own. SimPy, the well-kept library for this, is the oracle of the tests instead: in
``tests/support/simulated_by_simpy.py`` the same exchange is written as SimPy's processes, with the same times. Without credits,
priorities and computing, which it leaves out, 8 machines and 4 helpers take it 2.6 times as long as here with them
(0.43 s against 0.16 s). What it would save is this file.
"""
from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """The time `now` in seconds, and what happens when. Owner thread only.

    Two runs that plan the same events see them in the same order: nothing depends on hashes, threads or real time.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.n_events = 0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, time_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call *action* with *arguments* at *time_s*, which must not be past."""
        if not time_s >= self.now:
            raise ValueError(f"an event at {time_s} s was planned at {self.now} s: time does not run backwards")
        self._number += 1
        heapq.heappush(self._planned, (time_s, self._number, action, arguments))

    def run(self) -> None:
        """Let time pass until nothing is planned."""
        planned, pop = self._planned, heapq.heappop
        while planned:
            self.now, _, action, arguments = pop(planned)
            self.n_events += 1
            action(*arguments)
