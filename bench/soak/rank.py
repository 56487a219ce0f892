"""One rank of a soak: small steps, one after the other, every sum checked.

    python -m bpsfast.bench.soak.rank FILE SECONDS

Writes JSON lines: ``{"step": 1000}`` now and then, at last ``{"end": "ok", "steps": ..., "wrong": ...}``.
"""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

import bpsfast

#: Elements of each gradient: a group's worth of small ones, and one of several partitions.
SIZES = (3, 100, 1000, 20_000)
#: Element j of gradient i begins with FIRST[i] + j: no two are the same, so bytes at another place are seen.
FIRST = tuple(sum(SIZES[:i]) for i in range(len(SIZES)))
#: Inputs repeat after so many steps, and remain numbers that float32 holds exactly, as their sums do.
PERIOD = 1000
#: All ranks stop after the same step: they ask whether to go on every so many.
ROUND = 100


def base(gradient: int) -> npt.NDArray[np.float32]:
    """Return what is the same in each rank's input, in each step."""
    return np.arange(FIRST[gradient], FIRST[gradient] + SIZES[gradient], dtype=np.float32)


def added(rank: int, step: int) -> int:
    """Return what is added to that: never nothing, and of no two ranks the same."""
    return rank + 1 + step % PERIOD


def main(arguments: list[str]) -> int:
    """Train until the time is over; 1 if a sum was wrong."""
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
