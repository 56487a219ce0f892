"""Jobs of 1 to 4 ranks on 1 and 2 nodes, each started once for all checks (the fixture `everywhere` of conftest).

    def mean():                                # runs on every rank, and asserts there
        ...

    def test_mean(everywhere):
        everywhere.run(mean)

Checks must use different names of tensors.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Ranks of each node.
SHAPES = ((1,), (2,), (3,), (4,), (1, 1), (2, 1), (2, 2))


class SturdyJob:
    """A job that starts when it is needed, and again after a failed check, so that later checks do not fail, too.

    *start* starts it, like ``conftest.Job``.
    """

    def __init__(self, start: Callable[[], Any], ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.size = sum(ranks)
        self._start = start
        self._job: Any = None

    @property
    def job(self) -> Any:
        """Return the running job."""
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
    """Return the derivative of the sum of all ranks' losses by each element of this rank's *x*, by central differences.

    All ranks call it together. ``loss(x)`` may be collective; ``total(number)`` returns the sum over all ranks. *x* is
    a flat float64 tensor, unchanged at the end.
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
