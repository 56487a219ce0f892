"""Records a scheduler's plan that this node has prepared: resources of each unit, places of results, awaited peers."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..orchestration.codec import CodecSpec
from ..orchestration.messages import Extent, PartPlan, Plan, UnitPlan, UnitReady
from ..orchestration.placement.partition import ITEM_NBYTES
from ..orchestration.store import has_momentum, width_of
from ..pyx.engine import Engine
from .codec_state import CodedPart
from .regions import Arena, Place, page_round


@dataclass
class ParameterStore:
    """The parameters of one partition: weights, then momentum, at `place`. `handle` is the engine's; `n_users`: workers
    whose units use it."""

    handle: int
    place: Place
    nbytes: int
    n_users: int = 0
    is_engaged: bool = False  # a part was added with it: the engine releases it with the last one


class ParameterStores:
    """All parameter stores of one node, in the memory of *arena*. For the control loop's thread."""

    def __init__(self, engine: Engine, arena: Arena) -> None:
        self._engine = engine
        self._arena = arena
        #: By the first worker's unit, and the partition's offset.
        self._stores: dict[tuple[int, int], ParameterStore] = {}

    def take(self, unit: UnitPlan, part: PartPlan, coming_nbytes: int) -> ParameterStore:
        """Return the store of *part*, which this node owns, for one more worker; *coming_nbytes*: see `Arena.allocate`.

        Raises `CapacityError` if there is no memory for it.
        """
        key = unit.store_unit, part.offset
        if key not in self._stores:
            self._stores[key] = self._make(unit, part, coming_nbytes)
        store = self._stores[key]
        store.n_users += 1
        return store

    def _make(self, unit: UnitPlan, part: PartPlan, coming_nbytes: int) -> ParameterStore:
        from ..kernels import stores  # compiles

        spec = unit.store
        assert spec is not None, "only called for units with a store"
        kernel, nbytes = stores.address(unit.dtype), stored_nbytes(unit, part)
        place, _ = self._arena.allocate(nbytes, coming_nbytes)
        half = nbytes // 2 if has_momentum(spec) else 0
        try:
            handle = self._engine.make_store(
                unit.n_workers, kernel=kernel, weights=place.address, momentum=place.address + half if half else 0,
                momentum_nbytes=half, learning_rate=spec.learning_rate, mu=spec.momentum, staleness=spec.staleness,
                backups=spec.backups)
        except BaseException:
            self._arena.release(place, nbytes)
            raise
        return ParameterStore(handle, place, nbytes)

    def give_back(self, store: ParameterStore) -> None:
        """Release the store for one worker, whose parts the engine has removed; the last one frees the memory."""
        store.n_users -= 1
        if store.n_users:
            return
        if not store.is_engaged:
            self._engine.drop_store(store.handle)
        self._arena.release(store.place, store.nbytes)
        self._stores = {key: other for key, other in self._stores.items() if other is not store}


def stored_nbytes(unit: UnitPlan, part: PartPlan) -> int:
    """Return the bytes of weights and momentum that the owner of *part* keeps."""
    if unit.store is None:
        return 0
    return part.nbytes // ITEM_NBYTES[unit.dtype] * (width_of(unit.dtype) or 0) * (1 + has_momentum(unit.store))


def is_of(unit: UnitPlan, ranks: Sequence[int]) -> bool:
    """Whether one of *ranks* pushes *unit*."""
    return bool(ranks) and (not unit.ranks or not set(ranks).isdisjoint(unit.ranks))


@dataclass
class UnitResources:
    """What this node uses for one unit: parts of the engine, expected writes, memory."""

    ranks: tuple[int, ...] = ()  # that push it, if not all
    is_average: bool = False
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
        """Add the resources of *other*."""
        self.bound += [bound for bound in other.bound if bound not in self.bound]
        self.places += other.places
        self.coded += other.coded
        self.arriving |= other.arriving
        self.owned |= other.owned
        self.partials |= other.partials

    def give_up(self, part: int) -> None:
        """Release what this node needs only as the owner of *part*."""
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
    """A prepared plan: where results of its parts appear, and which peers have not sent their addresses yet.

    All its units are of the same ranks, or of workers of the same store.
    """

    plan: Plan
    unit_resources: dict[int, UnitResources] = field(default_factory=dict)
    extents: dict[int, Extent] = field(default_factory=dict)
    channels: dict[int, Place] = field(default_factory=dict)  # unit -> where its ranks sum it directly, if they do
    awaited: set[int] = field(default_factory=set)
    announced: bool = False
    is_owner_change: bool = False  # its units are committed, and only their owners change

    @property
    def names(self) -> set[str]:
        """Names of all tensors in it."""
        return {member.name for unit in self.plan.units for member in unit.members}

    def concerns(self, ranks: Sequence[int]) -> bool:
        """Whether one of *ranks* pushes what is in it."""
        return any(is_of(unit, ranks) for unit in self.plan.units)

    def ready_units(self, rank: int) -> tuple[UnitReady, ...]:
        """Return the units that *rank* is told of after the commit."""
        return tuple(UnitReady(plan=unit, extents=tuple(self.extents[part.part] for part in unit.parts),
                               channel=self.channels[unit.unit][:2] if unit.unit in self.channels else ())
                     for unit in self.plan.units if is_of(unit, [rank]))
