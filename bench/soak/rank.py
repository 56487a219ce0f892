"""One rank of a soak: small steps, one after the other, every sum looked at.

    python -m bpsfast.bench.soak.rank FILE SECONDS

Writes JSON lines: ``{"step": 1000}`` now and then, at last ``{"end": "ok", "steps": ..., "wrong": ...}``.
"""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import bpsfast

#: Elements of each gradient: a group's worth of small ones, and one of several partitions.
SIZES = (3, 100, 1000, 20_000)
#: All ranks stop after the same step: they ask whether to go on every so many.
ROUND = 100


def main(arguments: list[str]) -> int:
    """Train until the time is over; 1 if a sum was wrong."""
    path, seconds = Path(arguments[0]), float(arguments[1])
    bpsfast.init()
    rank, size = bpsfast.rank(), bpsfast.size()
    inputs = [np.empty(n, np.float32) for n in SIZES]
    until, step, n_wrong = time.monotonic() + seconds, 0, 0
    with path.open("w", buffering=1) as history:
        while True:
            for _ in range(ROUND):
                for array in inputs:
                    array.fill(rank + step % 1000)
                handles = [bpsfast.push_pull_async(array, name=f"g{i}", average=False)
                           for i, array in enumerate(inputs)]
                total = np.float32(size * (size - 1) // 2 + size * (step % 1000))
                n_wrong += sum(not (bpsfast.synchronize(handle) == total).all() for handle in handles)
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
