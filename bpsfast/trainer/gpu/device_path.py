"""Units whose tensors lie on a device: gathered until a unit is whole, then sent, and found again by whoever waits."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...gpu.device import Stream
from ...gpu.partition_copy import DeviceRange
from ...orchestration.errors import UnsupportedError
from .device_round import DeviceRound
from .devices import DeviceBytes

if TYPE_CHECKING:
    from ..session import Session
    from ..tensor_input import TensorInput
    from ..unit import Unit


class _Member(NamedTuple):
    """One tensor of a unit, from *offset* on: where it lies on a device, and where its sum shall be."""

    offset: int
    source: TensorInput
    target: TensorInput | None


class _Sent(NamedTuple):
    """A round that came from a device: to which addresses its sum goes, by offset, and who works with what is there."""

    crossing: DeviceRound
    address_at: dict[int, int]
    callers: list[Callable[[], Stream]]


class DevicePath:
    """The units of one object of a trainer. As thread-safe as that: tensors of one unit may come from several threads,
    one after another.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._gathered: dict[str, list[_Member]] = {}
        self._sent: dict[str, _Sent] = {}  # the last round of each unit

    def add(self, unit: Unit, offset: int, source: TensorInput, target: TensorInput | None) -> None:
        """Note that the tensor of *unit* at *offset* lies at *source*.

        Raises
        ------
        UnsupportedError
            If others of the unit lie on another device; nothing was noted.
        """
        members = self._gathered.get(unit.name, [])
        first = members[0].source if members else source
        for each in (source, target):
            if each is not None and _device(each) != _device(first):
                raise UnsupportedError(f"tensors of one model lie on {_device(first)} and on {_device(each)}: a rank "
                                       "has one device")
        self._gathered[unit.name] = [*members, _Member(offset, source, target)]

    def push(self, unit: Unit) -> None:
        """Push *unit*, which is whole, from the device, or from its staging memory if none of it lies on one."""
        if not self.send(unit):
            unit.push()

    def send(self, unit: Unit) -> bool:
        """Begin the next round of *unit*, which is whole; False, and nothing done, if none of it lies on a device.

        Raises as `Devices.send`.
        """
        members = self._gathered.get(unit.name)
        if members is None:
            return False
        if unit.on_device and len(members) < len(unit.members):
            raise UnsupportedError(f"{len(unit.members) - len(members)} of {len(unit.members)} tensors that are sent "
                                   f"together with {unit.name!r} do not lie on {_device(members[0].source)}: with "
                                   "BPSFAST_GPU_DIRECT=1 all do")
        del self._gathered[unit.name]
        targets = [member._replace(source=member.target) for member in members if member.target is not None]
        crossing = self._session.devices.send(unit, _bytes(members), _bytes(targets) if targets else None)
        self._sent[unit.name] = _Sent(crossing, {member.offset: member.source.address for member in targets}, [
            member.source.place.caller for member in targets if member.source.place is not None])
        return True

    def wait(self, unit: Unit, round: int, deadline: float) -> None:
        """Wait for *round* of *unit*, wherever it came from. Raises as `Unit.wait`, and `DeviceError`."""
        sent = self._of(unit, round)
        if sent is not None:
            sent.crossing.wait(deadline)
        else:
            unit.wait(round, max(0.0, deadline - time.monotonic()))

    def finish(self, unit: Unit, round: int, deadline: float) -> None:
        """As `wait`; what owners of arrays enqueue from now on comes after the sum got there, be it read or not."""
        self.wait(unit, round, deadline)
        sent = self._of(unit, round)
        if sent is not None:
            for caller in sent.callers:
                sent.crossing.join(caller())
            sent.callers.clear()

    def wait_departed(self, unit: Unit, round: int, deadline: float) -> None:
        """Wait until what *unit* pushed in *round* has left its device, if it was on one. Raises as `wait`."""
        sent = self._of(unit, round)
        if sent is not None:
            sent.crossing.wait_departed(deadline)

    def deliver(self, unit: Unit, round: int, offset: int, target: TensorInput, deadline: float) -> None:
        """Wait for *round*, and let whoever works with *target* find the sum of the tensor at *offset* there."""
        assert target.place is not None, "what lies on no device is delivered by the unit"
        self.wait(unit, round, deadline)
        sent = self._of(unit, round)
        if sent is not None and sent.address_at.get(offset) == target.address:
            sent.crossing.join(target.place.caller())
            return
        arrival = self._session.devices.bring(unit, round, _bytes([_Member(offset, target, None)]))
        arrival.wait(deadline, self._session.require_open)
        assert arrival.event is not None, "it is over"
        target.place.caller().wait(arrival.event)

    def _of(self, unit: Unit, round: int) -> _Sent | None:
        """Return how *round* of *unit* came from its device; None: it did not."""
        found = self._sent.get(unit.name)
        return found if found is not None and found.crossing.unit is unit and found.crossing.round == round else None


def _device(memory: TensorInput) -> str:
    return memory.place.device.name if memory.place is not None else "the CPU"


def _bytes(members: Sequence[_Member]) -> DeviceBytes:
    """Return *members*' sources together."""
    places = [member.source.place for member in members if member.source.place is not None]
    return DeviceBytes(places[0].device,
                 [DeviceRange(member.offset, member.source.address, member.source.nbytes) for member in members],
                 [place.ready for place in places], [member.source.owner for member in members])
