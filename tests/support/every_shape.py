"""Jobs of 1 to 4 ranks on 1 and 2 nodes, each started once for all checks (the fixture `everywhere` of conftest).

    def mean():                                # runs on every rank, and asserts there
        ...

    def test_mean(everywhere):
        everywhere.run(mean)

Checks must use names of their own for what they push.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Ranks of each node.
SHAPES = ((1,), (2,), (3,), (4,), (1, 1), (2, 1), (2, 2))


class SturdyJob:
    """A job that is started when it is needed, and anew after a check has failed: the next ones shall not fail with it.

    *start* starts it, as ``conftest.Job``.
    """

    def __init__(self, start: Callable[[], Any], ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.size = sum(ranks)
        self._start = start
        self._job: Any = None

    @property
    def job(self) -> Any:
        """The job that runs."""
        if self._job is None:
            self._job = self._start()
        return self._job

    def run(self, check: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run *check* on every rank and return the results by rank."""
        try:
            return self.job.run(check, *arguments, timeout_s=timeout_s)
        except BaseException:
            if self._job is not None:
                self._job.kill()
                self._job = None
            raise

    def close(self) -> None:
        """End the job in order."""
        if self._job is not None:
            self._job.close()


def numerical_gradient(loss: Callable[[Any], float], x: Any, rank: int, size: int,
                       total: Callable[[float], float], h: float = 1e-5) -> Any:
    """Return the derivative of the sum of all ranks' losses by each element of this rank's *x*: central differences.

    Called on all ranks together. ``loss(x)`` may be collective; ``total(number)`` returns its sum over all ranks. *x*
    is a flat float64 tensor; it is left as it was.
    """
    found = x.clone()
    for mover in range(size):
        for i in range(len(x)):
            kept = x[i].item()
            sums = []
            for step in (h, -h):
                if rank == mover:
                    x[i] = kept + step
                sums.append(total(loss(x)))
            x[i] = kept
            if rank == mover:
                found[i] = (sums[0] - sums[1]) / (2 * h)
    return found
