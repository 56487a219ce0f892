"""One rank of `bench soak`: small steps, one after another, in which every sum is checked.

    python -m bpsfast.bench.soak.rank FILE SECONDS

Writes JSON lines: ``{"step": 1000}`` from time to time, finally ``{"end": "ok", "steps": ..., "wrong": ...}``.
"""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

import bpsfast

#: Elements of each gradient: small ones that fill a group, and one of several partitions.
SIZES = (3, 100, 1000, 20_000)
#: Element j of gradient i starts as FIRST[i] + j; all differ, so misplaced bytes are detected.
FIRST = tuple(sum(SIZES[:i]) for i in range(len(SIZES)))
#: Inputs repeat after this many steps, so that they and their sums remain exact in float32.
PERIOD = 1000
#: Ranks decide together every this many steps whether to go on, so all stop after the same step.
ROUND = 100


def base(gradient: int) -> npt.NDArray[np.float32]:
    """Return the part of the input that is equal on all ranks and in all steps."""
    return np.arange(FIRST[gradient], FIRST[gradient] + SIZES[gradient], dtype=np.float32)


def added(rank: int, step: int) -> int:
    """Return the number added to `base`: never 0, and different on each rank."""
    return rank + 1 + step % PERIOD


def main(arguments: list[str]) -> int:
    """Train until the time is over; return 1 if a sum was wrong."""
    path, seconds = Path(arguments[0]), float(arguments[1])
    bpsfast.init()
    rank, size = bpsfast.rank(), bpsfast.size()
    bases = [base(gradient) for gradient in range(len(SIZES))]
    inputs, totals = [each.copy() for each in bases], [each * np.float32(size) for each in bases]
    until, step, n_wrong = time.monotonic() + seconds, 0, 0
    with path.open("w", buffering=1) as history:
        while True:
            for _ in range(ROUND):
                for array, first in zip(inputs, bases):
                    np.add(first, added(rank, step), out=array)
                handles = [bpsfast.push_pull_async(array, name=f"g{i}", average=False)
                           for i, array in enumerate(inputs)]
                more = sum(added(other, step) for other in range(size))
                n_wrong += sum(not np.array_equal(bpsfast.synchronize(handle), total + more)
                               for handle, total in zip(handles, totals))
                step += 1
            history.write(json.dumps({"step": step}) + "\n")
            goes_on = bpsfast.push_pull(np.array([time.monotonic() < until], np.int64), name="goes on", average=False)
            if goes_on[0] < size:
                break
        history.write(json.dumps({"end": "ok", "steps": step, "wrong": n_wrong}) + "\n")
    bpsfast.shutdown()
    return 1 if n_wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
