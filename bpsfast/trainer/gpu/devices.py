"""The devices that a session's tensors lie on: their lines, made when the first tensor comes, and pinned segments."""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ...gpu.copy_to_device import CopyToDevice, ToDeviceCopier
from ...gpu.copy_to_host import CopyToHost, ToHostCopier
from ...gpu.device import Device, Event
from ...gpu.partition_copy import DeviceRange, PartitionCopy, cut
from ...orchestration.errors import BpsError, DeviceError
from ...pyx.pages import Segment
from .device_round import DeviceRound
from .gpu_direct import GpuDirectMemory
from .staging_buffers import StagingBuffers

if TYPE_CHECKING:
    from ...collectives.islands import Islands
    from ..session import Session
    from ..tensor_input import TensorInput
    from ..unit import Unit

log = logging.getLogger("bpsfast.gpu")


class DeviceBytes(NamedTuple):
    """Bytes of a unit on one device: read, or written, after all of *after*. *keeps* holds the memory."""

    device: Device
    loads: Sequence[DeviceRange]
    after: Sequence[Event]
    keeps: object

    @classmethod
    def of(cls, memory: TensorInput) -> DeviceBytes | None:
        """Return those of a whole unit that is *memory*; None: that lies on no device."""
        place = memory.place
        if place is None:
            return None
        return cls(place.device, [DeviceRange(0, memory.address, memory.nbytes)], [place.ready], memory.owner)


class _Lines(NamedTuple):
    out: ToHostCopier
    back: ToDeviceCopier


