"""One rank of `bench frameworks`: times all rows in turns. Rank 0 writes the results."""
from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import bpsfast

#: Module of the rows -> package that must be installed.
FRAMEWORKS = {"numpy_rows": "numpy", "jax_rows": "jax", "tensorflow_rows": "tensorflow"}
#: Workload -> number of tensors, elements of each, runs in a turn.
WORKLOADS = {"64 MB": (1, 16 << 20, 3), "161 small tensors": (161, 256, 10)}


def rows(arrays: list[np.ndarray[Any, Any]]) -> dict[str, Callable[[], list[Any]]]:
    """Return the functions that sum *arrays* by name of the row, for the frameworks that are installed."""
    found: dict[str, Callable[[list[np.ndarray[Any, Any]]], Callable[[], list[Any]]]] = {}
    for module, needed in FRAMEWORKS.items():
        if lacking(needed) is None:
            found |= import_module(f"bpsfast.bench.frameworks.{module}").ROWS
    return {name: make(arrays) for name, make in found.items()}


def lacking(framework: str) -> str | None:
    """Return in one line why *framework* cannot be imported, or None if it can."""
    try:
        import_module(framework)
    except ImportError as exc:
        return " ".join(str(exc).split()) or type(exc).__name__
    return None


def measure(workload: str, n_rounds: int) -> list[dict[str, Any]]:
    """Return a record for each row of *workload*."""
    n_tensors, n_elements, n_runs = WORKLOADS[workload]
    arrays = [np.full(n_elements, i + bpsfast.rank(), np.float32) for i in range(n_tensors)]
    run_of = rows(arrays)
    mean = (bpsfast.size() - 1) / 2
    samples: dict[str, list[float]] = {name: [] for name in run_of}
    for name, run in run_of.items():
        for _ in range(2):
            wrong = [i for i, result in enumerate(run()) if not np.all(np.asarray(result) == i + mean)]
            assert not wrong, f"{name} sums tensors {wrong} wrong"
    for _ in range(n_rounds):
        for name, run in run_of.items():
            for _ in range(n_runs):
                bpsfast.barrier()
                begin = time.perf_counter()
                run()
                samples[name].append(time.perf_counter() - begin)
    return [{"workload": workload, "row": name, "n_ranks": bpsfast.size(), "median_s": statistics.median(taken),
             "best_s": min(taken), "samples_s": taken} for name, taken in samples.items()]


def main(path: str, n_rounds: int) -> None:
    """Measure all rows; rank 0 writes the records to *path*."""
    bpsfast.init()
    for needed in FRAMEWORKS.values():
        reason = lacking(needed)
        if reason is not None and bpsfast.rank() == 0:
            print(f"no rows of {needed}: {reason}", flush=True)
    records = [record for workload in WORKLOADS for record in measure(workload, n_rounds)]
    if bpsfast.rank() == 0:
        Path(path).write_text(json.dumps(records))
    bpsfast.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
