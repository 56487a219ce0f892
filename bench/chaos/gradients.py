"""What each rank pushes in each step of a trial, and the sums that must come of it: a reading by NumPy."""
from __future__ import annotations

import functools
import hashlib

import numpy as np
import numpy.typing as npt

#: Bytes of each gradient: of one partition and of many, so that every owner has some of them.
SIZES = (1000, 40_000, 400_000, 68, 100_000, 50_000)
PARTITION_NBYTES = 16_384
#: The last of them is pushed in every fourth step only, while there are faults, and has a new name each time: jobs
#: are struck while they declare, too.
_NEW_EVERY, _NEW_UNTIL = 4, 40


def names(step: int) -> list[str]:
    """Return what each gradient of *step* is called."""
    old = [f"g{i}" for i in range(len(SIZES) - 1)]
    return [*old, f"new {step}"] if step % _NEW_EVERY == 0 and step < _NEW_UNTIL else old


@functools.cache
def _base(rank: int, gradient: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng((rank, gradient)).standard_normal(SIZES[gradient] // 4, dtype=np.float32)


def pushed(rank: int, step: int, gradient: int) -> npt.NDArray[np.float32]:
    """Return what *rank* pushes: of no two ranks or steps the same, so a sum shows whose inputs are in it."""
    return _base(rank, gradient) * np.float32(1 + step / 7)


def digest(array: npt.NDArray[np.float32]) -> str:
    """Return a short name of these bits."""
    return hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()


def summed(machines: tuple[tuple[int, ...], ...], step: int, gradient: int) -> npt.NDArray[np.float32]:
    """Return the sum in which each rank's input is once: by machine, and ranks of one first."""
    partials = [functools.reduce(np.add, (pushed(rank, step, gradient) for rank in ranks)) for ranks in machines]
    return functools.reduce(np.add, partials)


def expected(machines: tuple[tuple[int, ...], ...], step: int, gradient: int) -> str:
    """Return the digest of that."""
    return digest(summed(machines, step, gradient))
