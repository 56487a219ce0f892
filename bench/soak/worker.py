"""One worker of `bench soak --losses`: small steps in an elastic job that goes on without lost workers.

    python -m bpsfast.bench.soak.worker FOLDER SECONDS

Every sum is checked against the inputs of the ranks that it has. Writes its process id to FOLDER/pid_MEMBER, and at its
end a JSON object to FOLDER/end_MEMBER: steps, wrong sums, jobs.
"""
from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import bpsfast
from bpsfast import elastic
from bpsfast.elastic.coordinator_client import current_client

from .rank import SIZES, added, base


def main(arguments: list[str]) -> int:
    """Train until the time is over; return 1 if a sum was wrong."""
    folder, until_s = Path(arguments[0]), float(arguments[1])
    number = int(os.environ["BPSFAST_MEMBER"])
    (folder / f"pid_{number}").write_text(str(os.getpid()))
    bpsfast.init()
    state = elastic.ObjectState(step=0, n_jobs=0)
    n_wrong = 0
    bases = [base(gradient) for gradient in range(len(SIZES))]

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        nonlocal n_wrong
        client, rank = current_client(), bpsfast.rank()
        assert client is not None, "it is started by bpsfast run --elastic"
        state.n_jobs = client.job
        goes_on = True
        while goes_on:
            handles = [bpsfast.push_pull_async(each + np.float32(added(rank, state.step)), name=f"g{i}", average=False)
                       for i, each in enumerate(bases)]
            asked = bpsfast.push_pull_async(np.array([time.monotonic() >= until_s], np.int64), name="over",
                                            average=False)
            for i, handle in enumerate(handles):
                found = bpsfast.synchronize(handle)
                ranks = bpsfast.contributors(f"g{i}")
                right = bases[i] * np.float32(len(ranks)) + np.float32(sum(added(each, state.step) for each in ranks))
                n_wrong += not np.array_equal(found, right)
            goes_on = not bpsfast.synchronize(asked)[0]
            state.step += 1
            if goes_on:
                state.commit()

    train(state)
    (folder / f"end_{number}").write_text(json.dumps({"steps": state.step, "wrong": n_wrong, "jobs": state.n_jobs}))
    bpsfast.shutdown()
    return 1 if n_wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
