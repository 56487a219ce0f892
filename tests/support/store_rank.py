"""A rank that finds its job through a store: ``python -m tests.support.store_rank FOLDER RANK SIZE KIND SCENARIO``.

Prints what the scenario returns as a line of JSON. The settings come from the environment, as a user's would.
"""
from __future__ import annotations

import gc
import json
import os
import sys
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import psutil

from bpsfast.base.settings import load
from bpsfast.launch.rendezvous import Store, role_of
from bpsfast.orchestration.errors import BpsError
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.trainer.exit_handling import ExitWatch
from bpsfast.trainer.process import join_job, leave_job
from tests.support.directory_store import DirectoryStore

FOLDER, RANK, SIZE, KIND = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def store(name: str = "store") -> Store:
    """Return this rank's end of the store *name*."""
    if KIND == "directory":
        os.makedirs(f"{FOLDER}/{name}", exist_ok=True)
        return DirectoryStore(f"{FOLDER}/{name}")
    import torch.distributed as dist

    if KIND == "file":
        return dist.FileStore(f"{FOLDER}/{name}", SIZE)
    # A server that lives in a rank ends with it: this one belongs to the test.
    whole = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=False, timeout=timedelta(seconds=30))
    return dist.PrefixStore(name, whole)


class Job:
    """One session of this process, and all that belongs to it."""

    def __init__(self, of: Store, timeout_s: float = 30.0) -> None:
        self.settings = load()
        self.role = role_of(of, RANK, SIZE, self.settings, timeout_s)
        self.session, started = join_job(self.role, self.settings)
        self.watch = ExitWatch(self.close, started)

    def close(self) -> None:
        """Leave, whoever else has or has not."""
        leave_job(self.session, self.watch, stays=False)

    def total(self, name: str) -> float:
        """Return the sum of all ranks' numbers, each plus one."""
        self.session.tensors.declare([TensorSpec(name=name, dtype="float32", shape=(1000,), average=False)])
        region = self.session.memory.allocate(4000)
        region.array.view(np.float32)[:] = RANK + 1
        unit = self.session.tensors.unit(name)
        round = unit.push(region.address, 4000)
        unit.wait(round, 40.0)
        values = unit.view(round).view(np.float32)[:1000]
        assert (values == values[0]).all()
        return float(values[0])


def counts() -> list[int]:
    """Return this process's descriptors, threads and children."""
    gc.collect()
    return [len(os.listdir("/proc/self/fd")), threading.active_count(), len(psutil.Process().children())]


def one() -> Any:
    """One job; say where this rank is in it."""
    job = Job(store())
    found = [job.total("x"), job.role.local_rank, job.role.local_size, job.role.node_index, job.role.num_nodes,
             job.session.n_helpers, job.role.scheduler[0]]
    job.close()
    return found


def five() -> Any:
    """Five jobs one after another through one store; what they leave is counted."""
    of = store()
    totals, keys, left = [], set(), []
    for number in range(5):
        job = Job(of)
        totals.append(job.total(f"x{number}"))
        keys.add(job.role.job_key)
        daemons = job.watch.daemons
        job.close()
        daemons.close(20.0)  # the next count is of a job that is over
        left.append(counts())
    return totals, len(keys), left[1], left[-1]


def two_at_once() -> Any:
    """Two jobs beside each other, left in another order by each rank."""
    first, second = Job(store("first")), Job(store("second"))
    totals = [first.total("x"), second.total("x"), first.total("y")]
    for job in (first, second) if RANK % 2 else (second, first):
        job.close()
    third = Job(store("third"))
    totals.append(third.total("x"))
    third.close()
    return totals


def leaves_early() -> Any:
    """Rank 0, which has started everything, leaves before the others have begun to work."""
    job = Job(store())
    if RANK == 0:
        other = Job(store("behind"))
        job.close()
        other.close()
        return 0.0
    waits = Job(store("behind"))
    waits.close()
    total = float(job.session.rank)
    job.session.ask_node()  # the daemons of a rank that has left still answer
    job.close()
    return total


def exits_without_leaving() -> Any:
    """The end of the program leaves."""
    return Job(store()).total("x")


def raises() -> Any:
    """Rank 1 ends by an exception of its own; the others hear of it in both of their jobs."""
    jobs = Job(store("first")), Job(store("second"))
    jobs[0].total("x")
    if RANK == 1:
        raise ValueError("a bug of the user")
    found = []
    for job in jobs:
        try:
            job.session.barrier()
        except BpsError as exc:
            found.append([type(exc).__name__, str(exc)])
    return found


def forks() -> Any:
    """A child of fork neither leaves nor waits for anybody."""
    job = Job(store())
    pid = os.fork()
    if pid == 0:
        sys.exit(0)  # runs what is registered for the end of the program
    code = os.waitpid(pid, 0)[1]
    total = job.total("x")
    job.close()
    return total, code


def refused() -> Any:
    """A rendezvous that fails: what it raises."""
    try:
        Job(store(), timeout_s=float(os.environ.get("RENDEZVOUS_TIMEOUT_S", "5")))
    except BpsError as exc:
        return type(exc).__name__, str(exc)
    return None


def main() -> None:
    print(json.dumps(globals()[sys.argv[5]]()), flush=True)


if __name__ == "__main__":
    main()
