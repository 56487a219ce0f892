"""Training that compares every sum with NumPy, for jobs that lose a process meanwhile."""
from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path

import numpy as np

import bpsfast

#: Bytes of each gradient: some have one partition, some many, so that every owner has parts of most of them.
SIZES = (1000, 40_000, 700_000, 17 * 4, 200_000, 250_000)


@functools.cache
def base(rank: int, gradient: int) -> np.ndarray:
    return np.random.default_rng((rank, gradient)).standard_normal(SIZES[gradient] // 4, dtype=np.float32)


def pushed(rank: int, step: int, gradient: int) -> np.ndarray:
    """Return the gradient of *rank*: float32, whose sum depends on the order of additions, different in every step."""
    return base(rank, gradient) * np.float32(1 + step / 7)


def expected(machines: tuple[tuple[int, ...], ...], step: int, gradient: int) -> np.ndarray:
    """Return the sum over machines of the sums over their ranks; the bits depend only on this grouping."""
    partials = [functools.reduce(np.add, (pushed(rank, step, gradient) for rank in ranks)) for ranks in machines]
    return functools.reduce(np.add, partials)


def train(machines: tuple[tuple[int, ...], ...], begin: int, end: int, path: str = "") -> list[str]:
    """Push all gradients in each of the steps *begin* to *end*; return the sums that are wrong.

    *path*: a file to which rank 0 writes the step that it has begun.
    """
    rank, wrong = bpsfast.rank(), []
    for step in range(begin, end):
        if path:
            say_step(path, step)
        handles = [bpsfast.push_pull_async(pushed(rank, step, i), name=f"g{i}", average=False)
                   for i in range(len(SIZES))]
        for i, handle in enumerate(handles):
            found, right = bpsfast.synchronize(handle), expected(machines, step, i)
            if found.tobytes() != right.tobytes():
                wrong.append(f"step {step}, gradient {i}: {np.count_nonzero(found != right)} of {len(right)} elements")
    return wrong


def train_without_lost(machines: tuple[tuple[int, ...], ...], begin: int, end: int, path: str = "",
                       dies_at: tuple[int, int] = (-1, -1)) -> tuple[list[str], list[tuple[int, ...]], bytes]:
    """Train as `train`, with averages, in a job that goes on without lost ranks.

    Returns the averages that are not those of the ranks that bpsfast names, these ranks for each gradient of each step,
    and the sum of all averages. *dies_at*: a rank, and the step in which that ends itself after its first push.
    """
    rank, wrong, named, total = bpsfast.rank(), [], [], np.zeros(sum(SIZES) // 4, np.float32)
    for step in range(begin, end):
        if path:
            say_step(path, step)
        handles = []
        for i in range(len(SIZES)):
            handles.append(bpsfast.push_pull_async(pushed(rank, step, i), name=f"m{i}"))
            if dies_at == (rank, step):
                os.kill(os.getpid(), signal.SIGKILL)
        found = []
        for i, handle in enumerate(handles):
            found.append(bpsfast.synchronize(handle))
            named.append(bpsfast.contributors(f"m{i}"))
            left = [tuple(each for each in ranks if each in named[-1]) for ranks in machines]
            right = expected(tuple(ranks for ranks in left if ranks), step, i) / np.float32(len(named[-1]))
            if found[-1].tobytes() != right.tobytes():
                wrong.append(f"step {step}, gradient {i}: {np.count_nonzero(found[-1] != right)} of {len(right)} "
                             f"elements are not the average of ranks {named[-1]}")
        total += np.concatenate(found)
    return wrong, named, total.tobytes()


def say_step(path: str, step: int) -> None:
    """On rank 0, write *step* to *path*."""
    if bpsfast.rank() == 0:
        Path(path + ".new").write_text(str(step))
        os.replace(path + ".new", path)


def until_step(path: Path, step: int, timeout_s: float = 40.0) -> None:
    """Wait until rank 0 has begun *step*."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() or int(path.read_text()) < step:
        assert time.monotonic() < deadline, f"step {step} was not begun within {timeout_s:g} s"
        time.sleep(0.002)


def counts() -> tuple[int, int]:
    """Return how often this rank's node has recovered from a loss, and how many results it has lent to others."""
    counters = bpsfast.stats().counters
    return counters["recoveries"], counters["dispatch_lent"]


def changes() -> tuple[int, int]:
    """Return how often this rank's node has recovered from a loss, and how many late nodes it has admitted."""
    counters = bpsfast.stats().counters
    return counters["recoveries"], counters["joined"]


def joined() -> int:
    """Return how many late nodes this rank's node has admitted."""
    return changes()[1]


def received(nodes: list[int]) -> list[int]:
    """Return how many bytes this rank's node has received from each of *nodes* over the network."""
    counters = bpsfast.stats().counters
    return [counters.get(f"wire_{node}_bytes_received", 0) for node in nodes]
