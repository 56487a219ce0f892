"""Memory of a device that several processes have open: of one GPU by CUDA IPC, of the host device by a memfd.

The window is a buffer of our own: what frameworks allocate may be of a kind that cannot be exported (expandable
segments). Order between processes is by events that were exported, too. A wait means what had been recorded when it was
called, so callers let the processes meet between the two.
"""
from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from ..base.dtypes import TABLE
from ..base.reference_sum import reduce
from ..collectives.group import all_gather_bytes
from ..orchestration.errors import DeviceError, StallError
from ..pyx.port import copy
from .cuda import CudaDevice, CudaStream, cupy
from .device import Stream
from .host import HostStream
from .sum_kernels import sum_kernel

if TYPE_CHECKING:
    from ..collectives.group import Group

_ON_DEVICE = 3  # cudaMemcpyDeviceToDevice
_TO_DEVICE = 1
_THREADS, _BLOCKS = 256, 1024
_PATIENCE_S = 0.2


class Windows(Protocol):
    """The members' windows, open in this process. One thread; all but the ends only enqueue where the device can."""

    #: Of all members, in their order, in this process.
    addresses: list[int]

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """Copy within the device."""

    def sum(self, stream: Stream, target: int, own: int, offset: int, nbytes: int, dtype: str) -> None:
        """Add up what lies at *offset* of all windows, in the order of the members; the own piece lies at *own*."""

    def record(self, stream: Stream, number: int) -> None:
        """Let event *number* of this member be after everything enqueued so far."""

    def wait(self, stream: Stream, number: int) -> None:
        """Let what is enqueued from now on begin after the last record of event *number* of each other member."""

    def close(self) -> None:
        """Let go of the windows, with nothing of this process on its way there. Others may close before or after."""


