"""Sums among ranks that share one device: each rank has a window, a buffer that the other ranks have mapped, too.

    copy to the own window, record | barrier | wait for the others' records, read their windows, record

A window has two halves, used in turn. A rank that fills a half again has passed a barrier since all others recorded
that they had read it, and its stream waits for that record. So there is one barrier on the host for each half, in a
thread.

Windows are opened by CUDA IPC on a GPU, by a memfd on the host device. They are buffers of our own because frameworks
may allocate memory that cannot be exported (expandable segments). Exported events order streams of different processes;
a wait means what was recorded when it was called, hence the barrier between the two.
"""
from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from ..base.dtypes import TABLE
from ..base.reference_sum import reduce
from ..orchestration.errors import BpsError, DeviceError, StallError
from ..pyx.port import copy
from .communicator import IslandRange, Members, OnEnqueued
from .cuda import CudaDevice, cupy, handle_of
from .device import Device, Event, Stream
from .host import HostStream
from .sum_kernels import sum_kernel

_ON_DEVICE = 3  # cudaMemcpyDeviceToDevice
_TO_DEVICE = 1
_THREADS, _BLOCKS = 256, 1024
_SLICE_S = 0.2
_HALF_NBYTES = 8 << 20
_ALIGN = 256
_FILLED, _READ = 0, 2  # events of the first half; those of the second one follow
#: How long `close` waits for the thread: a barrier gives up within a second.
_CLOSE_S = 10.0


class Windows(Protocol):
    """All members' windows, mapped in this process. One thread; `copy`, `sum`, `record` and `wait` enqueue on a GPU."""

    #: Where the windows of all members lie in this process, in the order of the members.
    addresses: list[int]

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        """Copy within the device."""

    def sum(self, stream: Stream, target: int, own: int, offset: int, nbytes: int, dtype: str) -> None:
        """Sum what lies at *offset* of all windows, in the order of the members; this member's part is at *own*."""

    def record(self, stream: Stream, number: int) -> None:
        """Record event *number* of this member after everything enqueued so far."""

    def wait(self, stream: Stream, number: int) -> None:
        """Make later work wait for the last record of event *number* of each other member."""

    def close(self) -> None:
        """Unmap the windows; nothing of this process may still be copied there. Members may close in any order."""


