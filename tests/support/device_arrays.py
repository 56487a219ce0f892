"""Arrays on streams of the host device, for functions that ranks run."""
from __future__ import annotations

from typing import Any

import numpy as np

import bpsfast
from bpsfast.base.dtypes import TABLE
from bpsfast.gpu.host import HostArray, host_device
from tests.support.device_memory import LIMIT_S


def values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Return numbers of this rank whose sum depends on the order of additions."""
    rng = np.random.default_rng([seed, bpsfast.rank()])
    numpy_dtype = TABLE[dtype].numpy
    if np.dtype(numpy_dtype).kind in "iu":
        return np.asarray(rng.integers(0, 200, shape)).astype(numpy_dtype)
    return np.asarray(rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, shape))).astype(numpy_dtype)


class Stream:
    """A stream of the host device for arrays, closed at the end of a ``with``."""

    def __enter__(self) -> Stream:
        self._stream = host_device().stream()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.record().wait(LIMIT_S)
        self._stream.close()

    def on_device(self, x: Any) -> Any:
        """Return a copy of *x* that the stream makes."""
        made = np.zeros_like(x).view(HostArray)
        made.stream = self._stream
        self._stream.run(lambda: np.copyto(made, x))
        return made

    def on_host(self, x: Any) -> Any:
        """Return what the stream finds in *x*."""
        found: list[Any] = []
        self._stream.run(lambda: found.append(np.array(x)))
        self._stream.record().wait(LIMIT_S)
        return found[0]

    def check(self, x: Any, value: float, wrong: list[Any]) -> None:
        """Enqueue a check that all elements of *x* are *value*, which adds others to *wrong*; does not wait."""
        self._stream.run(lambda: (x == value).all() or wrong.append(("late", value, x.flat[0])))


def same(a: Any, b: Any) -> bool:
    """Return whether both have the same bits."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
