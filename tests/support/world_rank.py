"""A rank of a torch job: ``python -m tests.support.world_rank FOLDER RANK SIZE SCENARIO``.

Prints what the scenario returns as a line of JSON. The store of torch's default group is a file in FOLDER.
"""
from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

import bpsfast.torch.backend  # noqa: F401 - registers it
from bpsfast.orchestration.errors import BpsError
from bpsfast.torch.backend import worlds
from bpsfast.trainer import process

FOLDER, RANK, SIZE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def begin(backend: str, name: str = "default") -> None:
    """Make the default group."""
    dist.init_process_group(backend, init_method=f"file://{FOLDER}/{name}", rank=RANK, world_size=SIZE,
                            timeout=timedelta(seconds=40))


def total(group: Any = None) -> float:
    """Return the sum of the members' ranks, each plus one."""
    x = torch.full((1000,), RANK + 1.0)
    dist.all_reduce(x, group=group)
    assert x.eq(x[0]).all()
    return x[0].item()


def session_of(group: Any = None) -> int:
    """Return the number of the session of *group*."""
    found = dist.group.WORLD if group is None else group
    return id(found._group.session)


def counts() -> list[int]:
    """Return this process's descriptors, threads and children."""
    gc.collect()
    return [len(os.listdir("/proc/self/fd")), threading.active_count(), len(psutil.Process().children())]


def reuse() -> Any:
    """Groups of a default group share its session, which is that of `bpsfast.init`, and ends with the last group."""
    begin("bpsfast")
    session = session_of()
    pair = dist.new_group([0, 1], backend="bpsfast")
    others = dist.new_group([1, 2], backend="bpsfast")
    mine = [group for group, ranks in ((None, range(3)), (pair, (0, 1)), (others, (1, 2))) if RANK in ranks]
    shared = all(session_of(group) == session for group in mine)
    sums = [total(group) for group in mine]
    adopted = id(process.session()) == session
    dist.destroy_process_group()
    return [shared, adopted, sums, process.session() is None, len(worlds._worlds)]


def several() -> Any:
    """Sub-groups of a default group of another backend have separate sessions."""
    begin("gloo")
    found = []
    groups = {}
    for ranks in ((0, 1), (1, 2), (0, 2), (0, 1), (1,), (0, 1, 2)):
        group = dist.new_group(list(ranks), backend="bpsfast")
        if RANK in ranks:
            groups.setdefault(ranks, []).append(group)
            found.append(total(group))
    first, second = groups.get((0, 1), (None, None))
    again = first is None or session_of(first) == session_of(second)
    apart = len({session_of(group) for each in groups.values() for group in each})
    dist.destroy_process_group()
    return [found, again, apart, process.session() is None, len(worlds._worlds)]


def one_after_another() -> Any:
    """A process can join repeatedly, and has the same resources after each time."""
    seen = []
    for i in range(3):
        begin("bpsfast", f"default {i}")
        assert total() == 6.0
        dist.destroy_process_group()
        for child in psutil.Process().children():
            child.wait(20)
        seen.append(counts())
    return seen


def any_order() -> Any:
    """Ranks leave several sessions in different orders, some late."""
    begin("gloo")
    groups = [dist.new_group([0, 1, 2][i:i + 2], backend="bpsfast") for i in range(2)]
    mine = [group for i, group in enumerate(groups) if RANK in (i, i + 1)]
    sums = [total(group) for group in mine]
    if RANK == 1:
        mine.reverse()
    for group in mine:
        dist.destroy_process_group(group)
        assert len(worlds._worlds) == len(mine) - 1 - mine.index(group)
    dist.barrier()
    dist.destroy_process_group()
    return sums


def aborted() -> Any:
    """Rank 0 aborts a call that the others never make."""
    begin("bpsfast")
    total()
    spent_s, error = 0.0, ""
    if RANK == 0:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        group = dist.group.WORLD
        while group._group._lock.acquire(blocking=False):  # until the call has it, in another thread
            group._group._lock.release()
            os.sched_yield()
        began = time.monotonic()
        group.abort()
        try:
            work.wait()
        except dist.DistBackendError as exc:
            error = str(exc)
        spent_s = time.monotonic() - began
    dist.destroy_process_group()
    return [spent_s, error]


def forked() -> Any:
    """A child may not use the groups of its parent, and gets an error at once."""
    begin("bpsfast")
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # starts the thread of the group
    child = os.fork()
    if child == 0:
        code = 1
        try:
            dist.all_reduce(torch.ones(1), async_op=True)
        except dist.DistBackendError as exc:
            code = 7 if "is a fork of it" in str(exc) else 2
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = [code, total()]
    dist.destroy_process_group()
    return found


def left_under_way() -> Any:
    """The program ends while a call waits for ranks that never make it."""
    begin("bpsfast")
    total()
    if RANK == 0:
        dist.all_reduce(torch.ones(5), async_op=True)
    return RANK


def nobody_else() -> Any:
    """Rank 0 makes a group that the others do not."""
    begin("gloo")
    found = ["", ""]
    if RANK == 0:
        try:
            worlds.enter(dist.FileStore(f"{FOLDER}/alone", SIZE), 0, SIZE, [0, 1, 2], 1.0)
        except BpsError as exc:
            found = [type(exc).__name__, str(exc)]
        assert worlds._worlds == []
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[4]]()), flush=True)
