"""The devices (GPUs) of a session: starts rounds of sums of tensors on them, and pins shared memory for the copies.

A device gets its two copy threads (`gpu.copies`) when its first tensor comes.
"""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from ...base import hooks
from ...gpu.copies import (
    CopyToDevice,
    CopyToHost,
    DeviceCopy,
    DeviceRange,
    PartitionCopy,
    ResultCopy,
    ToDeviceCopier,
    ToHostCopier,
    partition_copies,
)
from ...gpu.device import Device, Event, Stream
from ...gpu.host import host_device
from ...orchestration.errors import BpsError, DeviceError
from ...pyx.pages import Segment
from ..tensor_input import TensorInput
from ..unit import Unit
from . import DeviceSession
from .gpu_direct import GpuDirectMemory
from .staging_buffers import StagingBuffers

log = logging.getLogger("bpsfast.gpu")


class DeviceRound:
    """Round `round` of *unit*: input from a device, sum, and back (*result* None: it stays on the host). Any thread."""

    def __init__(self, session: DeviceSession, unit: Unit, round: int, input: DeviceCopy,
                 result: ResultCopy | None) -> None:
        self.unit = unit
        self.round = round
        self._session = session
        self._input = input
        self._result = result

    def done(self) -> bool:
        """Return whether `wait` will not block."""
        if not self._input.is_over or self._input.has_failed:
            return self._input.is_over
        return self.unit.done(self.round) and (self._result is None or self._result.is_over)

    def wait(self, deadline: float) -> None:
        """Wait until the sum is complete, and all copies of it to the device are enqueued.

        Raises `DeviceError` if the device failed. All ranks lose the round if its input had not been copied. Raises
        `StallError` or `PeerLostError` as `Unit.wait`; *deadline* is of time.monotonic.
        """
        self.wait_departed(deadline)
        self.unit.wait(self.round, max(0.0, deadline - time.monotonic()))
        if self._result is not None:
            self._result.wait(deadline, self._session.require_open)

    def wait_departed(self, deadline: float) -> None:
        """Wait until the input is copied and may be written again, by the host too. Raises as `wait`."""
        try:
            self._input.wait(deadline, self._progress)
        except BpsError as exc:
            if self._input.has_failed:
                self.unit.give_up(exc)
                if self._result is not None:
                    self._result.end(exc)
                    if not self._result.is_queued:  # else copies of complete partitions may be going on
                        self._result.release_memory()
            raise

    def _progress(self) -> None:
        """Start deferred pushes, for which other ranks may wait. Raise the error that the job was aborted with."""
        self._session.port.check()
        self._session.tensors.start_committed()

    def join(self, caller: Stream) -> None:
        """Make later work on *caller* wait for the result on the device. Call `wait` before."""
        if self._result is not None and self._result.event is not None:
            caller.wait(self._result.event)


class DeviceBytes(NamedTuple):
    """Ranges of a unit on one device, to be read or written after all events *after*. *keeps* holds the memory."""

    device: Device
    ranges: Sequence[DeviceRange]
    after: Sequence[Event]
    keeps: object

    @classmethod
    def of(cls, memory: TensorInput) -> DeviceBytes | None:
        """Return those of *memory*, which is a whole unit; None if it does not lie on a device."""
        location = memory.location
        if location is None:
            return None
        return cls(location.device, [DeviceRange(0, memory.address, memory.nbytes)], [location.ready], memory.owner)


class _CopyThreads(NamedTuple):
    to_host: ToHostCopier
    to_device: ToDeviceCopier


class IslandSums(Protocol):
    """Rounds that start with a sum on the GPUs of this machine (`collectives.islands.Islands`)."""

    def send(self, unit: Unit, source: DeviceBytes, target: DeviceBytes) -> DeviceRound: ...
    def close(self, timeout_s: float, why: BpsError) -> bool: ...


