"""Measures the speed of the sum kernels and of the checksum, on one thread, per dtype, against C, NumPy and torch.

*cold*: operands come from DRAM. Calls use the partitions of a pool several times as large as the last-level cache, one
after another. *warm*: calls use one set of buffers. Contestants take turns in random order, so that other load affects
all of them, in ten pools one after another, because the placement of a pool's pages changes times by a few percent.
Untimed calls of the same contestant precede a timed call: plain stores stay in the caches and reach memory during later
calls, so each contestant pays for its own stores. Figures are medians over all pools, the spread is the quartiles,
ratios are of medians.
"""

from __future__ import annotations

import ctypes
import json
import math
import random
import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bpsfast import kernels
from bpsfast.base import dtypes, output
from bpsfast.bench.harness import machine_info, native
from bpsfast.bench.harness.cold_memory import PARTITION_NBYTES, Pool, cold_nbytes, last_level_nbytes
from bpsfast.pyx.tcp import crc32c

Array = np.ndarray[Any, Any]
Operation = Callable[[list[Array]], object]

_N_POOLS = 10
_TURNS = {"cold": 30, "warm": 20}  # in each pool
_QUICK_N_POOLS = 2
_QUICK_TURNS = {"cold": 8, "warm": 15}
_QUICK_DTYPES = ("float32", "float16", "bfloat16")
_LAST_LEVEL_SHARE = 1.5  # bytes of the untimed calls before a cold one, in sizes of the last-level cache


@dataclass
class Row:
    """Results of one contestant in one case; seconds per call."""

    case: str
    dtype: str
    temperature: str
    contestant: str
    nbytes: int
    samples_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Measure everything (with option quick: fewer dtypes and samples), print a table, and return the document.

    It has the raw samples, and is written to option json_path as one JSON document.
    """
    quick = bool(options.get("quick"))
    turns, n_pools = (_QUICK_TURNS, _QUICK_N_POOLS) if quick else (_TURNS, _N_POOLS)
    torch, n_threads = _import_torch()
    reference, c_compiler = native.build_sum4()
    print(f"C reference: {c_compiler}")
    names = _QUICK_DTYPES if quick else dtypes.NAMES
    kernels.warm(names)
    nbytes = cold_nbytes(quick)
    rows: list[Row] = []
    try:
        rows += _measure("4-way sum", "float32", 5, _fused_contestants(torch, reference), nbytes, n_pools, turns)
        for name in names:
            rows += _measure("2-way add in place", name, 2, _add_contestants(name, torch), nbytes, n_pools, turns)
        rows += _measure("checksum", "float32", 1, _checksum_contestants(), nbytes, n_pools, turns)
    finally:
        if torch is not None:
            torch.set_num_threads(n_threads)
    print(_table(rows))
    result = {
        "bench": "kernels", "machine": machine_info.describe(), "c_compiler": c_compiler, "pool_nbytes": nbytes,
        "n_pools": n_pools, "partition_nbytes": PARTITION_NBYTES, "quick": quick,
        "rows": [{**asdict(row), "median_s": row.median_s, "ratio_to_bpsfast": _ratio(row, rows)} for row in rows],
    }
    if options.get("json_path") is not None:
        Path(options["json_path"]).write_text(json.dumps(result, indent=1) + "\n")
    return result


def _measure(case: str, name: str, n_arrays: int, contestants: dict[str, Operation], pool_nbytes: int, n_pools: int,
             turns: dict[str, int]) -> list[Row]:
    """Time *contestants*, cold and warm, in each of *n_pools* pools."""
    rows = {(temperature, contestant): Row(case, name, temperature, contestant, PARTITION_NBYTES)
            for temperature in turns for contestant in contestants}
    for _ in range(n_pools):
        pool = Pool(pool_nbytes)
        pool.fill(name)
        for temperature, n_turns in turns.items():
            order = [(rows[temperature, contestant], call) for contestant, call in contestants.items()]
            _take_turns(order, n_arrays, pool, n_turns)
    return list(rows.values())


def _take_turns(order: list[tuple[Row, Operation]], n_arrays: int, pool: Pool, n_turns: int) -> None:
    name, temperature = order[0][0].dtype, order[0][0].temperature
    n_untimed = 1 if temperature == "warm" else _n_calls_to_flush(n_arrays)
    for turn in range(-1, n_turns):  # turn -1 warms up code and page tables
        random.shuffle(order)
        for row, operation in order:
            for _ in range(n_untimed):
                operation(pool.take(n_arrays, name, temperature))
            arrays = pool.take(n_arrays, name, temperature)
            start = time.perf_counter()
            operation(arrays)
            elapsed_s = time.perf_counter() - start
            if turn >= 0:
                row.samples_s.append(elapsed_s)


def _n_calls_to_flush(n_arrays: int) -> int:
    """Return the number of calls that evict the previous contestant's data from the caches."""
    return max(1, math.ceil(_LAST_LEVEL_SHARE * last_level_nbytes() / (n_arrays * PARTITION_NBYTES)))