class Devices:
    """What *session* has under way to and from devices. Any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.twins = StagingBuffers(session, self)
        self.direct = GpuDirectMemory(session)
        self._lock = threading.Lock()
        self._lines: dict[str, _Lines] = {}
        self._islands: Islands | None = None
        self._pinned: dict[tuple[str, int], tuple[Device, Segment] | None] = {}  # by kind of device and address
        self._has_warned = False

    def placed(self, memory: TensorInput) -> TensorInput:
        """Return *memory*; with the setting host_device as the host device's, unless it is shared memory."""
        session = self._session
        if (not session.settings.host_device or memory.place is not None
                or session.memory.locate(memory.address, memory.nbytes) is not None):
            return memory
        from ...gpu.host import host_device

        return replace(memory, place=host_device().place())

    def send(self, unit: Unit, source: DeviceBytes, target: DeviceBytes | None) -> DeviceRound:
        """Begin the next round of *unit* with what lies at *source*; its sum goes to *target*, if there is one.

        What *source* does not cover lies in the unit's staging already. Returns at once.

        Raises
        ------
        BusyError
            If the previous round was not waited for.
        DeviceError
            If the device cannot reach the segments.
        """
        session, device_input = self._session, unit.device_input(source.device)
        lines = self._require_lines(source.device)
        self.pin(source.device, device_input.segments(session.memory.segments))
        back = None if target is None else self._prepare(target, unit).back
        if unit.islands:
            assert target is not None, "the sum of an island is handed on by its devices"
            return self._require_islands(source.device).send(unit, source, target)
        round, readers = unit.begin(unit.nbytes)
        arrival = None if target is None else self.arrival(unit, round, target)

        def announce(piece: PartitionCopy, begin_ns: int) -> None:
            session.port.land(unit.first_part + piece.number, round, *device_input.entry(piece.number), piece.nbytes,
                              begin_ns)
            if piece.number == 0 and back is not None and arrival is not None:  # nothing can be complete before
                back.add(arrival)

        departure = CopyToHost(f"round {round} of {unit.name!r} from {source.device.name}", unit.urgency,
                              device_input.address, cut(unit.nbytes, unit.stride, source.loads), source.after, announce,
                              source.keeps, readers, device_input.on_device)
        if unit.n_parts > 0:
            lines.out.add(departure)
        else:
            departure.end()
            if back is not None and arrival is not None:
                back.add(arrival)
        return DeviceRound(session, unit, round, departure, arrival)

    def bring(self, unit: Unit, round: int, target: DeviceBytes) -> CopyToDevice:
        """Let the sum of *round* go to *target* as it becomes complete. Returns at once; raises as `send`."""
        lines = self._prepare(target, unit)
        arrival = self.arrival(unit, round, target)
        lines.back.add(arrival)
        return arrival

    def arrival(self, unit: Unit, round: int, target: DeviceBytes, pieces: Sequence[PartitionCopy] | None = None) -> CopyToDevice:
        """Return what brings *pieces* of the sum of *round* to *target*, and waits for all of them; None: those wanted
        there. For `add_back`.
        """
        session = self._session

        def wait(number: int, timeout_s: float) -> bool:
            return session.port.look(unit.first_part + number, round, timeout_s)

        def landed(piece: PartitionCopy, begin_ns: int) -> None:
            session.port.note_arrival(unit.first_part + piece.number, round, piece.nbytes, begin_ns)

        arrival = CopyToDevice(f"the sum of round {round} of {unit.name!r} for {target.device.name}", unit.urgency,
                          cut(unit.nbytes, unit.stride, target.loads) if pieces is None else pieces, target.after,
                          lambda offset: unit.result_address(round, offset), wait, landed, target.keeps,
                          whole=pieces is not None, on_device=unit.on_device)
        unit.add_reader(round, arrival)
        return arrival

    def add_out(self, device: Device, departure: CopyToHost) -> None:
        """Let *departure* have its turn on the line from *device*."""
        self._require_lines(device).out.add(departure)

    def add_back(self, device: Device, arrival: CopyToDevice) -> None:
        """Let *arrival* have its turn on the line to *device*."""
        self._require_lines(device).back.add(arrival)

    def close(self, timeout_s: float, why: Callable[[], BpsError]) -> bool:
        """End all lines, what is under way with *why*. False: a device does not come back from a call, and the segments
        must stay mapped.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            islands, self._islands = self._islands, None
        has_left = islands is None or islands.close(timeout_s, why())
        with self._lock:
            lines, self._lines = [line for pair in self._lines.values() for line in pair], {}
        for line in lines:
            line.close(why)
        ended = [line.join(max(0.0, deadline - time.monotonic())) for line in lines]
        if not self.twins.close(deadline) or not all(ended) or not has_left:
            return False
        with self._lock:
            for device, segment in filter(None, self._pinned.values()):
                device.unpin(segment.address)
            self._pinned.clear()
        self.direct.close()
        return True

    def _require_islands(self, device: Device) -> Islands:
        with self._lock:
            self._session.require_open()
            if self._islands is None:
                from ...collectives.islands import Islands

                self._islands = Islands(self._session, self, device)
            return self._islands

    def _require_lines(self, device: Device) -> _Lines:
        with self._lock:
            self._session.require_open()
            lines = self._lines.get(device.name)
            if lines is None:
                lines = _Lines(ToHostCopier(device, f"bpsfast-from-{device.name}"),
                               ToDeviceCopier(device, f"bpsfast-to-{device.name}"))
                self._lines[device.name] = lines
            return lines

    def _prepare(self, target: DeviceBytes, unit: Unit) -> _Lines:
        lines = self._require_lines(target.device)
        self.pin(target.device, unit.result_segments())
        return lines

    def pin(self, device: Device, segments: Sequence[Segment]) -> None:
        """Let *device*, and others of its kind, reach *segments* by itself. Raises `DeviceError` as `Device.pin`."""
        kind = device.name.partition(":")[0]
        if all((kind, segment.address) in self._pinned for segment in segments):
            return
        with self._lock:
            for segment in segments:
                if (kind, segment.address) not in self._pinned:
                    self._pinned[kind, segment.address] = self._pin(device, segment)

    def _pin(self, device: Device, segment: Segment) -> tuple[Device, Segment] | None:
        """Pin *segment*; None, with one warning, if it is only read, and cannot be."""
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
