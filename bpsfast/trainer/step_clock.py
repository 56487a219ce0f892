"""Steps of one rank and where their time went. A step ends when a name is pushed again.

`Rounds` begin steps and the port counts them, both natively; this reads the counts and samples the speed.
"""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from ..orchestration.placement.partition import round_after
from ..pyx.direct import Rounds
from ..pyx.port import Port

#: BytePS takes a sample of the speed every ten seconds and keeps this many.
_POINT_NS = 10_000_000_000
_N_POINTS = 1024
#: What BytePS's get_pushpull_speed returns without a sample.
_NO_POINT = (0, -5.0)


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step, or of the mean step.

    `step_s`: from the first push of a step to that of the next. `exposed_s`: time of this rank's threads in calls of
    bpsfast: copying, announcing, waiting (the sum of several threads, at most `step_s`). `compute_s`: the rest.
    `communication_s`: from the first push until the last result that was waited for was published on this machine.
    `overlap`: the share of `communication_s` that was not exposed, 0 to 1.
    """

    step_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    communication_s: float = 0.0
    overlap: float = 0.0


def _times(sums: tuple[int, int, int, int], n_steps: int) -> StepTimes:
    """Return the mean of *n_steps* steps from the sums that `Port.steps` returns."""
    if not n_steps:
        return StepTimes()
    step_s, exposed_s, communication_s, hidden_s = (ns / 1e9 / n_steps for ns in sums)
    return StepTimes(step_s=step_s, compute_s=step_s - exposed_s, exposed_s=exposed_s, communication_s=communication_s,
                     overlap=hidden_s / communication_s if communication_s else 0.0)


class StepClock:
    """Counts the steps of *port*'s rank. Any thread. The first step, which includes the set-up, is left out.

    *pushed_nbytes* returns how many bytes this rank has pushed so far.
    """

    def __init__(self, port: Port, pushed_nbytes: Callable[[], int]) -> None:
        self._port = port
        self._pushed_nbytes = pushed_nbytes
        self._lock = threading.RLock()  # a signal handler may push while a sample is taken
        self._point_ns, self._point_nbytes = time.monotonic_ns(), 0
        self._points: deque[tuple[int, float]] = deque(maxlen=_N_POINTS)
        port.sample_from(self._point_ns + _POINT_NS)

    def rounds(self, first_round: int) -> Rounds:
        """Return the rounds of a unit, from *first_round* on, which begin steps of this clock."""
        return Rounds(self._port, round_after(first_round, -1), self._sample)

    def _sample(self, now_ns: int) -> None:
        with self._lock:
            self._sample_speed(now_ns)

    def read(self) -> tuple[int, StepTimes, StepTimes]:
        """Return (steps counted, the mean step, the last step)."""
        with self._lock:
            n_steps, sums, last = self._port.steps()
        return n_steps, _times(sums, n_steps), _times(last, 1)

    def _sample_speed(self, now_ns: int) -> None:
        if now_ns - self._point_ns < _POINT_NS:
            return
        before_ns, self._point_ns = self._point_ns, now_ns  # first: a signal handler that pushes takes no second sample
        self._port.sample_from(now_ns + _POINT_NS)
        nbytes = self._pushed_nbytes()
        if nbytes > self._point_nbytes:
            rate = (nbytes - self._point_nbytes) / 1e6 / ((now_ns - before_ns) / 1e9)
            self._points.append((time.time_ns() // 1_000_000, rate))
        self._point_nbytes = nbytes

    def speed(self) -> tuple[int, float]:
        """Take the oldest sample of the speed: see `get_pushpull_speed`."""
        with self._lock:
            self._sample_speed(time.monotonic_ns())
            return self._points.popleft() if self._points else _NO_POINT
