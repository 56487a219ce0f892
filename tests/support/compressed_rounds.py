"""The results of a job of several nodes for compressed tensors, from the reference codec in NumPy."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bpsfast.base import reference_sum
from bpsfast.base.dtypes import TABLE
from bpsfast.kernels.codecs.codec_reference import ReferenceJob
from bpsfast.orchestration.codec import CodecSpec

Array = np.ndarray[Any, Any]


def values(seed: int, rank: int, step: int, shape: Sequence[int], dtype: str) -> Array:
    """Return the reproducible gradient of *rank* in *step*, with different magnitudes and both signs."""
    drawn = np.random.default_rng([seed, rank, step]).normal(size=shape)
    return drawn.astype(TABLE[dtype].numpy)


class Replay:
    """One tensor of *n* elements with partitions of *stride* bytes, summed over nodes with *ranks* ranks each."""

    def __init__(self, codec: CodecSpec, n: int, dtype: str, stride: int, ranks: Sequence[int]) -> None:
        each = stride // TABLE[dtype].itemsize
        self._bounds = [(begin, min(begin + each, n)) for begin in range(0, n, each)]
        self._jobs = [ReferenceJob(codec, end - begin, dtype, len(ranks)) for begin, end in self._bounds]
        self._ranks = ranks

    def round(self, inputs: Sequence[Array], average: bool = True, ratio: float = 1.0) -> Array:
        """Return the result for all ranks' *inputs*; *ratio*: the last learning rate divided by the present one."""
        partials, first = [], 0
        for n_ranks in self._ranks:
            mine = [inputs[rank].reshape(-1) for rank in range(first, first + n_ranks)]
            partials.append(reference_sum.reduce([mine], average=False))
            first += n_ranks
        pieces = [job.round([partial[begin:end] for partial in partials], sum(self._ranks) if average else 1, ratio)
                  for job, (begin, end) in zip(self._jobs, self._bounds, strict=True)]
        return np.concatenate(pieces)