class HostWindows:
    """`Windows` of the host device. `record` blocks until its event is reached, so a barrier orders all."""

    def __init__(self, group: Members, nbytes: int, is_closed: Callable[[], bool]) -> None:
        self._group, self._is_closed = group, is_closed
        self._maps: list[mmap.mmap] = []
        fd = os.memfd_create("bpsfast-window", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            for path in group.all_gather_bytes(f"/proc/{os.getpid()}/fd/{fd}".encode()):
                try:
                    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                except OSError as exc:
                    raise DeviceError(f"a rank of the island {group.ranks} has its window at {path.decode()}, which "
                                      f"cannot be opened ({exc}). Run all ranks in one container, as one user") from exc
                try:
                    self._maps.append(mmap.mmap(opened, nbytes))
                finally:
                    os.close(opened)
            group.barrier()  # the descriptor is needed no more
        finally:
            os.close(fd)
        self.addresses = [np.frombuffer(each, np.uint8).ctypes.data for each in self._maps]

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        assert isinstance(stream, HostStream), "a stream of the host device"
        stream.run(partial(self._copy, target, source, nbytes))

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        copy(target, source, nbytes)  # a method, so that enqueued work keeps the windows mapped

    def sum(self, stream: Stream, target: int, own: int, offset: int, nbytes: int, dtype: str) -> None:
        assert isinstance(stream, HostStream), "a stream of the host device"

        def work() -> None:
            parts = [own if member == self._group.rank else address + offset
                     for member, address in enumerate(self.addresses)]
            total = reduce([[_array(part, nbytes, dtype) for part in parts]], False)
            copy(target, total.ctypes.data, nbytes)

        stream.run(work)

    def record(self, stream: Stream, number: int) -> None:
        deadline = time.monotonic() + self._group.timeout_s
        event = stream.record()
        while not event.wait(_SLICE_S):
            if self._is_closed() or time.monotonic() > deadline:
                raise StallError(f"rank {self._group.ranks[self._group.rank]} waited {self._group.timeout_s:g} s for "
                                 "its stream before a sum with its island, or was closed meanwhile")

    def wait(self, stream: Stream, number: int) -> None:
        """See `Windows`."""

    def close(self) -> None:
        self.addresses = []
        for each in self._maps:
            with suppress(BufferError):  # a stream still works there
                each.close()


def _array(address: int, nbytes: int, dtype: str) -> np.ndarray[Any, Any]:
    view = {"data": (address, True), "shape": (nbytes,), "typestr": "|u1", "version": 3}
    holder = type("Memory", (), {"__array_interface__": view})()
    return np.asarray(holder).view(TABLE[dtype].numpy)


class _Exported(msgspec.Struct, frozen=True):
    """The CUDA IPC handles of a member's window and events, or why it has none."""

    window: bytes = b""
    events: tuple[bytes, ...] = ()
    error: str = ""


class _Own(msgspec.Struct):
    """A window of this process and its events. CUDA requires that they are freed after all others have closed them."""

    address: int
    events: list[Any]


#: Windows kept for the next island, by (device, bytes, events): whether a member that may be dead has closed them is
#: unknown.
_kept: dict[tuple[int, int, int], list[_Own]] = {}


class CudaWindows:
    """Windows on one GPU. See `Windows`."""

    def __init__(self, device: CudaDevice, group: Members, nbytes: int, n_events: int) -> None:
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
                         for each in group.all_gather_bytes(msgspec.msgpack.encode(said))]
            for rank, each in zip(group.ranks, everybody):
                if each.error:
                    raise DeviceError(f"rank {rank} cannot share memory of its GPU: {each.error}. Set "
                                      "BPSFAST_ISLANDS=off to do without")
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
            for member, each in enumerate(everybody):
                if member != self._group.rank:
                    self._opened[member] = int(runtime.ipcOpenMemHandle(each.window))
                    self._events[member] = opened = []
                    for event in each.events:  # one by one: if a later one fails, these are closed
                        opened.append(int(runtime.ipcOpenEventHandle(event)))
            self.addresses = [self._opened.get(member, self._own.address) for member in range(len(everybody))]
            table = np.array(self.addresses, np.uint64)
            self._table = int(runtime.malloc(table.nbytes))
            runtime.memcpy(self._table, table.ctypes.data, table.nbytes, _TO_DEVICE)

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        with self._device.current(f"copying {nbytes} bytes for an island"):
            cupy().cuda.runtime.memcpyAsync(target, source, nbytes, _ON_DEVICE, handle_of(stream))

    def sum(self, stream: Stream, target: int, own: int, offset: int, nbytes: int, dtype: str) -> None:
        n = nbytes // TABLE[dtype].itemsize
        arguments = (np.uint64(target), np.uint64(own), np.uint64(self._table), np.int64(offset),
                     np.int64(self._group.rank), np.int64(self._group.size), np.int64(n))
        with self._device.current(f"summing {nbytes} bytes in an island"):
            kernel = sum_kernel(dtype, self._device.number)
            with _current(stream):
                kernel((min(_BLOCKS, -(-n // _THREADS)),), (_THREADS,), arguments)

    def record(self, stream: Stream, number: int) -> None:
        with self._device.current("recording an event for an island"):
            cupy().cuda.runtime.eventRecord(self._own.events[number].ptr, handle_of(stream))

    def wait(self, stream: Stream, number: int) -> None:
        with self._device.current("letting a stream wait for an island"):
            for events in self._events.values():
                cupy().cuda.runtime.streamWaitEvent(handle_of(stream), events[number])

    def close(self) -> None:
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
    """Return a context in which CuPy launches its kernels on *stream*."""
    kinds = cupy().cuda
    if hasattr(kinds.Stream, "from_external"):  # CuPy 14 and newer, which warn of the other one
        return kinds.Stream.from_external(stream)
    return kinds.ExternalStream(handle_of(stream))


class _HalfPart(NamedTuple):
    """*nbytes* of *range* from its byte *at* on, which lie at *offset* of a half."""

    range: IslandRange
    at: int
    nbytes: int
    offset: int


def half_ranges(ranges: Sequence[IslandRange], half_nbytes: int) -> Iterator[list[_HalfPart]]:
    """Split *ranges* into parts that fill one half each, alike on all members."""
    parts: list[_HalfPart] = []
    offset = 0
    for each in ranges:
        at = 0
        while at < each.nbytes:
            if offset >= half_nbytes:
                yield parts
                parts, offset = [], 0
            nbytes = min(each.nbytes - at, half_nbytes - offset)
            parts.append(_HalfPart(each, at, nbytes, offset))
            at += nbytes
            offset += -(-nbytes // _ALIGN) * _ALIGN
    if parts:
        yield parts


class SharedCommunicator:
    """The members of *group*, whose ranks ascend and which share *device*. See `Communicator`. *fail* is called once,
    in the thread of this object, with the error that ends it.
    """

    def __init__(self, device: Device, group: Members, fail: Callable[[BpsError], None]) -> None:
        self._device, self._group, self._fail = device, group, fail
        self._closed = False
        self._windows: Windows
        if isinstance(device, CudaDevice):
            self._windows = CudaWindows(device, group, 2 * _HALF_NBYTES, 4)
        else:
            self._windows = HostWindows(group, 2 * _HALF_NBYTES, lambda: self._closed)
        self._half = 0
        self._stream: Stream | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._go_on, name="bpsfast-island-sums", daemon=True)
        self._thread.start()

    def reduce(self, stream: Stream, after: Sequence[Event], ranges: Sequence[IslandRange], dtype: str,
               then: OnEnqueued) -> None:
        self._calls.put(partial(self._call, True, stream, tuple(after), tuple(ranges), dtype, then))

    def broadcast(self, stream: Stream, after: Sequence[Event], ranges: Sequence[IslandRange], dtype: str,
                  then: OnEnqueued) -> None:
        self._calls.put(partial(self._call, False, stream, tuple(after), tuple(ranges), dtype, then))

    def close(self) -> None:
        """See `Communicator`. Waits for work that is enqueued on the device, as it still reads windows."""
        self._closed = True
        self._group.close()
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive() or (self._stream is not None and not self._stream.record().wait(_CLOSE_S)):
            return  # windows that may be in use stay open
        self._windows.close()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        try:
            self._device.enter()
            while (call := self._calls.get()) is not None and not self._closed:
                call()
                del call
        except BpsError as exc:
            self._fail(exc)
        except BaseException as exc:  # of a driver, say: whoever waits must be told
            self._fail(DeviceError(f"sums of the island {self._group.ranks} cannot go on: {exc!r}"))

    def _call(self, is_reduce: bool, stream: Stream, after: Sequence[Event], ranges: Sequence[IslandRange], dtype: str,
              then: OnEnqueued) -> None:
        self._stream = stream
        for event in after:
            stream.wait(event)
        what = "reduce" if is_reduce else "broadcast"
        assert all(each.nbytes % TABLE[dtype].itemsize == 0 for each in ranges), "whole elements"
        for parts in half_ranges(ranges, _HALF_NBYTES):
            half, self._half = self._half, 1 - self._half
            begin = half * _HALF_NBYTES
            self._windows.wait(stream, _READ + half)
            self._fill(is_reduce, stream, parts, begin)
            self._windows.record(stream, _FILLED + half)
            self._group.barrier(f"{what} {dtype} {[(part.range.root, part.nbytes) for part in parts]}")
            self._windows.wait(stream, _FILLED + half)
            self._read(is_reduce, stream, parts, begin, dtype)
            self._windows.record(stream, _READ + half)
        then(stream.record())

    def _fill(self, is_reduce: bool, stream: Stream, parts: Sequence[_HalfPart], begin: int) -> None:
        """Copy what others read to the own window: inputs for other roots, or the sums of which this is the root."""
        rank = self._group.rank
        own = self._windows.addresses[rank] + begin
        for each, at, nbytes, offset in parts:
            if (each.root != rank) == is_reduce:
                self._windows.copy(stream, own + offset, (each.source if is_reduce else each.target) + at, nbytes)

    def _read(self, is_reduce: bool, stream: Stream, parts: Sequence[_HalfPart], begin: int, dtype: str) -> None:
        """Sum the windows as the root, or copy the sums from the roots' windows."""
        for each, at, nbytes, offset in parts:
            if is_reduce and each.root == self._group.rank:
                self._windows.sum(stream, each.target + at, each.source + at, begin + offset, nbytes, dtype)
            elif not is_reduce and each.root != self._group.rank:
                window = self._windows.addresses[each.root] + begin
                self._windows.copy(stream, each.target + at, window + offset, nbytes)
