"""Sums among ranks that share one device: each puts its pieces into a window that the others have open.

    copy to the own window, record | meet | wait for the others' records, read their windows, record

A window has two slots, used in turn. Whoever fills one again has met all since they recorded that they had read it; the
fill waits for that record on the stream. So the host meets once for each slotful, in a thread of this object.
"""
from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..base.dtypes import TABLE
from ..orchestration.errors import BpsError, DeviceError
from .communicator import IslandRange, OnEnqueued
from .cuda import CudaDevice
from .device import Device, Event, Stream
from .windows import CudaWindows, HostWindows, Windows

if TYPE_CHECKING:
    from ..collectives.group import Group

_SLOT_NBYTES = 8 << 20
_ALIGN = 256
_FILLED, _READ = 0, 2  # events of the first slot; those of the second one follow
#: How long `close` waits for the thread: a meeting gives up within a second.
_CLOSE_S = 10.0


class _Part(NamedTuple):
    """*nbytes* of *run* from *at* on, which lie at *offset* of a slot."""

    run: IslandRange
    at: int
    nbytes: int
    offset: int


def slot_ranges(runs: Sequence[IslandRange], slot_nbytes: int) -> Iterator[list[_Part]]:
    """Cut *runs* into slotfuls: alike on all members."""
    lot: list[_Part] = []
    offset = 0
    for run in runs:
        at = 0
        while at < run.nbytes:
            if offset >= slot_nbytes:
                yield lot
                lot, offset = [], 0
            nbytes = min(run.nbytes - at, slot_nbytes - offset)
            lot.append(_Part(run, at, nbytes, offset))
            at += nbytes
            offset += -(-nbytes // _ALIGN) * _ALIGN
    if lot:
        yield lot


class SharedCommunicator:
    """The members of *group*, whose ranks ascend, all with one device. See `Communicator`; *fail* hears, once, in the
    thread, why it cannot go on.
    """

    def __init__(self, device: Device, group: Group, fail: Callable[[BpsError], None]) -> None:
        self._device, self._group, self._fail = device, group, fail
        self._closed = False
        self._windows: Windows
        if isinstance(device, CudaDevice):
            self._windows = CudaWindows(device, group, 2 * _SLOT_NBYTES, 4)
        else:
            self._windows = HostWindows(group, 2 * _SLOT_NBYTES, lambda: self._closed)
        self._slot = 0
        self._stream: Stream | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._go_on, name="bpsfast-island-sums", daemon=True)
        self._thread.start()

    def reduce(self, stream: Stream, after: Sequence[Event], runs: Sequence[IslandRange], dtype: str, then: OnEnqueued) -> None:
        """See `Communicator`."""
        self._calls.put(partial(self._call, "reduce", stream, tuple(after), tuple(runs), dtype, then))

    def broadcast(self, stream: Stream, after: Sequence[Event], runs: Sequence[IslandRange], dtype: str, then: OnEnqueued) -> None:
        """See `Communicator`."""
        self._calls.put(partial(self._call, "broadcast", stream, tuple(after), tuple(runs), dtype, then))

    def close(self) -> None:
        """See `Communicator`. What is enqueued on the device is waited for: it still reads windows."""
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

    def _call(self, what: str, stream: Stream, after: Sequence[Event], runs: Sequence[IslandRange], dtype: str,
              then: OnEnqueued) -> None:
        self._stream = stream
        for event in after:
            stream.wait(event)
        fill, read = (self._put, self._add) if what == "reduce" else (self._offer, self._take)
        itemsize = TABLE[dtype].itemsize
        assert all(run.nbytes % itemsize == 0 for run in runs), "whole elements"
        for lot in slot_ranges(runs, _SLOT_NBYTES):
            slot, self._slot = self._slot, 1 - self._slot
            begin = slot * _SLOT_NBYTES
            self._windows.wait(stream, _READ + slot)
            fill(stream, lot, begin)
            self._windows.record(stream, _FILLED + slot)
            self._group.barrier(f"{what} {dtype} {[(part.run.root, part.nbytes) for part in lot]}")
            self._windows.wait(stream, _FILLED + slot)
            read(stream, lot, begin, dtype)
            self._windows.record(stream, _READ + slot)
        then(stream.record())

    def _put(self, stream: Stream, lot: Sequence[_Part], begin: int) -> None:
        own = self._windows.addresses[self._group.rank] + begin
        for part in lot:
            if part.run.root != self._group.rank:
                self._windows.copy(stream, own + part.offset, part.run.source + part.at, part.nbytes)

    def _add(self, stream: Stream, lot: Sequence[_Part], begin: int, dtype: str) -> None:
        for part in lot:
            if part.run.root == self._group.rank:
                self._windows.sum(stream, part.run.target + part.at, part.run.source + part.at, begin + part.offset,
                                  part.nbytes, dtype)

    def _offer(self, stream: Stream, lot: Sequence[_Part], begin: int) -> None:
        own = self._windows.addresses[self._group.rank] + begin
        for part in lot:
            if part.run.root == self._group.rank:
                self._windows.copy(stream, own + part.offset, part.run.target + part.at, part.nbytes)

    def _take(self, stream: Stream, lot: Sequence[_Part], begin: int, dtype: str) -> None:
        for part in lot:
            if part.run.root != self._group.rank:
                self._windows.copy(stream, part.run.target + part.at,
                                   self._windows.addresses[part.run.root] + begin + part.offset, part.nbytes)
