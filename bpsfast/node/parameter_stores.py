"""What a node keeps of partitions that it owns: weights and momentum, used by the parts of all workers."""
from __future__ import annotations

from dataclasses import dataclass

from ..orchestration.messages import PartPlan, UnitPlan
from ..orchestration.placement.partition import ITEM_NBYTES
from ..orchestration.store import has_momentum, width_of
from ..pyx.engine import Engine
from .regions import Arena, Place


@dataclass
class ParameterStore:
    """The store of one partition. `handle` is the engine's; `place` has the weights, then the momentum; `n_users` are
    the workers whose units use it."""

    handle: int
    place: Place
    nbytes: int
    n_users: int = 0
    is_engaged: bool = False  # a part was added with it: the engine lets it go with the last one


class ParameterStores:
    """All stores of one node, in the memory of *arena*. The control loop's own."""

    def __init__(self, engine: Engine, arena: Arena) -> None:
        self._engine = engine
        self._arena = arena
        self._stores: dict[tuple[int, int], ParameterStore] = {}  # by the first worker's unit, and the partition's offset

    def take(self, unit: UnitPlan, part: PartPlan, coming_nbytes: int) -> ParameterStore:
        """Return the store of *part*, which this node owns, for one more worker; *coming_nbytes*: as `Arena.allocate`.

        Raises
        ------
        CapacityError
            If there is no memory for it.
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
        kernel, nbytes = stores.address(unit.dtype), kept_nbytes(unit, part)
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
        """Let a worker's unit go, whose parts the engine has forgotten; with the last one goes the store's memory."""
        store.n_users -= 1
        if store.n_users:
            return
        if not store.is_engaged:
            self._engine.drop_store(store.handle)
        self._arena.release(store.place, store.nbytes)
        self._stores = {key: other for key, other in self._stores.items() if other is not store}


def kept_nbytes(unit: UnitPlan, part: PartPlan) -> int:
    """Return the bytes of weights and momentum that the owner of *part* keeps."""
    if unit.store is None:
        return 0
    return part.nbytes // ITEM_NBYTES[unit.dtype] * (width_of(unit.dtype) or 0) * (1 + has_momentum(unit.store))
