"""One rank of `bench helpers`: trains while helpers (nodes without ranks) are lost and replaced.

    python -m bpsfast.bench.helpers.rank FILE N_STEPS MB N_JOINED

It ends after so many steps, or when so many helpers have joined, whatever is later.

Each parameter moves along the average of what the ranks make of it, so its bits at the end depend on every sum before.
Writes JSON lines: ``{"step": 7, "at_s": ...}`` when a step is over (CLOCK_MONOTONIC), at last ``{"digest": ...,
"lost": ..., "joined": ...}``: that of all parameters, and how often the node has gone on without or with somebody.
"""
from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np

import bpsfast

_N_TENSORS = 12
#: All ranks end after the same step: they ask whether all may every so many.
ROUND = 20


def main(arguments: list[str]) -> int:
    """Train; 0."""
    path, n_steps, n_joined = Path(arguments[0]), int(arguments[1]), int(arguments[3])
    n = int(float(arguments[2]) * 1e6 / 4 / _N_TENSORS)
    bpsfast.init()
    rank = bpsfast.rank()
    draw = np.random.default_rng(7)
    parameters = [draw.standard_normal(n, dtype=np.float32) for _ in range(_N_TENSORS)]
    noise = np.random.default_rng([7, rank]).standard_normal(n, dtype=np.float32)
    # Declared, and its kernel compiled, before the first step: on a machine that has not summed integers yet that takes
    # a second, which is no pause of a training that has begun.
    bpsfast.push_pull(np.zeros(1, np.int64), name="may end", average=False)
    with path.open("w", buffering=1) as history:
        for step in itertools.count():
            scale = np.float32(1 + (step + rank) % 5)
            handles = [bpsfast.push_pull_async(value * np.float32(0.5) + noise * scale, name=f"p{i}")
                       for i, value in enumerate(parameters)]
            for value, handle in zip(parameters, handles):
                value -= np.float32(0.1) * bpsfast.synchronize(handle)
            history.write(json.dumps({"step": step, "at_s": time.monotonic()}) + "\n")
            if (step + 1) % ROUND == 0:
                counters = bpsfast.stats().counters
                may_end = np.array([step + 1 >= n_steps and counters["joined"] >= n_joined], np.int64)
                if bpsfast.push_pull(may_end, name="may end", average=False)[0] == bpsfast.size():
                    break
        digest = hashlib.blake2b(b"".join(value.tobytes() for value in parameters)).hexdigest()
        end = {"digest": digest, "lost": counters["recoveries"], "joined": counters["joined"]}
        history.write(json.dumps(end) + "\n")
    bpsfast.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
