"""One worker of an elastic `bench chaos` trial: trains, and writes a history of its gradient sums, job by job.

    python -m bpsfast.bench.chaos.worker FOLDER STOP

It trains until there is a file STOP, as `rank` does. The lines of its history are JSON objects: ``{"job": 2, "nodes":
[the node of each rank]}`` when a job begins; for each step, committed or not, ``{"step": 7, "sums": [digests], "ranks":
[the contributors of each]}``; at last ``{"end": "ok", "weights": digest}``, or the class of the error with its text.
Weights add up the sums of one gradient.
"""
from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TextIO

import numpy as np

import bpsfast
from bpsfast import elastic
from bpsfast.elastic.coordinator_client import current_client
from bpsfast.orchestration.errors import BpsError
from bpsfast.trainer import process

from .history import SIZES, digest, note, pushed

#: The gradient whose sums are added to the weights.
KEPT = 2


def main(arguments: list[str]) -> int:
    """Train, and write how that ended; return 0 also after an error of the job."""
    folder, stop = map(Path, arguments)
    number = int(os.environ["BPSFAST_MEMBER"])
    (folder / f"pid_{number}").write_text(str(os.getpid()))
    with (folder / f"worker_{number}.jsonl").open("w", buffering=1) as history:
        try:
            bpsfast.init()
            state = elastic.ObjectState(weights=np.zeros(SIZES[KEPT] // 4, np.float32), step=0)
            _train(state, history, stop)
            bpsfast.shutdown()
        except BpsError as exc:
            note(history, end=type(exc).__name__, text=str(exc), at_s=time.monotonic())
        else:
            note(history, end="ok", weights=digest(state.weights))
    return 0


@elastic.run
def _train(state: elastic.ObjectState, history: TextIO, stop: Path) -> None:
    member, rank, size = current_client(), bpsfast.rank(), bpsfast.size()
    assert member is not None, "it is started by bpsfast run --elastic"
    nodes = np.zeros(size, np.int32)
    nodes[rank] = process.current().node
    note(history, job=member.job, nodes=bpsfast.push_pull(nodes, name="nodes", average=False).tolist())
    seen = 0.0
    while not seen:
        asked = bpsfast.push_pull_async(np.array([stop.exists()], np.float32), name="stop", average=False)
        handles = [bpsfast.push_pull_async(pushed(rank, state.step, i), name=f"g{i}", average=False)
                   for i in range(len(SIZES))]
        sums = [bpsfast.synchronize(handle) for handle in handles]
        note(history, step=state.step, sums=[digest(each) for each in sums],
             ranks=[bpsfast.contributors(f"g{i}") for i in range(len(SIZES))])
        state.weights += sums[KEPT]
        state.step += 1
        seen = float(bpsfast.synchronize(asked)[0])
        state.commit()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
