"""Memory of the host device for tests: host memory is pinned, streams are closed, and can be held."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from bpsfast.gpu.copies import CopyThread, DeviceRange, PartitionCopy, partition_copies
from bpsfast.gpu.host import HostDevice, HostStream
from bpsfast.orchestration.errors import ClosedError

#: Longest wait of a test.
LIMIT_S = 20.0


def deadline() -> float:
    """Return the deadline of a wait that begins now."""
    return time.monotonic() + LIMIT_S


class Held:
    """A stream of *device* that is blocked until `go`."""

    def __init__(self, device: HostDevice) -> None:
        self._gate = threading.Event()
        self.stream: HostStream = device.stream()
        self.stream.run(lambda: self._gate.wait(LIMIT_S))

    def go(self) -> None:
        """Let the stream continue."""
        self._gate.set()


@contextmanager
def held(device: HostDevice) -> Iterator[Held]:
    """Yield a blocked stream; continue and close it at the end."""
    it = Held(device)
    try:
        yield it
    finally:
        it.go()
        it.stream.close()


L = TypeVar("L", bound=CopyThread[Any])


def copier_of(copier: L) -> Iterator[L]:
    """Yield *copier*, and close it."""
    yield copier
    copier.close(lambda: ClosedError("closed"))
    assert copier.join(LIMIT_S)


class Memory:
    """*nbytes* on each side of *device*, with different contents."""

    def __init__(self, device: HostDevice, nbytes: int) -> None:
        self.on_device = np.random.default_rng(0).integers(1, 256, nbytes, np.uint8)
        self.host = np.zeros(nbytes, np.uint8)
        self.device = device
        device.pin(self.host.ctypes.data, nbytes, True)

    def pieces(self, stride: int) -> list[PartitionCopy]:
        """Return the partitions of all of it."""
        nbytes = self.on_device.nbytes
        return partition_copies(nbytes, stride, [DeviceRange(0, self.on_device.ctypes.data, nbytes)])


class Slow(HostStream):
    """A stream whose copies each wait for `go`; `order` has them in the order in which they were enqueued."""

    def __init__(self, device: HostDevice) -> None:
        super().__init__(device)
        self.order: list[int] = []
        self._gate = threading.Semaphore(0)

    def go(self, n: int) -> None:
        """Let *n* copies happen."""
        self._gate.release(n)

    def copy(self, destination: int, source: int, nbytes: int, to_host: bool) -> None:
        """As `HostStream.copy`."""
        self.order.append(source)
        self.run(lambda: self._gate.acquire(timeout=LIMIT_S))
        super().copy(destination, source, nbytes, to_host)


class SlowDevice(HostDevice):
    """A host device whose streams are `Slow`."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Slow] = []

    def stream(self) -> Slow:
        """As `HostDevice.stream`."""
        self.streams.append(Slow(self))
        return self.streams[-1]


def eventually(happens: Callable[[], object]) -> None:
    """Wait until *happens* is true, for effects of a thread without a notification."""
    end, moment = deadline(), threading.Event()
    while not happens():
        assert time.monotonic() < end, "it does not happen"
        moment.wait(0.001)
