"""The layout of a model's gradients: the units (tensors or buckets) they travel in, and the memory of their input.

Each gradient is a `Gradient`.

A job that tunes itself declares the same tensors several times, with other partitions and fusion; one layout is pushed
in a step. Inputs stay where the first layout has them: a tensor that is fused with others than there is copied beside
its new neighbours when it is ready, and one that travels alone is pushed from where it lies.
"""
from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..gpu import arrays
from ..orchestration.errors import BpsError
from ..orchestration.messages import TensorSpec
from .input_memory import Region
from .session import Session
from .unit import Unit

_PAGE_NBYTES = 4096


class LayoutSizes(NamedTuple):
    """How a layout's tensors are partitioned, fused (bytes) and sent; 0: by the job's settings."""

    partition_nbytes: int = 0
    fusion_nbytes: int = 0
    n_streams: int = 0


class UnitGradients:
    """The gradients of one unit, and how many of them are not ready in this step."""

    __slots__ = ("gradients", "n_left", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.gradients: list[Gradient] = []
        self.n_left = len(unit.members)


class Gradient:
    """One gradient: its place in a unit, the memory of its input, and whether it is ready in this step.

    `address` is where its unit wants the input: at `offset` of `block`, the unit's input memory. `region` is where the
    trainer writes it, and `array` that memory with the gradient's dtype and shape: both are those of *first*, the same
    gradient in the first layout. `views` are read-only results of even and odd rounds.
    """

    __slots__ = ("address", "array", "block", "group", "is_alone", "is_ready", "name", "nbytes", "offset", "region",
                 "shape", "unit", "views", "wire_name")

    def __init__(self, name: str, wire_name: str, group: UnitGradients, first: Gradient | None) -> None:
        unit = group.unit
        member = unit.members[wire_name]
        self.block = unit.staging
        region = self.block.part(member.offset, member.nbytes)
        self.name, self.wire_name = name, wire_name
        self.group, self.unit = group, unit
        self.offset, self.nbytes, self.shape = member.offset, member.nbytes, member.shape
        self.address = region.address
        self.region: Region = region if first is None else first.region
        self.array: np.ndarray[Any, Any] = (region.array.view(unit.dtype).reshape(member.shape) if first is None
                                            else first.array)
        self.views: list[np.ndarray[Any, Any] | None] = [None, None]
        self.is_alone = len(unit.members) == 1
        self.is_ready = False
        group.gradients.append(self)

    def view(self, round: int) -> np.ndarray[Any, Any]:
        """Return the result of *round*, which is complete: the same memory every other round."""
        parity = round & 1
        found = self.views[parity]
        if found is None:
            found = self.views[parity] = self.unit.member_view(self.unit.members[self.wire_name], round)
        return found


class GradientLayout:
    """Layout *number* of *specs* (by the trainer's names), declared with *sizes*; 0 is the first. Returns at once.

    *device*: on which all tensors lie, if on one. Not thread-safe until it is laid out; then only its gradients change.
    """

    def __init__(self, session: Session, specs: Mapping[str, TensorSpec], number: int, sizes: LayoutSizes,
                 device: str | None = None) -> None:
        self.sizes, self.device = sizes, device
        self.gradients: dict[str, Gradient] = {}  # by priority, the highest first
        self.groups: list[UnitGradients] = []  # the most urgent first
        self._session = session
        self._own: list[Region] = []  # input memory that belongs to this layout
        ending = f"~{number}" if number else ""
        self.wires = {name: spec.name + ending for name, spec in specs.items()}
        declared = [msgspec.structs.replace(spec, name=self.wires[name], group=spec.group and spec.group + ending,
                                            **sizes._asdict()) for name, spec in specs.items()]
        if device is not None and session.settings.gpu_direct:
            session.devices.direct.cover(arrays.device_of(device), declared)
        session.tensors.declare(declared, lenient=True)

    @property
    def is_committed(self) -> bool:
        """Whether all ranks have declared it and all nodes are ready for it. Raises what the job refused it with."""
        return all(self._session.tensors.unit_nowait(wire) is not None for wire in self.wires.values())

    @property
    def units(self) -> list[Unit]:
        """Its units, once each, the most urgent first; waits for the commit if it is not laid out."""
        if self.groups:
            return [group.unit for group in self.groups]
        return list(dict.fromkeys(self._session.tensors.unit(wire) for wire in self.wires.values()))

    def lay_out(self, by_priority: Sequence[str], first: GradientLayout | None = None) -> None:
        """Wait for the commit and find input memory for every unit, where *first* has it as far as that is possible.

        *first*: the first layout; None: this one. Raises `CapacityError` if there is none; nothing was kept.
        """
        units = {name: self._session.tensors.unit(self.wires[name]) for name in by_priority}
        own_of = {wire: name for name, wire in self.wires.items()}
        lacking = []
        for unit in dict.fromkeys(units.values()):
            block = None if first is None else _block(unit, [first.gradients[own_of[wire]] for wire in unit.members])
            if block is not None:
                unit.use_staging(block)
            elif not unit.has_staging:
                lacking.append(unit)
        rounded = [-(-max(unit.nbytes, 1) // _PAGE_NBYTES) * _PAGE_NBYTES for unit in lacking]
        if lacking:  # one request for all: one segment
            memory, offset = self._session.memory.allocate(sum(rounded)), 0
            self._own.append(memory)
            for unit, nbytes in zip(lacking, rounded):
                unit.use_staging(memory.part(offset, nbytes))
                offset += nbytes
        groups = {unit: UnitGradients(unit) for unit in dict.fromkeys(units.values())}
        self.gradients = {name: Gradient(name, self.wires[name], groups[unit], None if first is None
                                         else first.gradients[name]) for name, unit in units.items()}
        self.groups = list(groups.values())

    def begin_step(self) -> None:
        """Let no gradient be ready."""
        for group in self.groups:
            group.n_left = len(group.unit.members)
        for gradient in self.gradients.values():
            gradient.is_ready = False

    def abandon(self) -> None:
        """Retire those units of the layout that were committed, because this rank cannot have all of them."""
        units: list[Unit] = []
        for wire in self.wires.values():
            with contextlib.suppress(BpsError):
                unit = self._session.tensors.unit_nowait(wire)
                if unit is not None and unit not in units:
                    units.append(unit)
        if units:
            self._session.retire(units)

    def retire(self, timeout_s: float, keeps_input: bool) -> None:
        """Retire its units, once their last rounds are complete; and, unless *keeps_input*, release its input memory.

        Raises `StallError` or `PeerLostError` as `push_pull`, if a round that was not waited for does not complete.
        """
        units = self.units
        users = self._session.extension(users_of_names)
        if any(users[wire] > 1 for wire in self.wires.values()):
            return  # another object with the same names pushes them too
        for unit in units:
            if unit.in_flight:
                unit.wait(unit.round, timeout_s)
        self._session.retire(units)
        if not keeps_input:
            self.release_input()

    def release_input(self) -> None:
        own, self._own = self._own, []
        for memory in own:
            self._session.memory.release(memory)


def users_of_names(session: Session) -> Counter[str]:
    """Return how many `Gradients` of *session* push each name on the wire (`Session.extension`)."""
    return Counter()


def _block(unit: Unit, gradients: Sequence[Gradient]) -> Region | None:
    """Return the memory of *gradients* (*unit*'s members in the first layout) if they lie there as in the unit."""
    members = list(unit.members.values())
    first = gradients[0]
    begin = first.offset - members[0].offset
    if any(gradient.block is not first.block or gradient.offset - begin != member.offset
           for member, gradient in zip(members, gradients)):
        return None
    if begin < 0 or begin + unit.nbytes > first.block.array.nbytes:
        return None
    return first.block if begin == 0 else first.block.part(begin, unit.nbytes)