def _fused_contestants(torch: Any, reference: Callable[..., None] | None) -> dict[str, Operation]:
    """Return functions that compute d = a + b + c + e in float32."""
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 6)(
        kernels.address("float32"))  # like the engine; the C reference is called in the same way

    def fused(divisor: int, nontemporal: int, layout: tuple[int, int, int] = (4, 0, 0)) -> Operation:
        def call(v: list[Array]) -> None:
            inputs = (ctypes.c_void_p * 4)(*[array.ctypes.data for array in v[1:]])
            kernel(v[0].ctypes.data, ctypes.addressof(inputs), *layout, v[0].size, divisor, nontemporal)

        return call

    contestants = {
        "bpsfast nontemporal": fused(1, 1),  # the same sum as all others: ((a + b) + c) + e
        "bpsfast two-level": fused(1, 1, (1, 2, 1)),  # inputs of a rank, two of this machine, one more
        "bpsfast plain": fused(1, 0),
        "bpsfast average": fused(4, 1),
    }
    if reference is not None:
        contestants["C nontemporal"] = lambda v: reference(*[array.ctypes.data for array in v], v[0].size)

    def numpy_passes(v: list[Array]) -> None:
        np.copyto(v[0], v[1])
        for source in v[2:]:
            np.add(v[0], source, out=v[0])

    contestants["numpy copy + 3 add"] = numpy_passes
    if torch is not None:

        def torch_passes(v: list[Array]) -> None:
            tensors = [torch.from_numpy(array) for array in v]
            tensors[0].copy_(tensors[1])
            for source in tensors[2:]:
                tensors[0].add_(source)

        contestants["torch copy + 3 add_"] = torch_passes
    return contestants


def _add_contestants(name: str, torch: Any) -> dict[str, Operation]:
    """Return functions that compute a += b."""
    contestants: dict[str, Operation] = {"bpsfast": lambda v: kernels.add_into(v[0], v[1])}
    if name not in ("float16", "bfloat16"):  # NumPy adds halves one by one, 40 times slower
        contestants["numpy"] = lambda v: np.add(v[0], v[1], out=v[0])
    if torch is not None:
        dtype = getattr(torch, name)

        def torch_add(v: list[Array]) -> None:
            dst, src = (torch.from_numpy(array.view(np.uint8)).view(dtype) for array in v)
            dst.add_(src)

        contestants["torch"] = torch_add
    return contestants


def _checksum_contestants() -> dict[str, Operation]:
    """Return functions that compute a checksum of a, as each end of a connection does with setting checksum."""
    return {
        "bpsfast CRC32C": lambda v: crc32c(v[0].view(np.uint8).data),
        "bpsfast CRC32C by tables": lambda v: crc32c(v[0].view(np.uint8).data, by_tables=True),
        "zlib CRC32": lambda v: zlib.crc32(v[0].view(np.uint8).data),
    }


def _import_torch() -> tuple[Any, int]:
    """Return torch on one thread and the thread count to restore; (None, 0) without torch."""
    try:
        import torch
    except ImportError:
        print("torch is not installed: its columns are left out")
        return None, 0
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return torch, n_threads


def _ratio(row: Row, rows: list[Row]) -> float:
    """Return this row's median divided by that of the first contestant (ours) of its case."""
    ours = next(r for r in rows if (r.case, r.dtype, r.temperature) == (row.case, row.dtype, row.temperature))
    return row.median_s / ours.median_s


def _table(rows: list[Row]) -> str:
    lines = [("case", "dtype", "", "contestant", "median us", "q25", "q75", "GB/s", "time / ours")]
    for row in rows:
        low, _, high = statistics.quantiles(row.samples_s, n=4)
        lines.append((row.case, row.dtype, row.temperature, row.contestant, f"{row.median_s * 1e6:.0f}",
                      f"{low * 1e6:.0f}", f"{high * 1e6:.0f}", f"{row.nbytes / row.median_s / 1e9:.2f}",
                      f"{_ratio(row, rows):.2f}"))
    return output.columns(lines, right=range(4, len(lines[0])))