class Devices:
    """The devices of *session*, and the rounds under way between them and its segments. Any thread."""

    def __init__(self, session: DeviceSession) -> None:
        self._session = session
        self.staging_buffers = StagingBuffers(session, self.pin)
        self.direct = GpuDirectMemory(session)
        self._lock = threading.Lock()
        self._threads: dict[str, _CopyThreads] = {}
        self._islands: IslandSums | None = None
        self._pinned: dict[tuple[str, int], tuple[Device, Segment] | None] = {}  # by (kind of device, address)
        self._has_warned = False

    def located(self, memory: TensorInput) -> TensorInput:
        """Return *memory*; with the setting host_device as memory of the host device, unless it is shared memory."""
        session = self._session
        if (not session.settings.host_device or memory.location is not None
                or session.memory.locate(memory.address, memory.nbytes) is not None):
            return memory
        return replace(memory, location=host_device().location())

    def send(self, unit: Unit, source: DeviceBytes, target: DeviceBytes | None) -> DeviceRound:
        """Begin the next round of *unit* with the input *source*; its sum is copied to *target*, if given.

        Input that *source* does not cover lies in the unit's staging already. Returns at once. Raises `BusyError` if
        the previous round was not waited for. Raises `DeviceError` if the device cannot reach the segments.
        """
        session, device_input = self._session, self.direct.input_of(unit, source.device)
        threads = self._require_threads(source.device)
        self.pin(source.device, device_input.segments(session.memory.segments))
        to_device = None if target is None else self._prepare(target, unit).to_device
        if unit.islands:
            assert target is not None, "islands hand their sums on from device to device"
            return self._require_islands(source.device).send(unit, source, target)
        round, readers = unit.begin(unit.nbytes)
        result = None if target is None else self.result_copy(unit, round, target)

        def copied(partition: PartitionCopy, begin_ns: int) -> None:
            session.port.land(unit.first_part + partition.number, round, *device_input.entry(partition.number),
                              partition.nbytes, begin_ns)
            if partition.number == 0 and to_device is not None and result is not None:  # none is complete before
                to_device.add(result)

        copy = CopyToHost(f"round {round} of {unit.name!r} from {source.device.name}", unit.priority,
                          device_input.address, partition_copies(unit.nbytes, unit.stride, source.ranges), source.after,
                          copied, source.keeps, readers, device_input.on_device)
        if unit.n_parts > 0:
            threads.to_host.add(copy)
        else:
            copy.end()
            if to_device is not None and result is not None:
                to_device.add(result)
        return DeviceRound(session, unit, round, copy, result)

    def bring(self, unit: Unit, round: int, target: DeviceBytes) -> CopyToDevice:
        """Copy the sum of *round* to *target* as it becomes complete. Returns at once; raises as `send`."""
        threads = self._prepare(target, unit)
        result = self.result_copy(unit, round, target)
        threads.to_device.add(result)
        return result

    def result_copy(self, unit: Unit, round: int, target: DeviceBytes,
                    partitions: Sequence[PartitionCopy] | None = None) -> CopyToDevice:
        """Return the copy of the sum of *round* to *target*, for `copy_to_device`.

        It copies *partitions* and waits for all of them; None: those that *target* covers.
        """
        session = self._session

        def wait(number: int, timeout_s: float) -> bool:
            return unit.look(number, round, timeout_s)

        def copied(partition: PartitionCopy, begin_ns: int) -> None:
            session.port.note_arrival(unit.first_part + partition.number, round, partition.nbytes, begin_ns)

        chosen = partition_copies(unit.nbytes, unit.stride, target.ranges) if partitions is None else partitions
        result = CopyToDevice(f"the sum of round {round} of {unit.name!r} for {target.device.name}", unit.priority,
                              chosen, target.after, lambda offset: unit.result_address(round, offset), wait, copied,
                              target.keeps, whole=partitions is not None, on_device=unit.on_device)
        unit.add_reader(round, result)
        return result

    def copy_to_host(self, device: Device, copy: CopyToHost) -> None:
        self._require_threads(device).to_host.add(copy)

    def copy_to_device(self, device: Device, copy: CopyToDevice) -> None:
        self._require_threads(device).to_device.add(copy)

    def close(self, timeout_s: float, why: Callable[[], BpsError]) -> bool:
        """End all copies with *why*. False if a device call does not return in time: the segments must stay mapped."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            islands, self._islands = self._islands, None
        islands_ended = islands is None or islands.close(timeout_s, why())
        with self._lock:
            threads, self._threads = [thread for pair in self._threads.values() for thread in pair], {}
        for thread in threads:
            thread.close(why)
        ended = [thread.join(max(0.0, deadline - time.monotonic())) for thread in threads]
        if not self.staging_buffers.close(deadline) or not all(ended) or not islands_ended:
            return False
        with self._lock:
            for device, segment in filter(None, self._pinned.values()):
                device.unpin(segment.address)
            self._pinned.clear()
        self.direct.close()
        return True

    def _require_islands(self, device: Device) -> IslandSums:
        with self._lock:
            self._session.require_open()
            if self._islands is None:
                self._islands = hooks.make_islands(self._session, self, device)
            return self._islands

    def _require_threads(self, device: Device) -> _CopyThreads:
        with self._lock:
            self._session.require_open()
            threads = self._threads.get(device.name)
            if threads is None:
                threads = self._threads[device.name] = _CopyThreads(
                    ToHostCopier(device, f"bpsfast-from-{device.name}"),
                    ToDeviceCopier(device, f"bpsfast-to-{device.name}"))
            return threads

    def _prepare(self, target: DeviceBytes, unit: Unit) -> _CopyThreads:
        threads = self._require_threads(target.device)
        self.pin(target.device, unit.result_segments())
        return threads

    def pin(self, device: Device, segments: Sequence[Segment]) -> None:
        """Pin *segments* for *device* and others of its kind. Raises as `Device.pin`."""
        kind = device.name.partition(":")[0]
        if all((kind, segment.address) in self._pinned for segment in segments):
            return
        with self._lock:
            for segment in segments:
                if (kind, segment.address) not in self._pinned:
                    self._pinned[kind, segment.address] = self._pin(device, segment)

    def _pin(self, device: Device, segment: Segment) -> tuple[Device, Segment] | None:
        """Pin *segment*. If a read-only one cannot be pinned: log one warning, and return None."""
        try:
            device.pin(segment.address, segment.nbytes, segment.writable)
        except DeviceError as exc:
            if segment.writable:
                raise
            if not self._has_warned:
                self._has_warned = True
                log.warning("results are copied to %s from pages that are not pinned, which blocks and is slow: %s",
                            device.name, exc)
            return None
        return device, segment