class HostWindows:
    """Windows in memory of the machine. A record waits until it is reached, so that a meeting is all that orders."""

    def __init__(self, group: Group, nbytes: int, is_closed: Callable[[], bool]) -> None:
        self._group, self._is_closed = group, is_closed
        self._maps: list[mmap.mmap] = []
        fd = os.memfd_create("bpsfast-window", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            for path in all_gather_bytes(group, f"/proc/{os.getpid()}/fd/{fd}".encode()):
                try:
                    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                except OSError as exc:
                    raise DeviceError(f"a rank of the island {group.ranks} has its window at {path.decode()}, which "
                                      f"cannot be opened ({exc}): do both run in one container, as one user?") from exc
                try:
                    self._maps.append(mmap.mmap(opened, nbytes))
                finally:
                    os.close(opened)
            group.barrier()  # the descriptor is needed no more
        finally:
            os.close(fd)
        self.addresses = [np.frombuffer(each, np.uint8).ctypes.data for each in self._maps]

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """See `Windows`."""
        assert isinstance(stream, HostStream), "a host device's own stream"
        stream.run(partial(self._copy, target, source, nbytes))

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        copy(target, source, nbytes)  # as a method: what is enqueued keeps the windows mapped

    def sum(self, stream: Stream, target: int, own: int, offset: int, nbytes: int, dtype: str) -> None:
        """See `Windows`."""
        assert isinstance(stream, HostStream), "a host device's own stream"

        def work() -> None:
            pieces = [own if place == self._group.rank else address + offset
                      for place, address in enumerate(self.addresses)]
            total = reduce([[_array(piece, nbytes, dtype) for piece in pieces]], False)
            copy(target, total.ctypes.data, nbytes)

        stream.run(work)

    def record(self, stream: Stream, number: int) -> None:
        """See `Windows`."""
        deadline = time.monotonic() + self._group.timeout_s
        event = stream.record()
        while not event.wait(_PATIENCE_S):
            if self._is_closed() or time.monotonic() > deadline:
                raise StallError(f"rank {self._group.session.rank} has waited {self._group.timeout_s:g} s for what its "
                                 "stream does before it sums with its island, or was closed meanwhile")

    def wait(self, stream: Stream, number: int) -> None:
        """See `Windows`."""

    def close(self) -> None:
        """See `Windows`."""
        self.addresses = []
        for each in self._maps:
            with suppress(BufferError):  # of a stream that still works there
                each.close()


def _array(address: int, nbytes: int, dtype: str) -> np.ndarray[Any, Any]:
    view = {"data": (address, True), "shape": (nbytes,), "typestr": "|u1", "version": 3}
    holder = type("Memory", (), {"__array_interface__": view})()
    return np.asarray(holder).view(TABLE[dtype].numpy)


class _Exported(msgspec.Struct, frozen=True):
    """What a member says of its window and its events."""

    window: bytes = b""
    events: tuple[bytes, ...] = ()
    error: str = ""


class _Own(msgspec.Struct):
    """A window of this process, and its events, which CUDA wants to be freed after all others have closed them."""

    address: int
    events: list[Any]


#: Kept for the next island, as nobody can know when those who may be dead have closed them. By (device, bytes, events).
_kept: dict[tuple[int, int, int], list[_Own]] = {}


class CudaWindows:
    """Windows on one GPU."""

    def __init__(self, device: CudaDevice, group: Group, nbytes: int, n_events: int) -> None:
        self._device, self._group = device, group
        self._key = device.number, nbytes, n_events
        self._opened: dict[int, int] = {}
        self._events: dict[int, list[int]] = {}
        self._table = 0
        own, said = None, _Exported()
        try:
            own = self._make(nbytes, n_events)
            said = self._export(own)
        except DeviceError as exc:
            said = _Exported(error=str(exc))
        try:
            everybody = [msgspec.msgpack.decode(each, type=_Exported)
                         for each in all_gather_bytes(group, msgspec.msgpack.encode(said))]
            for rank, each in zip(group.ranks, everybody):
                if each.error:
                    raise DeviceError(f"rank {rank} cannot share memory of its GPU (BPSFAST_ISLANDS=off does without): "
                                      f"{each.error}")
            assert own is not None, "no member has failed"
            self._own = own
            self._open(everybody)
        except BaseException:
            with suppress(DeviceError):
                self._close_others()
            self._keep(own)
            raise

    def _make(self, nbytes: int, n_events: int) -> _Own:
        kept = _kept.get(self._key)
        if kept:
            return kept.pop()
        module = cupy()
        with self._device.current(f"making a window of {nbytes} bytes"):
            events = [module.cuda.Event(disable_timing=True, interprocess=True) for _ in range(n_events)]
            return _Own(int(module.cuda.runtime.malloc(nbytes)), events)

    def _export(self, own: _Own) -> _Exported:
        runtime = cupy().cuda.runtime
        with self._device.current("exporting a window"):
            return _Exported(bytes(runtime.ipcGetMemHandle(own.address)),
                             tuple(bytes(runtime.ipcGetEventHandle(event.ptr)) for event in own.events))

    def _open(self, everybody: Sequence[_Exported]) -> None:
        runtime = cupy().cuda.runtime
        with self._device.current("opening the windows of an island"):
            for place, each in enumerate(everybody):
                if place != self._group.rank:
                    self._opened[place] = int(runtime.ipcOpenMemHandle(each.window))
                    self._events[place] = opened = []
                    for event in each.events:  # one by one: if a later one fails these are closed
                        opened.append(int(runtime.ipcOpenEventHandle(event)))
            self.addresses = [self._opened.get(place, self._own.address) for place in range(len(everybody))]
            table = np.array(self.addresses, np.uint64)
            self._table = int(runtime.malloc(table.nbytes))
            runtime.memcpy(self._table, table.ctypes.data, table.nbytes, _TO_DEVICE)

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """See `Windows`."""
        with self._device.current(f"copying {nbytes} bytes for an island"):
            cupy().cuda.runtime.memcpyAsync(target, source, nbytes, _ON_DEVICE, _handle(stream))

    def sum(self, stream: Stream, target: int, own: int, offset: int, nbytes: int, dtype: str) -> None:
        """See `Windows`."""
        n = nbytes // TABLE[dtype].itemsize
        arguments = (np.uint64(target), np.uint64(own), np.uint64(self._table), np.int64(offset),
                     np.int64(self._group.rank), np.int64(self._group.size), np.int64(n))
        with self._device.current(f"summing {nbytes} bytes in an island"):
            kernel = sum_kernel(dtype, self._device.number)
            with _current(stream):
                kernel((min(_BLOCKS, -(-n // _THREADS)),), (_THREADS,), arguments)

    def record(self, stream: Stream, number: int) -> None:
        """See `Windows`."""
        with self._device.current("recording an event for an island"):
            cupy().cuda.runtime.eventRecord(self._own.events[number].ptr, _handle(stream))

    def wait(self, stream: Stream, number: int) -> None:
        """See `Windows`."""
        with self._device.current("letting a stream wait for an island"):
            for events in self._events.values():
                cupy().cuda.runtime.streamWaitEvent(_handle(stream), events[number])

    def close(self) -> None:
        """See `Windows`."""
        try:
            self._close_others()
        finally:
            self._keep(self._own)

    def _close_others(self) -> None:
        runtime = cupy().cuda.runtime
        with self._device.current("closing the windows of an island"):
            for events in self._events.values():
                for event in events:
                    runtime.eventDestroy(event)
            for address in self._opened.values():
                runtime.ipcCloseMemHandle(address)
            if self._table:
                runtime.free(self._table)
        self._events, self._opened, self._table = {}, {}, 0

    def _keep(self, own: _Own | None) -> None:
        if own is not None:
            _kept.setdefault(self._key, []).append(own)


def _current(stream: Stream) -> Any:
    """Return what makes *stream* the one that CuPy's kernels go to, as a context."""
    kinds = cupy().cuda
    if hasattr(kinds.Stream, "from_external"):  # since CuPy 14, which warns of the old way
        return kinds.Stream.from_external(stream)
    return kinds.ExternalStream(_handle(stream))


def _handle(stream: Stream) -> int:
    assert isinstance(stream, CudaStream), "a stream of this GPU"
    return stream.handle
