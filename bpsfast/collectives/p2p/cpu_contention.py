"""Whether others want this process's cores: a yield costs a time slice of theirs then. The rule of ``pyx/crowd.h``."""
from __future__ import annotations

#: A yield that took longer was slow.
SLOW_YIELD_S = 0.001
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.002, 0.128
#: So many waits that are met awake save as much as a slow yield costs.
_MANY_MET = 64


class CpuContention:
    """Tells when to sleep at once. One slow yield is no proof: a virtual machine may just not have run for a while.

    So where many waits were met awake since the one before, the pause is short; in a series each is twice as long as
    the last. Any thread: two at once may make a pause shorter or longer, no more.
    """

    def __init__(self) -> None:
        self._until = self._pause_s = 0.0
        self._n_met = 0

    def is_there(self, now: float) -> bool:
        """Tell whether to sleep at once at *now* (`time.monotonic`)."""
        return now < self._until

    def slow(self, now: float) -> None:
        """Note that a yield that ended at *now* was slow."""
        alone = self._n_met >= _MANY_MET or self._pause_s == 0.0
        self._pause_s = _LEAST_PAUSE_S if alone else min(2 * self._pause_s, _MOST_PAUSE_S)
        self._n_met = 0
        self._until = now + self._pause_s

    def met(self) -> None:
        """Note that a wait was met awake."""
        self._n_met += 1
