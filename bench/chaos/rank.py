"""One rank of a trial: trains, and writes a history of what it has seen.

    python -m bpsfast.bench.chaos.rank FILE N_STEPS

A line of the history is a JSON object: ``{"step": 7, "sums": [digest of each gradient's]}`` for each step that is over;
at last ``{"end": "ok"}``, or the class of the error with its text and when it was raised (CLOCK_MONOTONIC).
"""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TextIO

import bpsfast
from bpsfast.orchestration.errors import BpsError

from .gradients import SIZES, digest, pushed


def main(arguments: list[str]) -> int:
    """Train; return 0 whatever became of it, if the history says so."""
    path, n_steps = Path(arguments[0]), int(arguments[1])
    with path.open("w", buffering=1) as history:
        try:
            bpsfast.init()
            _train(history, n_steps)
            bpsfast.shutdown()
        except BpsError as exc:
            _note(history, end=type(exc).__name__, text=str(exc), at_s=time.monotonic())
        else:
            _note(history, end="ok")
    return 0


def _train(history: TextIO, n_steps: int) -> None:
    rank = bpsfast.rank()
    for step in range(n_steps):
        handles = [bpsfast.push_pull_async(pushed(rank, step, i), name=f"g{i}", average=False)
                   for i in range(len(SIZES))]
        _note(history, step=step, sums=[digest(bpsfast.synchronize(handle)) for handle in handles])


def _note(history: TextIO, **fields: object) -> None:
    history.write(json.dumps(fields) + "\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
