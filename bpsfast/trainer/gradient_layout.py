"""An edition of a model's gradients: the same tensors, declared once more with partitions and fusion of their own.

Only one edition is pushed in a step. Inputs stay where the first edition has them: a tensor that is fused with others
than in the first one is copied beside its new neighbours when it is ready, what stands alone is pushed from its place.
"""
from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from ..gpu import arrays
from ..orchestration.errors import BpsError
from ..orchestration.messages import MemberPlan, TensorSpec
from .input_memory import Region
from .unit import Unit

if TYPE_CHECKING:
    from .session import Session

_PAGE_NBYTES = 4096


class LayoutSizes(NamedTuple):
    """How an edition's tensors are cut and packed, in bytes, and sent; 0: as the job's settings say."""

    partition_nbytes: int = 0
    fusion_nbytes: int = 0
    n_streams: int = 0


class Home(NamedTuple):
    """Where a tensor's input lies for good: at `offset` of `block`, input memory of one unit of the first edition."""

    block: Region
    offset: int


class GradientLayout:
    """Edition *number* of *specs* (by the trainer's names), declared as *cut* says; 0 is the first. Returns at once.
    *device*: from which all tensors come.

    Not thread-safe until it is laid out; after that it does not change.
    """

    def __init__(self, session: Session, specs: Mapping[str, TensorSpec], number: int, cut: LayoutSizes,
                 device: str | None = None) -> None:
        self.cut = cut
        self.device = device
        self.units: dict[str, Unit] = {}
        self.members: dict[str, MemberPlan] = {}
        self.places: dict[str, Region] = {}
        self.homes: dict[str, Home] = {}  # where its inputs lie: what later editions are laid out to
        self.views: tuple[dict[str, np.ndarray[Any, Any]], ...] = {}, {}
        self._session = session
        self._own: list[Region] = []  # input memory that is this edition's alone
        ending = f"~{number}" if number else ""
        self.wires = {name: spec.name + ending for name, spec in specs.items()}
        declared = [msgspec.structs.replace(spec, name=self.wires[name], group=spec.group and spec.group + ending,
                                            **cut._asdict()) for name, spec in specs.items()]
        if device is not None and session.settings.gpu_direct:
            session.devices.direct.cover(arrays.device_of(device), declared)
        session.tensors.declare(declared, lenient=True)

    @property
    def is_committed(self) -> bool:
        """Whether all ranks have declared it and all nodes are ready for it. Raises what the job refused it with."""
        return all(self._session.tensors.unit_nowait(wire) is not None for wire in self.wires.values())

    @property
    def distinct(self) -> list[Unit]:
        """Its units, each once."""
        return list(dict.fromkeys(self.units.values()))

    def lay_out(self, by_urgency: Sequence[str], homes: Mapping[str, Home]) -> None:
        """Wait for the commit and find input memory for every unit, in *homes* as far as they lie as the unit wants.

        Raises
        ------
        CapacityError
            If there is none; nothing was kept.
        """
        units = {name: self._session.tensors.unit(self.wires[name]) for name in by_urgency}
        own_of = {wire: name for name, wire in self.wires.items()}
        homeless = []
        for unit in dict.fromkeys(units.values()):
            block = _block(unit, [homes.get(own_of[wire]) for wire in unit.members])
            if block is not None:
                unit.use_staging(block)
            elif not unit.has_staging:
                homeless.append(unit)
        rounded = [-(-max(unit.nbytes, 1) // _PAGE_NBYTES) * _PAGE_NBYTES for unit in homeless]
        if homeless:  # one request for all: one segment
            memory, offset = self._session.memory.allocate(sum(rounded)), 0
            self._own.append(memory)
            for unit, nbytes in zip(homeless, rounded):
                unit.use_staging(memory.part(offset, nbytes))
                offset += nbytes
        for name, wire in self.wires.items():
            member = units[name].members[wire]
            self.members[name] = member
            self.places[name] = units[name].staging.part(member.offset, member.nbytes)
        self.units = units
        self.homes = {name: Home(unit.staging, self.members[name].offset) for name, unit in units.items()}

    def abandon(self) -> None:
        """Give up what this rank has of an edition that it cannot have whole."""
        units: list[Unit] = []
        for wire in self.wires.values():
            with contextlib.suppress(BpsError):
                unit = self._session.tensors.unit_nowait(wire)
                if unit is not None and unit not in units:
                    units.append(unit)
        if units:
            self._session.retire(units)

    def retire(self, timeout_s: float, keeps_input: bool) -> None:
        """Give up its units, once their last rounds are complete; and, unless *keeps_input*, its input memory.

        Raises
        ------
        StallError, PeerLostError
            As `push_pull`, if a round that nobody has waited for does not complete.
        """
        tensors = self._session.tensors
        units = self.distinct or list(dict.fromkeys(tensors.unit(wire) for wire in self.wires.values()))
        if any(self._session.n_users[wire] > 1 for wire in self.wires.values()):
            return  # another object with the same names pushes them too
        for unit in units:
            if unit.in_flight:
                unit.wait(unit.round, timeout_s)
        self._session.retire(units)
        if not keeps_input:
            self.release_input()

    def release_input(self) -> None:
        """Give back the input memory that is this edition's alone."""
        own, self._own = self._own, []
        for memory in own:
            self._session.memory.release(memory)


def _block(unit: Unit, homes: Sequence[Home | None]) -> Region | None:
    """Return the memory of *homes*, those of *unit*'s members in its order, if they lie there as in the unit."""
    members = list(unit.members.values())
    first = homes[0]
    if first is None:
        return None
    begin = first.offset - members[0].offset
    for member, home in zip(members, homes):
        if home is None or home.block is not first.block or home.offset - begin != member.offset:
            return None
    if begin < 0 or begin + unit.nbytes > first.block.array.nbytes:
        return None
    return first.block if begin == 0 else first.block.part(begin, unit.nbytes)
