"""The bits of a sum depend on the grouping of ranks into nodes and on nothing else (design, "The association").

Whole jobs: the same inputs, special values included, through every transport, with and without helpers, with
partitions of one page and of the whole tensor, in a different order of pushes on every rank. The oracle is the
NumPy reference; the kernels' own properties are in `test_kernels`.
"""
from __future__ import annotations

import itertools

import numpy as np
import pytest

import bpsfast
from bpsfast.base.dtypes import NAMES, TABLE
from bpsfast.base.reference_sum import reduce

pytestmark = pytest.mark.matrix

N_ELEMENTS = 9001  # several partitions of one page for every dtype, the last one short


def contribution(name: str, rank: int) -> np.ndarray:
    """What *rank* contributes: random values, and every kind of special value at its own place."""
    rng = np.random.default_rng([NAMES.index(name), rank])
    row = TABLE[name]
    if not row.is_float:
        info = np.iinfo(row.numpy)
        return rng.integers(info.min, info.max, N_ELEMENTS, row.numpy, endpoint=True)  # sums overflow
    values = rng.standard_normal(N_ELEMENTS) * 10.0 ** rng.integers(-3, 4, N_ELEMENTS)
    tiny = 2.0 ** {"float64": -1070, "float32": -145, "bfloat16": -130, "float16": -20}[name]
    values[0:50] = -0.0
    values[50:100] = np.inf if rank % 2 else -np.inf
    values[100:150] = np.inf
    values[150 + rank] = np.nan
    values[200:400] = tiny * rng.integers(-9, 10, 200)
    values[400:500] = [60000.0, 3e38, 1e308][["float16", "float32", "float64"].index(name)] if name in (
        "float16", "float32", "float64") else 3e38
    with np.errstate(over="ignore"):
        return values.astype(row.numpy)


def sums(average: bool) -> dict[str, bytes]:
    """Push every dtype twice, in an order of this rank's own, half of them from the segment."""
    order = np.random.default_rng(bpsfast.rank()).permutation(len(NAMES))
    handles = {}
    for index in order:
        name = NAMES[index]
        x = contribution(name, bpsfast.rank())
        if (index + bpsfast.rank()) % 2:
            inside = bpsfast.empty(x.shape, x.dtype)
            inside[...] = x
            x = inside
        handles[name] = bpsfast.push_pull_async(x, average=average, name=f"{name} {average}")
    return {name: np.asarray(bpsfast.synchronize(handles[name])).tobytes() for name in NAMES}


CASES = [
    # ranks by node, helpers, transport, partition bytes
    ((3,), 0, "auto", 4096), ((3,), 0, "auto", 4096000),
    ((2, 1), 0, "tcp", 4096), ((2, 1), 1, "tcp", 8192), ((2, 1), 0, "shm", 4096), ((2, 1), 1, "shm", 4096000),
    ((1, 2), 1, "tcp", 4096000), ((1, 2), 2, "shm", 4096),
    ((1, 3, 1), 0, "tcp", 4096), ((1, 3, 1), 1, "shm", 4096), ((1, 3, 1), 2, "tcp", 12288),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(("ranks", "helpers", "transport", "partition_nbytes"), CASES)
def test_bits_depend_on_the_grouping_alone(job, ranks, helpers, transport, partition_nbytes):
    started = job(ranks=ranks, helpers=helpers, transport=transport, partition_bytes=partition_nbytes)
    numbers = itertools.count()
    groups = [[next(numbers) for _ in range(n)] for n in ranks]
    for average in (True, False):
        results = started.run(sums, average)
        for name in NAMES:
            terms = [[contribution(name, rank) for rank in group] for group in groups]
            expected = reduce(terms, average=average).tobytes()
            for rank, found in enumerate(results):
                assert found[name] == expected, f"{name} on rank {rank}, average={average}"
