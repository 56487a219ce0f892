"""The devices that a session's tensors lie on: their lines, made when the first tensor comes, and pinned segments."""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..orchestration.errors import BpsError, DeviceError
from ..pyx.pages import Segment
from .arrivals import Arrival, Arrivals
from .crossing import Crossing
from .departures import Departure, Departures
from .device import Device, Event
from .pieces import Load, Piece, cut
from .twins import Twins

if TYPE_CHECKING:
    from ..trainer.session import Session
    from ..trainer.tensor_input import TensorInput
    from ..trainer.unit import Unit
    from .islands import Islands

log = logging.getLogger("bpsfast.device")


class Bytes(NamedTuple):
    """Bytes of a unit on one device: read, or written, after all of *after*. *keeps* holds the memory."""

    device: Device
    loads: Sequence[Load]
    after: Sequence[Event]
    keeps: object

    @classmethod
    def of(cls, memory: TensorInput) -> Bytes | None:
        """Return those of a whole unit that is *memory*; None: that lies on no device."""
        place = memory.place
        if place is None:
            return None
        return cls(place.device, [Load(0, memory.address, memory.nbytes)], [place.ready], memory.owner)


class _Lines(NamedTuple):
    out: Departures
    back: Arrivals


class Devices:
    """What *session* has under way to and from devices. Any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.twins = Twins(session, self)
        self._lock = threading.Lock()
        self._lines: dict[str, _Lines] = {}
        self._islands: Islands | None = None
        self._held: list[tuple[Event, object]] = []
        self._pinned: dict[tuple[str, int], tuple[Device, Segment]] = {}  # by kind of device and address
        self._last: dict[tuple[int, int], Arrival] = {}  # by unit and parity: who still may read that result

    def placed(self, memory: TensorInput) -> TensorInput:
        """Return *memory*; with the setting host_device as the host device's, unless it is shared memory."""
        session = self._session
        if (not session.settings.host_device or memory.place is not None
                or session.memory.locate(memory.address, memory.nbytes) is not None):
            return memory
        from .host import host_device

        return replace(memory, place=host_device().place())

    def send(self, unit: Unit, source: Bytes, target: Bytes | None) -> Crossing:
        """Begin the next round of *unit* with what lies at *source*; its sum goes to *target*, if there is one.

        What *source* does not cover lies in the unit's staging already. Returns at once.

        Raises
        ------
        BusyError
            If the previous round was not waited for.
        DeviceError
            If the device cannot reach the segments.
        """
        session, staging = self._session, unit.staging
        lines = self._require_lines(source.device)
        self.pin(source.device, [session.memory.segments["rank", staging.segment]])
        if target is not None:
            self._prepare(target, unit)
        self._reap()
        if unit.islands:
            assert target is not None, "the sum of an island is handed on by its devices"
            return self._require_islands(source.device).send(unit, source, target)
        round = unit.begin(unit.nbytes)
        title = f"round {round} of {unit.name!r} from {source.device.name}"

        def announce(piece: Piece, begin_ns: int) -> None:
            session.port.land(unit.first_part + piece.number, round, staging.segment,
                              staging.offset + piece.number * unit.stride, piece.nbytes, begin_ns)

        departure = Departure(title, unit.urgency, staging.address, cut(unit.nbytes, unit.stride, source.loads),
                              [*source.after, *self.unread(unit, round)], announce, source.keeps)
        if unit.n_parts == 0:
            departure.end()
        else:
            lines.out.add(departure)
        return Crossing(session, unit, round, departure, None if target is None else self.bring(unit, round, target))

    def bring(self, unit: Unit, round: int, target: Bytes) -> Arrival:
        """Let the sum of *round* go to *target* as it becomes complete. Returns at once; raises as `send`."""
        arrival = self.arrival(unit, round, target, cut(unit.nbytes, unit.stride, target.loads))
        arrival.left = [piece for piece in arrival.left if piece.copies]
        self.add_back(target.device, arrival)
        return arrival

    def arrival(self, unit: Unit, round: int, target: Bytes, pieces: Sequence[Piece]) -> Arrival:
        """Return what brings *pieces* of the sum of *round* to *target*, for `add_back`; raises as `send`."""
        session = self._session
        self._prepare(target, unit)

        def wait(number: int, timeout_s: float) -> bool:
            return session.port.look(unit.first_part + number, round, timeout_s)

        def landed(piece: Piece, begin_ns: int) -> None:
            session.port.note_arrival(unit.first_part + piece.number, round, piece.nbytes, begin_ns)

        arrival = Arrival(f"the sum of round {round} of {unit.name!r} for {target.device.name}", unit.urgency,
                          pieces, target.after, lambda offset: unit.result_address(round, offset), wait, landed,
                          target.keeps)
        self._last[unit.number, round & 1] = arrival
        return arrival

    def add_out(self, device: Device, departure: Departure) -> None:
        """Let *departure* have its turn on the line from *device*."""
        self._require_lines(device).out.add(departure)

    def add_back(self, device: Device, arrival: Arrival) -> None:
        """Let *arrival* have its turn on the line to *device*."""
        self._require_lines(device).back.add(arrival)

    def unread(self, unit: Unit, round: int) -> list[Event]:
        """Return after what *round* may be announced: copies of the round whose result's place it takes. Once."""
        before = self._last.pop((unit.number, round & 1), None)
        return [before.event] if before is not None and before.event is not None else []

    def hold(self, event: Event, keeps: object) -> None:
        """Keep *keeps* until *event*: memory that something enqueued reads or writes."""
        with self._lock:
            self._held.append((event, keeps))

    def _reap(self) -> None:
        with self._lock:
            self._held = [each for each in self._held if not each[0].done()]

    def close(self, timeout_s: float, why: Callable[[], BpsError]) -> bool:
        """End all lines, what is under way with *why*. False: a device does not come back from a call, and the segments
        must stay mapped.
        """
        with self._lock:
            islands, self._islands = self._islands, None
        islands_closed = islands is None or islands.close(timeout_s, why())
        with self._lock:
            lines, self._lines = list(self._lines.values()), {}
        closed = [islands_closed] + [line.close(timeout_s, why) for pair in lines for line in pair]
        self.twins.close()
        if not all(closed):
            return False
        with self._lock:
            for device, segment in self._pinned.values():
                device.unpin(segment.address)
            self._pinned.clear()
            self._last.clear()
            self._held.clear()
        return True

    def _require_islands(self, device: Device) -> Islands:
        with self._lock:
            self._session.require_open()
            if self._islands is None:
                from .islands import Islands

                self._islands = Islands(self._session, self, device)
            return self._islands

    def _require_lines(self, device: Device) -> _Lines:
        with self._lock:
            self._session.require_open()
            lines = self._lines.get(device.name)
            if lines is None:
                lines = _Lines(Departures(device, f"bpsfast-from-{device.name}"),
                               Arrivals(device, f"bpsfast-to-{device.name}"))
                self._lines[device.name] = lines
            return lines

    def _prepare(self, target: Bytes, unit: Unit) -> _Lines:
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
                if (kind, segment.address) in self._pinned:
                    continue
                try:
                    device.pin(segment.address, segment.nbytes, segment.writable)
                except DeviceError as exc:
                    if segment.writable:
                        raise
                    log.warning("results are copied to %s from pages that are not pinned, which blocks and is slow: %s",
                                device.name, exc)
                self._pinned[kind, segment.address] = device, segment
