"""One rank of a `bench chaos` trial: trains, and writes a history of its gradient sums.

    python -m bpsfast.bench.chaos.rank FILE STOP RECOVERIES

It trains until there is a file STOP: the ranks sum who has seen it, so all of them end after the same step. Before it
leaves it waits for a limited time until the job has gone on RECOVERIES times without a lost process, as no step waits
for the loss of a helper that had nothing to sum.

A line of the history is a JSON object: ``{"step": 7, "sums": [digest of each gradient's sum]}`` for each step, at last
``{"end": "ok", "recoveries": 1}``, or the class of the error with its text and when it was raised (CLOCK_MONOTONIC).
"""
from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import TextIO

import numpy as np

import bpsfast
from bpsfast.orchestration.errors import BpsError

from .history import digest, names, note, pushed

_RECOVERY_S = 10.0


def main(arguments: list[str]) -> int:
    """Train, and write how that ended; return 0 also after an error of the job."""
    path, stop, n_recoveries = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    with path.open("w", buffering=1) as history:
        try:
            bpsfast.init()
            _train(history, stop)
            recoveries = _recoveries(n_recoveries)
            bpsfast.shutdown()
        except BpsError as exc:
            note(history, end=type(exc).__name__, text=str(exc), at_s=time.monotonic())
        else:
            note(history, end="ok", recoveries=recoveries)
    return 0


def _train(history: TextIO, stop: Path) -> None:
    rank = bpsfast.rank()
    for step in itertools.count():
        seen = bpsfast.push_pull_async(np.array([stop.exists()], np.float32), name="stop", average=False)
        handles = [bpsfast.push_pull_async(pushed(rank, step, i), name=name, average=False)
                   for i, name in enumerate(names(step))]
        sums = [digest(bpsfast.synchronize(handle)) for handle in handles]
        note(history, step=step, sums=sums, ranks=[bpsfast.contributors(name) for name in names(step)])
        if bpsfast.synchronize(seen)[0]:
            return


def _recoveries(wanted: int) -> int:
    """Return the number of recoveries once it is *wanted*, or after a timeout."""
    deadline = time.monotonic() + _RECOVERY_S
    while (found := bpsfast.counters()["recoveries"]) < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
