"""Cut the largest partitions finer where whole partitions are too coarse for the optimal shares. Pure.

With many machines a share is a few partitions, and one more or less is many per cent of it: VGG-16 in partitions of
4 MB is 9.5 % above the optimum on 32 machines and 16 helpers. Smaller partitions everywhere would cost a message each
(BytePS's only remedy); cutting the largest tensors is enough, for the largest are placed first and the finer ones fill
what they leave.
"""
from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from ..messages import UnitPlan
from .assignment import assign, machine_times_s
from .partition import MAX_PARTS, part_of, round_up
from .shares import Machine, optimal_shares

#: A placement this near the bound is left alone: what is measured on real links differs by more.
TOLERANCE = 0.015
#: No partition is cut below this: at 100 Gbit/s half as many bytes take as long as deciding about them in Python.
LEAST_NBYTES = 512 << 10

#: A cut that brings less than this is not made: it costs messages.
_WORTHWHILE = 0.002
#: So often at most a placement is tried before all partitions are halved once.
_ROUNDS = 32


def refine(units: Sequence[UnitPlan], machines: Sequence[Machine], owned: Sequence[int] | None = None,
           page_nbytes: int = 4096, most_parts: int = MAX_PARTS, fixed: Container[int] = ()) -> list[UnitPlan]:
    """Return *units* with the partitions of the largest cut in two, four, ... where that pays, and renumbered.

    *owned* are the bytes that each machine owns already and keeps; units whose number is in *fixed* are left alone. A
    partition stays a whole number of pages of at least `LEAST_NBYTES`, its number below *most_parts*. Where the
    placement is near the bound as it is, or no cut brings it nearer, *units* are returned as they are.
    """
    best = list(units)
    sizes = [sum(part.wire_nbytes for part in unit.parts) for unit in units]
    if not any(sizes) or sum(machine.has_ranks for machine in machines) < 2:
        return best
    own = list(owned) if owned is not None else [0] * len(machines)
    nbytes = sum(own) + sum(sizes)
    # nobody gives up what it owns
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
