"""For `bench device` without a GPU: the host device (`bpsfast.gpu.host`), with a thread as stream and NumPy kernels."""
from __future__ import annotations

import mmap
import time
import weakref
from typing import Any

import numpy as np

import bpsfast
from bpsfast.bench.device.hardware import Floats, Moment, Pinned
from bpsfast.gpu.host import HostArray, host_device

_SIDE = 256  # of the matrices


class HostMoment:
    """A `Moment` of the host device's thread."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def reach(self) -> None:
        """Look at the clock."""
        self.at_s = time.perf_counter()

    def since(self, earlier: Moment) -> float:
        assert isinstance(earlier, HostMoment), "of the same device"
        return self.at_s - earlier.at_s


class HostHardware:
    """A `Hardware` that is the host device."""

    def __init__(self) -> None:
        self.name = "host"
        self.device = host_device()
        self._stream = self.device.stream()
        draw = np.random.default_rng(0)
        self._factors = [draw.random((_SIDE, _SIDE), np.float32) for _ in range(2)]
        self._product = np.empty((_SIDE, _SIDE), np.float32)

    def array(self, n: int) -> HostArray:
        array = np.zeros(n, np.float32).view(HostArray)
        array.stream = self._stream
        return array

    def address(self, array: HostArray) -> int:
        return int(array.ctypes.data)

    def write(self, array: HostArray, values: Floats) -> None:
        self._stream.run(lambda: np.copyto(array, values))
        self.idle()

    def read(self, array: HostArray) -> Floats:
        self.idle()
        return np.array(array, subok=False)

    def set(self, array: HostArray, value: float) -> None:
        self._stream.run(lambda: array.fill(value))

    def compute(self, n: int) -> None:
        a, b = self._factors
        for _ in range(n):
            self._stream.run(lambda: np.matmul(a, b, out=self._product))

    def moment(self) -> HostMoment:
        moment = HostMoment()
        self._stream.run(moment.reach)
        return moment

    def begin(self, array: HostArray, name: str, average: bool) -> Any:
        return bpsfast.push_pull_async(array, average=average, name=name, out=array)

    def idle(self) -> None:
        self._stream.record().wait()

    def pinned(self, nbytes: int) -> Pinned:
        memory = np.ones(nbytes + mmap.PAGESIZE, np.uint8)
        address = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        self.device.pin(address, nbytes, writable=True)
        weakref.finalize(memory, self.device.unpin, address)
        return Pinned(address, nbytes, memory)

    def allocated_nbytes(self) -> int | None:
        return None

    def facts(self) -> dict[str, Any]:
        return {"device": "the machine itself: threads for streams, memory of the host for the device's"}
