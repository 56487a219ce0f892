"""For `bench worker_loss`: the gradients of a step, their expected sums, and what a rank tells of its steps."""
from __future__ import annotations

import json
import mmap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

N_RANKS = 4
#: Bytes of the gradients, 1.5 MB in all.
SIZES = (4096, 65_536, 262_144, 1_048_576, 131_072, 4096, 1024)
#: A step computes for this time. It sleeps, so that two cores do not compute for four ranks.
COMPUTE_S = 0.01
#: Steps that the remaining ranks make after the first one without the lost rank.
N_AFTER = 40
#: The steps of torchft's replicas: as many after the latest loss of a schedule.
N_STEPS = 100
#: A training in which no rank is lost ends after this number of steps.
MOST_STEPS = 5000
#: What a rank does within a step, in this order.
COMPUTES, PUSHES, WAITS, COMMITS = range(4)
PHASES = ("computes", "pushes", "waits", "commits")
#: Inputs repeat with this period over elements, and over steps; all sums are exact in float32.
_PERIOD, _STEPS_PERIOD = 251, 1000


class Inputs:
    """The gradients of one *rank*. Those of all ranks and steps differ, and each set of ranks has other sums."""

    def __init__(self, rank: int) -> None:
        self._scale = np.float32(1 << rank)
        self._ramps = [np.resize(np.arange(_PERIOD, dtype=np.float32), nbytes // 4) for nbytes in SIZES]
        self._scratch = [np.empty_like(ramp) for ramp in self._ramps]
        self.arrays = [np.empty_like(ramp) for ramp in self._ramps]

    def fill(self, step: int) -> None:
        """Write the gradients of *step* into `arrays`."""
        for ramp, array in zip(self._ramps, self.arrays):
            np.multiply(ramp, self._scale, out=array)
            array += np.float32(step % _STEPS_PERIOD)

    def is_sum(self, found: Array, gradient: int, step: int, ranks: Collection[int]) -> bool:
        """Whether *found* is the sum of what *ranks* push for a gradient in *step*."""
        expected = np.multiply(self._ramps[gradient], np.float32(sum(1 << rank for rank in ranks)),
                               out=self._scratch[gradient])
        expected += np.float32(len(ranks) * (step % _STEPS_PERIOD))
        return np.array_equal(found, expected)


class Progress:
    """The step and the phase of a rank, in a file that other processes can read, also after its death."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 16)).cast("q")

    @classmethod
    def create(cls, path: Path) -> Progress:
        """Make the file, of a rank that has made no step yet."""
        path.write_bytes(bytes(16))
        return cls(path)

    @property
    def step(self) -> int:
        """The number of steps that are over."""
        return self._words[0]

    @property
    def phase(self) -> int:
        """An index of `PHASES`."""
        return self._words[1]

    @phase.setter
    def phase(self, value: int) -> None:
        self._words[1] = value

    def end_step(self) -> None:
        """Count a step; the rank computes again."""
        self._words[1] = COMPUTES
        self._words[0] += 1


class History:
    """What one rank tells of its training; it is written to a file at its end.

    `ends_s`: the end of each step (CLOCK_MONOTONIC). `n_members`: of how many ranks the gradients of each step are, the
    fewest of any gradient. `wrong`: sums that are not those of the ranks that are named. `losses`: for each loss the
    ranks and how long nothing was summed. `error`: what ended the training, "" if nothing did.
    """

    def __init__(self, ends_s: Sequence[float] = (), n_members: Sequence[int] = (), wrong: Sequence[str] = (),
                 losses: Sequence[tuple[list[int], float]] = (), error: str = "") -> None:
        self.ends_s, self.n_members, self.wrong = list(ends_s), list(n_members), list(wrong)
        self.losses, self.error = list(losses), error

    def write(self, path: Path) -> None:
        """Write everything to *path*, at once."""
        new = path.with_suffix(".new")
        new.write_text(json.dumps(vars(self)))
        new.replace(path)

    @classmethod
    def read(cls, path: Path) -> History:
        """Return the history in *path*."""
        return cls(**json.loads(path.read_text()))
