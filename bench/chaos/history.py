"""For `bench chaos`: the expected gradient sums of a trial, and the check of the histories that its ranks write.

A step is right if every sum in it has each rank's input exactly once: its digest is then that of the expected sum, on
every rank.
"""
from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

#: A job that has not ended after this time hangs.
HANG_S = 120.0
#: The file in a trial's folder that ends the training.
STOP = "stop"
#: Bytes of each gradient: some have one partition and some many, so that every owner has some.
SIZES = (1000, 40_000, 400_000, 68, 100_000, 50_000)
PARTITION_NBYTES = 16_384
#: The last gradient is pushed in every fourth step only, as long as there are faults, and has a new name each time, so
#: that faults also happen while a job declares tensors.
_NEW_EVERY, _NEW_UNTIL = 4, 40


def names(step: int) -> list[str]:
    """Return the names of the gradients of *step*."""
    old = [f"g{i}" for i in range(len(SIZES) - 1)]
    return [*old, f"new {step}"] if step % _NEW_EVERY == 0 and step < _NEW_UNTIL else old


@functools.cache
def _base(rank: int, gradient: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng((rank, gradient)).standard_normal(SIZES[gradient] // 4, dtype=np.float32)


def pushed(rank: int, step: int, gradient: int) -> npt.NDArray[np.float32]:
    """Return the input of *rank*; all ranks and steps have different ones, so a sum shows whose inputs it has."""
    return _base(rank, gradient) * np.float32(1 + step / 7)


def digest(array: npt.NDArray[np.float32]) -> str:
    """Return a short digest of the bits of *array*."""
    return hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()


def _of(machines: tuple[tuple[int, ...], ...], ranks: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """Return *machines* with only these *ranks*."""
    left = (tuple(rank for rank in each if rank in ranks) for each in machines)
    return tuple(each for each in left if each)


def summed(machines: tuple[tuple[int, ...], ...], step: int, gradient: int) -> npt.NDArray[np.float32]:
    """Return the sum with each rank's input once: of each machine's ranks first, then of the machines."""
    partials = [functools.reduce(np.add, (pushed(rank, step, gradient) for rank in ranks)) for ranks in machines]
    return functools.reduce(np.add, partials)


def expected(machines: tuple[tuple[int, ...], ...], step: int, gradient: int) -> str:
    """Return the digest of `summed`."""
    return digest(summed(machines, step, gradient))


@dataclass
class RankHistory:
    """The history of one rank: digests by step, and how it ended ("" if unknown: it was killed, or hangs).

    `recoveries`: how often its node has gone on without a lost process by then.
    """

    steps: dict[int, list[str]] = field(default_factory=dict)
    ranks: dict[int, list[list[int]]] = field(default_factory=dict)  # whose inputs are in each of these sums
    end: str = ""
    text: str = ""
    at_s: float = 0.0
    recoveries: int = 0


def read(path: Path) -> RankHistory:
    """Return the history in *path*, as far as it was written; a last line that was cut off is left out."""
    found = RankHistory()
    lines = path.read_text().split("\n") if path.exists() else []
    for line in lines[:-1]:
        fields: dict[str, Any] = json.loads(line)
        if "step" in fields:
            found.steps[fields["step"]], found.ranks[fields["step"]] = fields["sums"], fields["ranks"]
        else:
            found.end, found.text, found.at_s = fields["end"], fields.get("text", ""), fields.get("at_s", 0.0)
            found.recoveries = fields.get("recoveries", 0)
    return found


def note(history: TextIO, **fields: object) -> None:
    """Write a line of a history: a JSON object."""
    history.write(json.dumps(fields) + "\n")


def wrong_sums(histories: dict[int, RankHistory], machines: tuple[tuple[int, ...], ...],
               lost: Collection[int] = ()) -> list[str]:
    """Return, in words, every wrong sum, and every step that a rank has left out.

    A sum has the inputs of the ranks that bpsfast names: the same on all ranks, and all but some of those *lost*. Who
    is missing from a gradient once is missing from then on.
    """
    found = []
    steps = sorted({step for each in histories.values() for step in each.steps})
    everybody = sorted(rank for ranks in machines for rank in ranks)
    of = {step: next(each.ranks[step] for each in histories.values() if step in each.ranks) for step in steps}
    last = [everybody] * len(SIZES)
    for step in steps:
        for i, ranks in enumerate(of[step]):
            if not set(everybody).difference(lost) <= set(ranks) <= set(last[i]):
                found.append(f"step {step}, gradient {i} is of ranks {ranks}, of {everybody} without some of {lost}; "
                             f"the last was of {last[i]}")
            last[i] = ranks
    right = {step: [expected(_of(machines, ranks), step, i) for i, ranks in enumerate(of[step])] for step in steps}
    for rank, each in sorted(histories.items()):
        found += [f"rank {rank}, step {step} is of ranks {ranks}, elsewhere of {of[step]}"
                  for step, ranks in each.ranks.items() if ranks != of[step]]
    for rank, each in sorted(histories.items()):
        if sorted(each.steps) != list(range(len(each.steps))):
            found.append(f"rank {rank} has steps {sorted(each.steps)}")
        for step, sums in each.steps.items():
            found += [f"rank {rank}, step {step}, gradient {i}: {have} instead of {want}"
                      for i, (have, want) in enumerate(zip(sums, right[step])) if have != want]
    return found
