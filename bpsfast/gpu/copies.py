"""Copy threads of a device: one copies partitions to the host, the other copies sums back; the most urgent go first.

`ToHostCopier` runs `CopyToHost`s. A hook of the backward pass only adds one, and the training's stream goes on. Copies
are enqueued once their input is computed, so a stream that blocks (it may wait for another rank, which waits for a sum
of ours) delays only its own copies. A few partitions are copied at a time, enough for a full link, so that an urgent
partition overtakes the rest of a large unit (ByteScheduler's credit, here for PCIe).

`ToDeviceCopier` runs `CopyToDevice`s: each partition of a sum is copied as soon as it is complete. The reader's stream
waits for the copies; the host waits for none.
"""
from __future__ import annotations

import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from ..orchestration.errors import BpsError, DeviceError, StallError
from .device import Device, Event, OwnStream, Stream

#: A waiting caller makes progress for the session at this interval, and checks whether it was closed.
_SLICE_S = 0.1
#: A thread with nothing to do polls at this interval. CUDA can be asked whether a stream has got to an event, but a
#: thread that waits for the event can wait for nothing else.
_POLL_S = 0.0002
#: While no partition is complete, the copier waits this long for the oldest one before it looks for new copies.
_LOOK_S = 0.001
#: This many partitions of a unit are asked at once whether they are complete: most complete in order.
_N_ASKED = 32
#: Bytes that are copied to the host at a time, and the least number of partitions: while one ends the next begins.
_WINDOW_NBYTES = 8 << 20
_LEAST_PARTITIONS = 2
#: The addresses for a unit of which no card reads anything from the device.
NOWHERE: Mapping[int, int] = MappingProxyType({})


class DeviceRange(NamedTuple):
    """*nbytes* at *address* of a device, which belong to a unit from its byte *offset* on."""

    offset: int
    address: int
    nbytes: int


class PartitionCopy(NamedTuple):
    """Partition *number* of a unit, *nbytes* long, and the ranges to copy for it (none if its bytes are in place)."""

    number: int
    nbytes: int
    copies: tuple[DeviceRange, ...]


