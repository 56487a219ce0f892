"""Tensors in, partitions with owners out: what a generation is planned from, and what a planner predicts from. Pure."""
from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..messages import TensorSpec, UnitPlan
from .assignment import assign
from .partition import plan_units
from .rates import bounded
from .refinement import refine
from .rows import ROWS
from .shares import Machine


def lay_out(specs: Sequence[TensorSpec], machines: Sequence[Machine], *, policy: str, partition_nbytes: int,
            fusion_nbytes: int, page_nbytes: int = 4096, owned: Sequence[int] | None = None,
            more: Sequence[int] | None = None, first_unit: int = 0, first_part: int = 0,
            is_within: bool = False) -> list[UnitPlan]:
    """Return the units of *specs*, cut into partitions that all have an owner (an index into *machines*).

    With policy "optimal" the largest partitions are cut finer where the placement would else miss the optimum by more
    than `refinement.TOLERANCE`. *owned* are the bytes that each machine owns already, *more* those that its memory lets
    it own besides (-1: any). *is_within*: there is no machine but one (`plan_units`).

    Raises
    ------
    UnsupportedError
        If a dtype or shape cannot be summed.
    CapacityError
        If the job would have more partitions than one can have.
    ConfigError
        If *policy* is unknown or cannot place anything on *machines*.
    """
    units = plan_units(specs, first_unit, first_part, partition_nbytes, fusion_nbytes, page_nbytes, is_within)
    if more is not None:
        waste = len(units) * page_nbytes  # the last partition of each takes a whole number of pages
        more = [rest if rest < 0 else max(0, rest - waste) for rest in more]
        machines = bounded(machines, owned if owned is not None else [0] * len(machines), more)
    if policy == "optimal":
        asked = {spec.name for spec in specs if spec.partition_nbytes and not spec.edition_of}
        fixed = {unit.unit for unit in units if unit.op == ROWS or any(member.name in asked for member in unit.members)}
        units = refine(units, machines, owned, page_nbytes, fixed=fixed)
    parts = [part for unit in units for part in unit.parts]
    keys = [unit.unit << 16 | index for unit in units for index in range(len(unit.parts))]
    owners = iter(assign([part.wire_nbytes for part in parts], machines, policy, owned, keys))
    return [
        msgspec.structs.replace(
            unit, parts=tuple(msgspec.structs.replace(part, owner=next(owners)) for part in unit.parts))
        for unit in units
    ]
