"""One rank of a `bench worker_loss` trial: trains until one rank is lost, and some steps longer.

    python -m bpsfast.bench.worker_loss.rank FILE

It writes a `training.History` to FILE at its end. All ranks end after the same step, because they have the same
contributors of the first gradient in each step.
"""
from __future__ import annotations

import sys
import time
from pathlib import Path

import bpsfast
from bpsfast.orchestration.errors import BpsError

from .training import COMPUTE_S, MOST_STEPS, N_AFTER, N_RANKS, PUSHES, SIZES, WAITS, History, Inputs, Progress


def main(arguments: list[str]) -> int:
    """Train; return 0 also after an error of the job, which is in the history."""
    path, history = Path(arguments[0]), History()
    try:
        bpsfast.init()
        _train(history, Progress(path.with_suffix(".progress")))
        history.losses = [(list(loss.ranks), loss.pause_s) for loss in bpsfast.losses()]
        bpsfast.shutdown()
    except BpsError as exc:
        history.error = f"{type(exc).__name__}: {exc}"
    history.write(path)
    return 0


def _train(history: History, progress: Progress) -> None:
    inputs, names = Inputs(bpsfast.rank()), [f"g{i}" for i in range(len(SIZES))]
    n_after = 0
    for step in range(MOST_STEPS):
        inputs.fill(step)
        time.sleep(COMPUTE_S)
        progress.phase = PUSHES
        handles = [bpsfast.push_pull_async(array, name=name, average=False)
                   for name, array in zip(names, inputs.arrays)]
        progress.phase = WAITS
        sums = [bpsfast.synchronize(handle) for handle in handles]
        history.ends_s.append(time.monotonic())
        progress.end_step()
        ranks = [bpsfast.contributors(name) for name in names]
        history.wrong += [f"step {step}, gradient {i} is not the sum of ranks {ranks[i]}"
                          for i, found in enumerate(sums) if not inputs.is_sum(found, i, step, ranks[i])]
        history.n_members.append(min(map(len, ranks)))
        n_after += len(ranks[0]) < N_RANKS
        if n_after > N_AFTER:
            return


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
