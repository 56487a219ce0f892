"""One replica of a torchft trial of `bench worker_loss`: the training of `rank`, summed by torchft over gloo.

    python -m bpsfast.bench.worker_loss.replica FILE NUMBER LIGHTHOUSE TIMEOUT_S

It writes a `training.History` of the steps that torchft has committed to FILE at its end, after `N_STEPS`: replicas
do not learn of a loss in the same step, so they cannot count from it. Before the first step it waits until all replicas
have a file ``.ready``, so that torchft begins with all of them.
"""
from __future__ import annotations

import itertools
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from .training import (
    COMMITS,
    COMPUTE_S,
    COMPUTES,
    N_RANKS,
    N_STEPS,
    PUSHES,
    WAITS,
    History,
    Inputs,
    Progress,
)


def main(arguments: list[str]) -> int:
    """Train; return 0 also after an error of torchft, which is in the history."""
    import torch
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo

    path, history = Path(arguments[0]), History()
    number, lighthouse, timeout_s = int(arguments[1]), arguments[2], float(arguments[3])
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # no weights are trained here, so a replica that torchft brings up to date gets none
    manager = Manager(pg=ProcessGroupGloo(limit), load_state_dict=lambda state: None, state_dict=dict,
                      min_replica_size=2, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
                      hostname="127.0.0.1", lighthouse_addr=lighthouse, replica_id=f"replica_{number}", timeout=limit,
                      quorum_timeout=limit, connect_timeout=limit, init_sync=False)
    try:
        _meet(path, timeout_s)
        _train(history, Progress(path.with_suffix(".progress")), manager, number)
    except Exception as exc:  # torchft has no class of errors of its own
        history.error = f"{type(exc).__name__}: {exc}"
    history.write(path)
    manager.shutdown(wait=False)
    return 0


def _meet(path: Path, timeout_s: float) -> None:
    path.with_suffix(".ready").touch()
    deadline = time.monotonic() + timeout_s
    while len(list(path.parent.glob("*.ready"))) < N_RANKS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all replicas have started within {timeout_s:g} s")
        time.sleep(0.005)


def _train(history: History, progress: Progress, manager: Any, number: int) -> None:
    import torch
    import torch.distributed as dist

    inputs = Inputs(number)
    tensors = [torch.from_numpy(array) for array in inputs.arrays]
    while manager.current_step() < N_STEPS:
        manager.start_quorum()
        inputs.fill(manager.current_step())
        time.sleep(COMPUTE_S)
        progress.phase = PUSHES
        works = [manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM) for tensor in tensors]
        progress.phase = WAITS
        for work in works:
            work.wait()
        progress.phase = COMMITS
        if not manager.should_commit():
            progress.phase = COMPUTES
            continue
        history.ends_s.append(time.monotonic())
        progress.end_step()
        # A replica whose step failed where another's was committed gets the other's state, and takes no part meanwhile.
        step, n_members = manager.current_step() - 1, manager.num_participants()
        history.wrong += [f"step {step}, gradient {i} is not the sum of {n_members} replicas"
                          for i, found in enumerate(inputs.arrays)
                          if not any(inputs.is_sum(found, i, step, ranks)
                                     for ranks in itertools.combinations(range(N_RANKS), n_members))]
        history.n_members.append(n_members)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
