"""One process of the unrelated job in `bench neighbour`: computes, streams through memory, waits as for a GPU, repeats.

    python -m bpsfast.bench.neighbour.victim LOAD

LOAD is the share of the time in which it needs its core. It prints "ready" once its pace is normal; when its standard
input ends, it prints all its steps as JSON: [begin in seconds of the monotonic clock, duration in seconds] each.
"""
from __future__ import annotations

import json
import select
import sys
import time

import numpy as np

_SIDE = 384
_N_PRODUCTS = 4
_STREAM_NBYTES = 16 << 20
_N_WARMUP = 5


def main(arguments: list[str]) -> int:
    """Make steps until standard input ends."""
    load = float(arguments[0])
    left, right = (np.random.default_rng(seed).random((_SIDE, _SIDE), np.float32) for seed in (1, 2))
    product = np.empty_like(left)
    source, target = np.ones(_STREAM_NBYTES, np.uint8), np.zeros(_STREAM_NBYTES, np.uint8)
    steps: list[tuple[float, float]] = []
    while not (steps and select.select([sys.stdin], [], [], 0.0)[0]):
        begin_s = time.monotonic()
        for _ in range(_N_PRODUCTS):
            np.matmul(left, right, out=product)
        np.copyto(target, source)
        took_s = time.monotonic() - begin_s
        steps.append((begin_s, took_s))
        if len(steps) == _N_WARMUP:
            print("ready", flush=True)
        if load < 1.0:
            time.sleep(took_s * (1.0 / load - 1.0))
    json.dump(steps[_N_WARMUP:], sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
