"""One rank of ``bpsfast bench rows``: pushes rows of a table, and a dense array; prints times and bytes.

Bytes are the kernel's counts on all interfaces except loopback, including headers and control messages; without shaped
links they are those on the loopback interface.
"""
from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import bpsfast
from bpsfast.bench.harness import job_output


def main() -> None:
    """Push with the parameters in the environment (set by `bench.rows.run`) and print one line of JSON."""
    n_rows, dim = int(os.environ["TABLE_ROWS"]), int(os.environ["ROW_ELEMENTS"])
    n_pushed, n_steps, dense_nbytes = (int(os.environ[name]) for name in ("PUSHED_ROWS", "STEPS", "DENSE_NBYTES"))
    bpsfast.init()
    job_output.tell(bpsfast.rank(), found=[_rows(n_rows, dim, n_pushed, n_steps), _dense(dense_nbytes, n_steps)])
    bpsfast.shutdown()


def _rows(n_rows: int, dim: int, n_pushed: int, n_steps: int) -> dict[str, Any]:
    """Push different rows in each step; the first step, which allocates memory, does not count."""
    size = bpsfast.size()
    samples_s, sent, n_wrong, n_pulled = [], [], 0, 0
    for step in range(-1, n_steps):
        drawn = [_drawn(n_rows, n_pushed, step, rank) for rank in range(size)]
        indices = drawn[bpsfast.rank()]
        values = np.broadcast_to(indices.astype(np.float32)[:, None] % 97 + 1, (n_pushed, dim)).copy()
        took_s, nbytes, (found, sums) = _timed(lambda indices=indices, values=values: bpsfast.push_pull_rows(
            indices, values, n_rows, name="table", average=False))
        wanted, counts = np.unique(np.concatenate(drawn), return_counts=True)
        expected = (wanted % 97 + 1) * counts
        n_wrong += int(not np.array_equal(found, wanted)) or int((sums != expected[:, None]).any(axis=1).sum())
        if step >= 0:
            samples_s.append(took_s)
            sent.append(nbytes)
            n_pulled = len(found)
    memory = {name: value for name, value in bpsfast.counters().items() if name.startswith("memory_")}
    return {"name": "rows", "nbytes": 4 * n_rows * dim, "samples_s": samples_s, "sent_nbytes": sent, "n_wrong": n_wrong,
            "n_pushed": n_pushed, "n_pulled": n_pulled, "memory_nbytes": memory}


def _dense(nbytes: int, n_steps: int) -> dict[str, Any]:
    x = bpsfast.empty(nbytes // 4)
    x[:] = 1
    samples_s, sent, n_wrong = [], [], 0
    for step in range(-1, n_steps):
        took_s, moved, total = _timed(lambda: bpsfast.push_pull(x, average=False, name="dense"))
        n_wrong += int((total != bpsfast.size()).sum())
        if step >= 0:
            samples_s.append(took_s)
            sent.append(moved)
    return {"name": "dense", "nbytes": x.nbytes, "samples_s": samples_s, "sent_nbytes": sent, "n_wrong": n_wrong}


def _timed(operation: Any) -> tuple[float, int, Any]:
    """Return the seconds, the bytes sent and the result of an operation that all ranks begin together."""
    bpsfast.barrier()
    before = _sent_nbytes()
    bpsfast.barrier()  # on loopback no rank sends before all have read the counters
    began = time.perf_counter()
    result = operation()
    took_s = time.perf_counter() - began
    bpsfast.barrier()  # all ranks have also sent what others wait for
    return took_s, _sent_nbytes() - before, result


def _drawn(n_rows: int, n_pushed: int, step: int, rank: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([step + 1, rank]).choice(n_rows, n_pushed, replace=False)


def _sent_nbytes() -> int:
    """Return the bytes that the interfaces of this network namespace sent, counted by the kernel."""
    sent = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        sent[name.strip()] = int(counters.split()[8])
    links = [nbytes for name, nbytes in sent.items() if name != "lo"]
    return sum(links) if os.environ["ON_LINKS"] == "1" else sent["lo"]


if __name__ == "__main__":
    main()
