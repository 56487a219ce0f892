"""Lays out tensors as units and partitions with owners, for generations and for the planner's predictions. Pure.

With many machines a share is a few partitions, and one more or less is many per cent of it: VGG-16 in partitions of 4
MB is 9.5 % above the optimum on 32 machines and 16 helpers. Smaller partitions everywhere would cost a message each
(BytePS's only remedy). Cutting the largest tensors is enough, because the largest are placed first and the finer ones
fill the gaps.
"""
from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from ..messages import TensorSpec, UnitPlan
from .assignment import assign, machine_times_s
from .partition import MAX_PARTS, ROWS, part_of, plan_units, round_up, with_owners
from .rates import bounded
from .shares import Machine, optimal_shares

#: A placement this near the bound is left alone, because measurements on real links differ by more.
TOLERANCE = 0.015
#: No partition is cut below this: at 100 Gbit/s half as many bytes take as long as deciding about them in Python.
LEAST_NBYTES = 512 << 10

#: A cut that gains less than this is not made, because it costs messages.
_WORTHWHILE = 0.002
#: The most tries of a placement before all partitions are halved once.
_ROUNDS = 32


def refine(units: Sequence[UnitPlan], machines: Sequence[Machine], owned: Sequence[int] | None = None,
           page_nbytes: int = 4096, most_parts: int = MAX_PARTS, fixed: Container[int] = ()) -> list[UnitPlan]:
    """Return *units* with the partitions of the largest cut in two, four, ... where that pays, and renumbered.

    *owned* are the bytes that each machine owns already and keeps; units whose number is in *fixed* are left alone. A
    partition stays a whole number of pages of at least `LEAST_NBYTES`, its number below *most_parts*. If the placement
    is near the bound as it is, or no cut brings it nearer, *units* are returned unchanged.
    """
    best = list(units)
    sizes = [sum(part.wire_nbytes for part in unit.parts) for unit in units]
    if not any(sizes) or sum(machine.has_ranks for machine in machines) < 2:
        return best
    own = list(owned) if owned is not None else [0] * len(machines)
    nbytes = sum(own) + sum(sizes)
    # no machine gives up what it owns
    bound_s = max(optimal_shares(machines, nbytes).time_s, *machine_times_s(own, machines, nbytes))
    best_s = _time_s(best, machines, own)
    tried = best
    while best_s > bound_s * (1 + TOLERANCE):
        finer = _cut_largest(tried, page_nbytes, most_parts, fixed)
        if finer is None:
            break
        tried = finer
        time_s = _time_s(tried, machines, own)
        if time_s < best_s - bound_s * _WORTHWHILE:
            best, best_s = tried, time_s
    return best


def _time_s(units: Sequence[UnitPlan], machines: Sequence[Machine], owned: Sequence[int]) -> float:
    """Return the time of the worst machine once *units* are placed on top of what is owned."""
    sizes = [part.wire_nbytes for unit in units for part in unit.parts]
    own = list(owned)
    for nbytes, owner in zip(sizes, assign(sizes, machines, "optimal", owned)):
        own[owner] += nbytes
    return max(machine_times_s(own, machines))


def _cut_largest(units: Sequence[UnitPlan], page_nbytes: int, most_parts: int, fixed: Container[int]
                 ) -> list[UnitPlan] | None:
    """Return *units* with the partitions of a few halved: of those with the largest partitions, the largest units.

    None if nothing can be cut.
    """
    able = [i for i, unit in enumerate(units) if unit.unit not in fixed and unit.parts
            and _half(unit.parts[0].nbytes, page_nbytes) >= LEAST_NBYTES]
    if not able:
        return None
    able.sort(key=lambda i: (-units[i].parts[0].nbytes, -units[i].nbytes, i))
    chosen = set(able[:max(1, len(units) // _ROUNDS)])
    part = next(unit.parts[0].part for unit in units if unit.parts)
    cut = []
    for i, unit in enumerate(units):
        stride = _half(unit.parts[0].nbytes, page_nbytes) if i in chosen else unit.stride
        offsets = range(0, unit.nbytes, stride)
        cut.append(msgspec.structs.replace(unit, stride=stride, parts=tuple(
            part_of(unit, number, offset, min(stride, unit.nbytes - offset))
            for number, offset in enumerate(offsets, start=part))))
        part += len(offsets)
    return cut if part <= most_parts else None


def _half(nbytes: int, page_nbytes: int) -> int:
    return round_up(-(-nbytes // 2), page_nbytes)


def lay_out(specs: Sequence[TensorSpec], machines: Sequence[Machine], *, policy: str, partition_nbytes: int,
            fusion_nbytes: int, page_nbytes: int = 4096, owned: Sequence[int] | None = None,
            more: Sequence[int] | None = None, first_unit: int = 0, first_part: int = 0,
            is_within: bool = False) -> list[UnitPlan]:
    """Return the units of *specs*, cut into partitions that all have an owner (an index into *machines*).

    With policy "optimal" the largest partitions are cut finer where the placement would else miss the optimum by more
    than `TOLERANCE`. *owned* are the bytes that each machine owns already, *more* those that its memory lets it own
    besides (-1: any). *is_within*: there is only one machine (`plan_units`). Raises `UnsupportedError` if a dtype or
    shape cannot be summed; `CapacityError` if the job would have more partitions than one can have; `ConfigError` if
    *policy* is unknown or cannot place anything on *machines*.
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
    return [with_owners(unit, lambda part: next(owners)) for unit in units]
