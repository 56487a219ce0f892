"""One rank of `bench push_pull` beside an MPI library: a member of both, whose blocks of calls alternate.

    mpirun -np N python -m bpsfast.bench.push_pull.paired_rank JSON

JSON has sizes (bytes), n_rounds, gap_us (work between calls) and names of contestants. Rank 0 prints one line of JSON
for each size, after "paired ".
"""
from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import bpsfast
from bpsfast.bench.push_pull.options import EMPTY, PAIRED
from bpsfast.hardware.host import Host
from bpsfast.tools.doctor import hardware
from bpsfast.trainer import process

PIECE_NBYTES = 4 << 20
#: The number of calls in a block: the most, and the least. In between a block sums about `_BLOCK_NBYTES`.
_N_CALLS = 2000
_LEAST_CALLS = 5
_BLOCK_NBYTES = 256 << 20

#: The backends of the groups among the contestants.
_BACKENDS = {"gloo": "gloo", "backend": "bpsfast", EMPTY: EMPTY}

Call = Callable[[], object]


class Calls:
    """In-place sums of *nbytes* of float32 by each contestant, in memory of its own."""

    def __init__(self, world: Any, in_place: Any, groups: dict[str, Any]) -> None:
        self._world, self._in_place, self._groups = world, in_place, groups

    def of(self, nbytes: int, names: Sequence[str]) -> dict[str, Call]:
        """Return the calls by contestant; large ones of MPI also in pieces."""
        found: dict[str, Call] = {}
        n = max(1, nbytes // 4)
        for name in names:
            x = bpsfast.empty((n,)) if name == "segment" else np.zeros(n, np.float32)
            result = np.zeros_like(x) if name.endswith(" out") else x
            if name in ("numpy", "numpy out", "segment"):
                # by position, as MPI's: `partial` builds a dict for keywords in each call, which a direct call does not
                found[name] = partial(bpsfast.push_pull, x, False, f"{name} {nbytes}", None, result)
            elif name in ("mpi", "mpi out"):
                found[name] = partial(self._world.Allreduce, self._in_place if result is x else x, result)
                if name == "mpi" and nbytes > PIECE_NBYTES:
                    found["mpi in pieces"] = partial(self._one_by_one, x)
            elif name == "torch":
                found[name] = self._torch(nbytes)
            else:  # a backend of torch.distributed
                found[name] = self._all_reduce(nbytes, self._groups[name])
        return found

    def _one_by_one(self, x: Any) -> None:
        for at in range(0, x.size, PIECE_NBYTES // 4):
            self._world.Allreduce(self._in_place, x[at:at + PIECE_NBYTES // 4])

    @staticmethod
    def _torch(nbytes: int) -> Call:
        import torch

        import bpsfast.torch as bps

        x, name = torch.zeros(max(1, nbytes // 4)), f"torch {nbytes}"
        return partial(bps.push_pull_inplace, x, False, name)

    @staticmethod
    def _all_reduce(nbytes: int, group: Any) -> Call:
        import torch
        import torch.distributed as dist

        x = torch.zeros(max(1, nbytes // 4))
        return partial(dist.all_reduce, x, dist.ReduceOp.SUM, group)


def open_groups(world: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return a group of torch.distributed for each backend among *names*."""
    backends = {name: _BACKENDS[name] for name in names if name in _BACKENDS}
    if not backends:
        return {}
    import torch.distributed as dist

    import bpsfast.torch.backend  # noqa: F401 - registers it

    if EMPTY in backends:
        dist.Backend.register_backend(EMPTY, _empty_group, devices=["cpu"])
    port = world.bcast(_free_port() if world.rank == 0 else 0)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.size)
    return {name: dist.new_group(backend=backend) for name, backend in backends.items()}


def _empty_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Return a process group written in Python that sums nothing: its calls cost what torch.distributed costs."""
    from bpsfast.torch.backend.base_group import NamedGroup

    class Empty(NamedGroup):
        def allreduce(self, tensors: Any, opts: Any) -> None:  # type: ignore[override]
            """Do nothing; torch takes None for a call that is over."""

    return Empty(rank, size, EMPTY)


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def block(call: Call, n: int, gap_s: float) -> tuple[list[float], float]:
    """Return seconds of *n* calls after some unmeasured ones, and this process's CPU seconds per call.

    Before each call the rank computes for *gap_s*, which counts for neither.
    """
    for _ in range(min(n, 20)):
        call()
    now, samples = time.perf_counter, []
    worked_s = 0.0
    cpu_s = time.process_time()
    for _ in range(n):
        if gap_s:
            begin = now()
            while now() - begin < gap_s:
                pass
            worked_s += gap_s
        begin = now()
        call()
        samples.append(now() - begin)
    return samples, max(0.0, time.process_time() - cpu_s - worked_s) / n


def _on_all_cpus(call: Callable[[], Any]) -> Any:
    """Return what *call* returns in a process that may use every CPU: MPI libraries bind ranks."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        return call()
    finally:
        os.sched_setaffinity(0, before)


def _wait_asleep(world: Any) -> None:
    """Wait for all ranks without using the CPU, which one of them measures meanwhile."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


def measure(world: Any, calls: dict[str, Call], nbytes: int, n_rounds: int, gap_s: float, cores: Any) -> dict[str, Any]:
    """Return the blocks of each contestant, round by round, as rank 0 has measured them."""
    n = min(_N_CALLS, max(_LEAST_CALLS, _BLOCK_NBYTES // max(nbytes, 1)))
    if gap_s:
        n = min(n, 400)
    blocks: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    nearness_ns = []
    order = random.Random(nbytes)
    for _ in range(n_rounds):
        nearness_ns.append(_on_all_cpus(lambda: hardware.again(cores).ns) if world.rank == 0 else 0.0)
        _wait_asleep(world)
        names = list(calls)
        order.shuffle(names)  # alike on all ranks
        for name in names:
            world.Barrier()
            samples, cpu_s = block(calls[name], n, gap_s)
            cpu_s = sum(world.allgather(cpu_s))
            ordered = sorted(samples)
            blocks[name].append({"median_s": statistics.median(ordered), "mean_s": statistics.fmean(ordered),
                                 "p99_s": ordered[min(n - 1, int(n * 0.99))], "cpu_s": cpu_s})
    return {"nbytes": nbytes, "n_calls": n, "handover_ns": nearness_ns, "blocks": blocks,
            "direct_sums": process.current().settings.direct_sums}


def main(arguments: list[str]) -> int:
    """Measure as the JSON says."""
    plan = json.loads(arguments[0])
    from mpi4py import MPI  # here: who starts ranks under another library needs none

    world = MPI.COMM_WORLD
    bpsfast.init()
    assert (bpsfast.rank(), bpsfast.size()) == (world.rank, world.size), "both libraries number the ranks alike"
    calls = Calls(world, MPI.IN_PLACE, open_groups(world, plan["names"]))
    cores = world.bcast(_on_all_cpus(lambda: hardware.measure(Host())) if world.rank == 0 else None)
    gc.disable()
    for nbytes in plan["sizes"]:
        record = measure(world, calls.of(nbytes, plan["names"]), nbytes, plan["n_rounds"], plan["gap_us"] / 1e6, cores)
        if world.rank == 0:
            print(PAIRED + json.dumps(record), flush=True)
        gc.collect()
    bpsfast.barrier()
    bpsfast.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
