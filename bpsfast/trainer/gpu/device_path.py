"""Gradients on a device: collected until their unit (a tensor or a bucket) is whole, then sent as one round."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...gpu.copies import DeviceRange
from ...gpu.device import Stream
from ...orchestration.errors import UnsupportedError
from ..tensor_input import TensorInput
from ..unit import Unit
from . import DeviceSession
from .devices import DeviceBytes, DeviceRound


class _Member(NamedTuple):
    """One tensor of a unit, at *offset*: where it lies on a device, and where its sum goes."""

    offset: int
    source: TensorInput
    target: TensorInput | None


class _Sent(NamedTuple):
    """A round that was sent: the address of each member's sum, by offset, and the streams that its owners work on."""

    round: DeviceRound
    address_at: dict[int, int]
    callers: list[Callable[[], Stream]]


class DevicePath:
    """The units of one owner (`Gradients`). Tensors of one unit may come from several threads, one after another."""

    def __init__(self, session: DeviceSession) -> None:
        self._session = session
        self._gathered: dict[str, list[_Member]] = {}
        self._sent: dict[str, _Sent] = {}  # the last round of each unit

    def add(self, unit: Unit, offset: int, source: TensorInput, target: TensorInput | None) -> None:
        """Add the tensor of *unit* at *offset*, which lies at *source*; its sum goes to *target*.

        Raises `UnsupportedError` if it does not lie on the device of the others. Nothing was added.
        """
        members = self._gathered.get(unit.name, [])
        first = members[0].source if members else source
        for each in (source, target):
            if each is not None and _device(each) != _device(first):
                raise UnsupportedError(f"tensors of one model lie on {_device(first)} and on {_device(each)}. A rank "
                                       "has one device")
        self._gathered[unit.name] = [*members, _Member(offset, source, target)]

    def push(self, unit: Unit) -> None:
        """Push *unit*, which is whole, from the device, or from its staging memory if none of it lies on one."""
        if not self.send(unit):
            unit.push()

    def send(self, unit: Unit) -> bool:
        """Begin the next round of the whole *unit*, as `Devices.send`; return False if none of it lies on a device."""
        members = self._gathered.get(unit.name)
        if members is None:
            return False
        if unit.on_device and len(members) < len(unit.members):
            raise UnsupportedError(f"{len(unit.members) - len(members)} of {len(unit.members)} tensors that are sent "
                                   f"together with {unit.name!r} do not lie on {_device(members[0].source)}. With "
                                   "BPSFAST_GPU_DIRECT=1 all must")
        del self._gathered[unit.name]
        targets = [member._replace(source=member.target) for member in members if member.target is not None]
        round = self._session.devices.send(unit, _bytes(members), _bytes(targets) if targets else None)
        self._sent[unit.name] = _Sent(round, {member.offset: member.source.address for member in targets}, [
            member.source.location.caller for member in targets if member.source.location is not None])
        return True

    def wait(self, unit: Unit, round: int, deadline: float) -> None:
        """Wait for *round* of *unit*, from a device or from the host. Raises as `Unit.wait`, and `DeviceError`."""
        sent = self._of(unit, round)
        if sent is not None:
            sent.round.wait(deadline)
        else:
            unit.wait(round, max(0.0, deadline - time.monotonic()))

    def finish(self, unit: Unit, round: int, deadline: float) -> None:
        """As `wait`; later work of the owners of its tensors waits for the copies of the sum."""
        self.wait(unit, round, deadline)
        sent = self._of(unit, round)
        if sent is not None:
            for caller in sent.callers:
                sent.round.join(caller())
            sent.callers.clear()

    def wait_departed(self, unit: Unit, round: int, deadline: float) -> None:
        """Wait until the input of *round* of *unit* is copied from its device, if it lay on one. Raises as `wait`."""
        sent = self._of(unit, round)
        if sent is not None:
            sent.round.wait_departed(deadline)

    def deliver(self, unit: Unit, round: int, offset: int, target: TensorInput, deadline: float) -> None:
        """Wait for *round*; later work of *target*'s owner finds the sum of the tensor at *offset* there."""
        assert target.location is not None, "the unit delivers to the host"
        self.wait(unit, round, deadline)
        sent = self._of(unit, round)
        if sent is not None and sent.address_at.get(offset) == target.address:
            sent.round.join(target.location.caller())
            return
        result = self._session.devices.bring(unit, round, _bytes([_Member(offset, target, None)]))
        result.wait(deadline, self._session.require_open)
        assert result.event is not None, "it is over"
        target.location.caller().wait(result.event)

    def _of(self, unit: Unit, round: int) -> _Sent | None:
        """Return *round* of *unit* if it was sent from a device."""
        found = self._sent.get(unit.name)
        return found if found is not None and found.round.unit is unit and found.round.round == round else None


def _device(memory: TensorInput) -> str:
    return memory.location.device.name if memory.location is not None else "the CPU"


def _bytes(members: Sequence[_Member]) -> DeviceBytes:
    """Return where the sources of *members* lie."""
    locations = [member.source.location for member in members if member.source.location is not None]
    return DeviceBytes(locations[0].device,
                       [DeviceRange(member.offset, member.source.address, member.source.nbytes) for member in members],
                       [location.ready for location in locations], [member.source.owner for member in members])
