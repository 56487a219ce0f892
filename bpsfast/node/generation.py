"""One plan as a node has prepared it: what it uses for each unit, where results appear, whom it still waits for."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..orchestration.codec import CodecSpec
from ..orchestration.messages import Extent, PartPlan, Plan, UnitPlan, UnitReady
from .codec_state import CodedPart
from .parameter_stores import ParameterStore
from .regions import Arena, Place, page_round


def is_of(unit: UnitPlan, ranks: Sequence[int]) -> bool:
    """Whether one of *ranks* pushes *unit*."""
    return bool(ranks) and (not unit.ranks or not set(ranks).isdisjoint(unit.ranks))


@dataclass
class UnitResources:
    """What this node uses for one unit: parts of the engine, expected writes, memory."""

    ranks: tuple[int, ...] = ()  # who pushes it, if not all
    names: tuple[str, ...] = ()  # of its tensors
    parts: list[PartPlan] = field(default_factory=list)
    bound: list[tuple[int, int]] = field(default_factory=list)  # (node, part)
    places: list[tuple[Arena, Place, int]] = field(default_factory=list)
    codec: CodecSpec | None = None  # if it is compressed here
    dtype: str = ""
    coded: list[CodedPart] = field(default_factory=list)
    parameter_stores: list[ParameterStore] = field(default_factory=list)  # that its parts use
    extents: dict[int, Extent] = field(default_factory=dict)  # part -> where ranks here read its result, if they do
    arriving: dict[int, tuple[int, int]] = field(default_factory=dict)  # part -> where its owner writes it, by parity
    owned: dict[int, list[tuple[Arena, int, int]]] = field(default_factory=dict)  # part -> what only its owner needs
    partials: dict[int, Place] = field(default_factory=dict)  # part -> where the sum of ranks here lies, if it has one

    def absorb(self, other: UnitResources) -> None:
        """Use what *other* does, too."""
        self.bound += [bound for bound in other.bound if bound not in self.bound]
        self.places += other.places
        self.coded += other.coded
        self.arriving |= other.arriving
        self.owned |= other.owned
        self.partials |= other.partials

    def give_up(self, part: int) -> None:
        """Give back what this node needs only as the owner of *part*: (arena, address, bytes) each."""
        for arena, address, nbytes in self.owned.pop(part, []):
            at = next(i for i, (theirs, place, length) in enumerate(self.places)
                      if theirs is arena and 0 <= address - place.address < page_round(max(1, length)))
            _, place, length = self.places.pop(at)
            first, last = address - place.address, address - place.address + page_round(max(1, nbytes))
            arena.release(place.beyond(first), nbytes)
            for begin, end in ((0, first), (last, page_round(max(1, length)))):
                if end > begin:
                    self.places.append((arena, place.beyond(begin), end - begin))


@dataclass
class Generation:
    """A prepared plan: where results of its parts appear, and which peers have not said where theirs do, or where this
    node writes to. All its units are of the same ranks, or of workers of the same store."""

    plan: Plan
    unit_resources: dict[int, UnitResources] = field(default_factory=dict)
    extents: dict[int, Extent] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    announced: bool = False
    is_owner_change: bool = False  # of committed units: their owners change (`succession`)

    @property
    def names(self) -> set[str]:
        """Names of all tensors in it."""
        return {member.name for unit in self.plan.units for member in unit.members}

    def concerns(self, ranks: Sequence[int]) -> bool:
        """Whether one of *ranks* pushes what is in it."""
        return any(is_of(unit, ranks) for unit in self.plan.units)

    def ready_units(self, rank: int) -> tuple[UnitReady, ...]:
        """Return what *rank* is told once it is committed."""
        return tuple(UnitReady(plan=unit, extents=tuple(self.extents[part.part] for part in unit.parts))
                     for unit in self.plan.units if is_of(unit, [rank]))