def partition_copies(nbytes: int, stride: int, ranges: Sequence[DeviceRange]) -> list[PartitionCopy]:
    """Split *ranges*, in any order, by the partitions of a unit of *nbytes*, which are *stride* bytes apart."""
    copies: dict[int, list[DeviceRange]] = {}
    for each in sorted(ranges):
        at, end = each.offset, each.offset + each.nbytes
        while at < end:
            number = at // stride
            n = min(end, (number + 1) * stride) - at
            copies.setdefault(number, []).append(DeviceRange(at, each.address + at - each.offset, n))
            at += n
    return [PartitionCopy(number, min(stride, nbytes - number * stride), tuple(copies.get(number, ())))
            for number in range(-(-nbytes // stride))]


class DeviceCopy:
    """The copy of one unit between a device and the host. Any thread may wait for it.

    *keeps* holds the memory on the device as long as copies may go on. The highest *priority* goes first.
    """

    def __init__(self, title: str, priority: int, keeps: object) -> None:
        self.title = title
        self.priority = priority
        self.keeps = keeps
        self.then: Callable[[BpsError | None], None] | None = None  # called once it is over, by the thread that ends it
        self.is_queued = False  # then only the copy thread releases its memory
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._error: BpsError | None = None

    @property
    def is_over(self) -> bool:
        """Whether `wait` will not block."""
        return self._over.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether it is over, and `wait` raises."""
        return self._error is not None

    def end(self, error: BpsError | None = None) -> None:
        """End it, with *error* if it failed. Only the first call counts. Any thread."""
        with self._ending:
            if self._over.is_set():
                return
            self._error = error
            self._over.set()
        if self.then is not None:
            self.then(error)

    def release_memory(self) -> None:
        """Release `keeps`, as no copy goes on any more. Called by the copy thread, or by what closes it."""
        self.keeps = None

    def wait(self, deadline: float, meanwhile: Callable[[], object]) -> None:
        """Wait until it is over, calling *meanwhile* now and then; raise its error, or `StallError` at *deadline*."""
        while not self._over.is_set():
            rest_s = deadline - time.monotonic()
            if self._over.wait(max(0.0, min(rest_s, _SLICE_S))):
                break
            if rest_s <= 0:
                raise StallError(f"{self.title} did not come in time: the stream that computes it has not finished, or "
                                 "its copies wait for others. See what this rank's GPU does")
            meanwhile()
        if self._error is not None:
            raise self._error


class ResultCopy(DeviceCopy):
    """The copy of a sum to a device: over once all its copies are enqueued, which are done at `event`."""

    event: Event | None = None


C = TypeVar("C", bound=DeviceCopy)


class CopyThread(ABC, Generic[C]):
    """Runs copies of kind C between *device* and the host. Any thread may `add`; the thread starts with the first."""

    def __init__(self, device: Device, name: str) -> None:
        self._device = device
        self._name = name
        self._condition = threading.Condition()
        self._added: list[C] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._why_closed: Callable[[], BpsError] = lambda: DeviceError(f"{name} is closed")

    def add(self, copy: C) -> None:
        with self._condition:
            if not self._is_closed:
                copy.is_queued = True
                self._added.append(copy)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._condition.notify()
                return
        copy.end(self._why_closed())
        copy.release_memory()

    def close(self, why: Callable[[], BpsError]) -> None:
        """End the thread; copies that are not over fail with *why*. `join` comes after."""
        with self._condition:
            if not self._is_closed:
                self._is_closed, self._why_closed = True, why
            self._condition.notify()

    def join(self, timeout_s: float) -> bool:
        """Return whether the thread ends in time, and no copy of it goes on. After `close`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _take(self, block: bool) -> list[C] | None:
        """Return the copies that were added, after waiting for some if *block*; None if the thread is to end."""
        with self._condition:
            while block and not self._added and not self._is_closed:
                self._condition.wait()
            if self._is_closed:
                return None
            added, self._added = self._added, []
            return added

    def _pause(self) -> None:
        """Sleep until the next poll, unless something was added or the thread is to end."""
        with self._condition:
            if not self._added and not self._is_closed:
                self._condition.wait(_POLL_S)

    def _run(self) -> None:
        under_way: list[C] = []
        stream: OwnStream | None = None
        try:
            self._device.enter()
            stream = self._device.stream()
            while (added := self._take(block=not under_way)) is not None:
                under_way += added
                under_way = self._step(under_way, stream)
                added.clear()
        except BpsError as exc:
            left = self._fail(under_way, exc)
        except BaseException as exc:  # of a framework's event, for example: waiting threads must be told
            left = self._fail(under_way, DeviceError(f"{self._name} cannot go on: {exc!r}"))
        else:
            left = self._fail(under_way, self._why_closed())
        if stream is not None:
            self._drain(left, stream)
            stream.close()
        for copy in left:
            copy.release_memory()

    def _fail(self, under_way: list[C], error: BpsError) -> list[C]:
        """End all copies with *error*, and those that are added later; return them."""
        with self._condition:
            self._is_closed, self._why_closed = True, lambda: error
            left, self._added = [*under_way, *self._added], []
        for copy in left:
            copy.end(error)
        return left

    def _drain(self, left: list[C], stream: Stream) -> None:
        """Wait for what was enqueued for *left*: until then their memory is in use, on both sides."""
        with contextlib.suppress(Exception):  # a device that has failed copies nothing
            stream.record().wait()

    @abstractmethod
    def _step(self, under_way: list[C], stream: Stream) -> list[C]:
        """Go on with *under_way*, blocking a while if nothing can be done; return those that are not over."""


class CopyToHost(DeviceCopy):
    """The copy of *partitions* of a unit to the host, where the unit lies at *address*.

    The input may be read after the events *after*. *on_copied* is called with each partition once it is copied, and
    with the time at which its copies began (ns). *readers* are copies that still read the sum of an earlier round, and
    must end first. *on_device*: partitions that a card reads from the device, by number, with the address at which the
    unit would begin there; they are copied within the device.
    """

    def __init__(self, title: str, priority: int, address: int, partitions: Sequence[PartitionCopy],
                 after: Sequence[Event], on_copied: Callable[[PartitionCopy, int], None], keeps: object,
                 readers: Sequence[CopyToDevice] = (), on_device: Mapping[int, int] = NOWHERE) -> None:
        super().__init__(title, priority, keeps)
        self.address = address
        self.on_device = on_device
        self.partitions = partitions
        self.on_copied = on_copied
        self.n_begun = 0
        self.n_copied = 0
        self._after = deque(after)
        self._readers = deque(readers)

    def is_ready(self, pending: set[Hashable]) -> bool:
        """Return whether copies enqueued now would begin at once; *pending* collects origins of unreached events."""
        while self._after:
            origin = self._after[0].origin
            if origin in pending:
                return False
            if not self._after[0].done():
                pending.add(origin)
                return False
            self._after.popleft()
        while self._readers and self._readers[0].is_finished:
            self._readers.popleft()
        return not self._readers


class _Copying(NamedTuple):
    """A partition whose copies are enqueued, and the event after them."""

    copied: Event
    copy: CopyToHost
    partition: PartitionCopy
    begin_ns: int


class ToHostCopier(CopyThread[CopyToHost]):
    """The copy thread from a device to the host."""

    def __init__(self, device: Device, name: str) -> None:
        super().__init__(device, name)
        self._copying: deque[_Copying] = deque()
        self._nbytes = 0  # being copied

    def _step(self, under_way: list[CopyToHost], stream: Stream) -> list[CopyToHost]:
        copying = self._copying
        ready = _ready(under_way)
        while ready and (len(copying) < _LEAST_PARTITIONS or self._nbytes < _WINDOW_NBYTES):
            copy = max(ready, key=lambda copy: copy.priority)  # of equal ones the first that was added
            copying.append(_enqueue_next(copy, stream))
            self._nbytes += copying[-1].partition.nbytes
            if copy.n_begun == len(copy.partitions):
                ready.remove(copy)
        if not copying:
            self._pause()
            return under_way
        copied, copy, partition, begin_ns = copying.popleft()
        copied.wait()
        self._nbytes -= partition.nbytes
        copy.on_copied(partition, begin_ns)
        copy.n_copied += 1
        if copy.n_copied < len(copy.partitions):
            return under_way
        copy.release_memory()
        copy.end()
        return [each for each in under_way if each is not copy]


def _ready(under_way: Sequence[CopyToHost]) -> list[CopyToHost]:
    """Return the copies whose next partition can be enqueued."""
    pending: set[Hashable] = set()
    return [copy for copy in under_way if copy.n_begun < len(copy.partitions) and copy.is_ready(pending)]


def _enqueue_next(copy: CopyToHost, stream: Stream) -> _Copying:
    partition = copy.partitions[copy.n_begun]
    begin_ns = time.monotonic_ns()
    on_device = copy.on_device.get(partition.number)
    for each in partition.copies:
        if on_device is None:
            stream.copy(copy.address + each.offset, each.address, each.nbytes, to_host=True)
        else:
            stream.move(on_device + each.offset, each.address, each.nbytes)
    copy.n_begun += 1
    return _Copying(stream.record(), copy, partition, begin_ns)


class CopyToDevice(ResultCopy):
    """The copy of *partitions* of a unit's sum to a device, after the events *after*.

    *source* returns where the sum's bytes from an offset on lie, on the host or on the device. *wait* waits up to a
    number of seconds for a partition, by its number, and returns whether it is complete; it raises if it never will be.
    *on_copied* is called with each partition once it is on the device, and with the time at which its copies began
    (ns). *keeps* holds the memory that is written. *whole*: also wait for partitions without copies. *on_device*: the
    numbers of the partitions that a card has written to the device.
    """

    def __init__(self, title: str, priority: int, partitions: Sequence[PartitionCopy], after: Sequence[Event],
                 source: Callable[[int], int], wait: Callable[[int, float], bool],
                 on_copied: Callable[[PartitionCopy, int], None], keeps: object, whole: bool = False,
                 on_device: Collection[int] = ()) -> None:
        super().__init__(title, priority, keeps)
        self.left = {partition.number: partition for partition in partitions if whole or partition.copies}
        self.after = after
        self.source = source
        self.on_device = on_device
        self.wait_for = wait
        self.on_copied = on_copied
        self.copying: deque[tuple[Event, PartitionCopy, int]] = deque()
        self._stream: Stream | None = None
        self.own_stream: OwnStream | None = None
        self._finished = threading.Event()

    @property
    def is_finished(self) -> bool:
        """Whether it does not read the sum any more: it is on the device, or never will be."""
        return self._finished.is_set()

    def wait_finished(self, timeout_s: float) -> bool:
        """Wait until it is finished, at most *timeout_s*; return whether it is."""
        return self._finished.wait(timeout_s)

    def stream(self, device: Device, shared: Stream) -> Stream:
        """Return the stream for its copies: *shared*, or its own if they must wait for work of its owner, as others
        must not.
        """
        if self._stream is None:
            if not all(event.done() for event in self.after):
                self.own_stream = device.stream()
                for event in self.after:
                    self.own_stream.wait(event)
            self._stream = self.own_stream or shared
        return self._stream

    def release_memory(self) -> None:
        super().release_memory()
        self._finished.set()
        if self.own_stream is not None:
            self.own_stream.close()
            self.own_stream = None


class ToDeviceCopier(CopyThread[CopyToDevice]):
    """The copy thread from the host to a device."""

    def _step(self, under_way: list[CopyToDevice], stream: Stream) -> list[CopyToDevice]:
        has_copied = False
        for copy in under_way:
            if copy.is_over and copy.has_failed:  # its caller has ended it
                copy.left.clear()
        for copy in sorted(under_way, key=lambda copy: copy.priority, reverse=True):
            complete = [partition for partition in itertools.islice(copy.left.values(), _N_ASKED)
                        if copy.wait_for(partition.number, 0.0)]
            if copy.on_device and any(each.number in copy.on_device and each.copies for each in complete):
                self._device.flush_remote_writes()
            for partition in complete:
                _enqueue(copy, partition, copy.stream(self._device, stream))
                has_copied = True
            if not copy.left and not copy.is_over:
                copy.event = copy.stream(self._device, stream).record()
                copy.end()
        if not has_copied:
            self._wait(under_way)
        return [copy for copy in under_way if not _has_finished(copy)]

    def _wait(self, under_way: list[CopyToDevice]) -> None:
        """Wait a moment for a partition, or for copies."""
        for copy in under_way:
            if copy.left:
                copy.wait_for(next(iter(copy.left)), _LOOK_S)
                return
        for copy in under_way:
            if copy.copying and copy.own_stream is None:  # copies that are added now come after it anyway
                copy.copying[0][0].wait()
                return
        self._pause()

    def _drain(self, left: list[CopyToDevice], stream: Stream) -> None:
        super()._drain(left, stream)
        for copy in left:
            if copy.own_stream is not None:
                super()._drain(left, copy.own_stream)


def _enqueue(copy: CopyToDevice, partition: PartitionCopy, stream: Stream) -> None:
    begin_ns = time.monotonic_ns()
    for each in partition.copies:
        if partition.number in copy.on_device:
            stream.move(each.address, copy.source(each.offset), each.nbytes)
        else:
            stream.copy(each.address, copy.source(each.offset), each.nbytes, to_host=False)
    del copy.left[partition.number]
    copy.copying.append((stream.record(), partition, begin_ns))


def _has_finished(copy: CopyToDevice) -> bool:
    """Report the partitions that are on the device now; return whether all are."""
    while copy.copying and copy.copying[0][0].done():
        _, partition, begin_ns = copy.copying.popleft()
        copy.on_copied(partition, begin_ns)
    if copy.copying or copy.left:
        return False
    copy.release_memory()
    return True
