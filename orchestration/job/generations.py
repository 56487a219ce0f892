"""Plans generations of tensors (placement, partitions, order), which all nodes prepare, then commit together. Pure."""
from __future__ import annotations

from collections.abc import Sequence, Set as AbstractSet

import msgspec

from ..errors import CapacityError
from ..messages import Commit, NewKeeper, NodeInfo, OwnerChange, Plan, Redo, TensorSpec, UnitPlan
from ..placement import codec_choice
from ..placement.assignment import assign, assign_among, owned_by
from ..placement.layout import lay_out
from ..placement.partition import MAX_PARTS, has_state, with_owners
from ..placement.rates import bound_remark, bounded, machines_of, ownable
from ..placement.rebalancing import shared
from ..placement.shares import Machine
from ..priority.send_queue import rank_parts
from ..store import workers_of
from .recovery import JobSnapshot, PartitionMove, note_changes


class Generations:
    """The committed units and at most one generation in progress.

    Numbers of generations and units are used once; those of partitions again once their unit is retired, because the
    board has a limited number of words. Numbers of a failed generation stay unused, so that a late message about it is
    not taken for one about another.

    Raises ConfigError if *policy* cannot place anything on *nodes*, unless helpers are still to come (*is_short*).
    """

    def __init__(self, nodes: Sequence[NodeInfo], *, policy: str, partition_nbytes: int, fusion_nbytes: int,
                 first_round: int = 1, is_short: bool = False) -> None:
        self._nodes: Sequence[NodeInfo] = ()
        self._policy = policy
        self._partition_nbytes = partition_nbytes
        self._fusion_nbytes = fusion_nbytes
        self._first_round = first_round
        self._owned: list[int] = []
        self._more: list[int] = []
        self._next_unit = 0
        self._next_part = 0
        self._free: list[tuple[int, int]] = []  # (first, number) of partitions' numbers that were retired
        self._retiring: dict[int, set[int]] = {}
        self._gone_from: dict[int, set[int]] = {}  # store's first unit -> ranks of workers that have retired theirs
        self._ready: set[int] = set()
        self._limits: dict[int, int] = {}  # by node that has refused more in the loss under way
        self._specs: Sequence[TensorSpec] = ()  # of what is in flight, as they were declared
        self.number = 0
        self.units: list[UnitPlan] = []
        self._indexed: tuple[list[UnitPlan]] = (self.units,)  # the list that `_index` was made of
        self._index: dict[int, UnitPlan] = {}
        self.in_flight: Plan | None = None
        #: By partition, the last owner change.
        self.changes: dict[int, OwnerChange] = {}
        self.update_nodes(nodes)
        if not is_short:
            assign([1], self._machines, policy)

    def resume(self, snapshot: JobSnapshot) -> None:
        """Take over the generations of a lost scheduler, as nodes report them."""
        self.units, self.number = list(snapshot.units), snapshot.generation
        self.changes = dict(snapshot.changes)
        self._more = [before if now < -1 else now for before, now in zip(self._more, snapshot.ownable_nbytes)]
        self._gone_from = {first: set(ranks) for first, ranks in snapshot.gone_from.items()}
        self._next_unit = snapshot.next_unit
        self._owned = self._owned_of(self.units)
        used = sorted(part.part for unit in self.units for part in unit.parts)
        self._next_part = used[-1] + 1 if used else 0
        self._free = [(before + 1, part - before - 1) for before, part in zip([-1, *used], used) if part > before + 1]

    def update_nodes(self, nodes: Sequence[NodeInfo], absent: AbstractSet[int] = frozenset()) -> None:
        """Use *nodes* from the next generation on: the same ones with other rates, and maybe more.

        Nothing is placed on those that are *absent*.
        """
        new = len(nodes) - len(self._nodes)
        self._owned += [0] * new
        self._more += ownable(nodes)[len(nodes) - new:]
        self._nodes, self._absent = nodes, set(absent)
        self._machines = machines_of(nodes)
        self._copy_rates = [node.copy_rate_bytes for node in nodes]
        self._page_nbytes = max(node.page_nbytes for node in nodes)

    def propose(self, specs: Sequence[TensorSpec]) -> Plan:
        """Begin the next generation with *specs*, which have priorities, the same ranks and the same `edition_of`.

        No generation may be in flight. Tensors of some ranks only are placed among their nodes and the helpers. What
        is to be compressed only where that pays is settled now. What owners keep state of is never a helper's: only
        nodes with ranks can save it with the model.

        Raises CapacityError, UnsupportedError, or ConfigError (if the policy cannot place anything on the machines of
        these ranks), and then nothing has begun.
        """
        assert self.in_flight is None, f"generation {self.number} is in flight"
        family, ranks = specs[0].edition_of, specs[0].ranks
        declared = specs
        owned = self._owned_beside(family)
        specs, choice, remark = self._settled(specs)
        most = max([MAX_PARTS - self._next_part, *(number for _, number in self._free)])
        keeps_state = any(has_state(spec) for spec in specs)
        candidates = self._candidates(ranks, helpers=not keeps_state)
        policy = self._policy
        if policy == "ps" and (keeps_state or all(machine.has_ranks for _, machine in candidates)):
            policy = "colocated"  # without a helper, those that were there are lost
        placed = lay_out(
            specs, [machine for _, machine in candidates], policy=policy,
            partition_nbytes=self._partition_nbytes, fusion_nbytes=self._fusion_nbytes, page_nbytes=self._page_nbytes,
            owned=[owned[node] for node, _ in candidates], more=[self._more[node] for node, _ in candidates],
            first_unit=self._next_unit, first_part=MAX_PARTS - most, is_within=len(self._nodes) == 1)
        placed = [with_owners(unit, lambda part: candidates[part.owner][0]) for unit in placed]
        units = self._numbered(self._for_workers(placed, family, most))
        nbytes = sum(owned) + sum(part.wire_nbytes for unit in units for part in unit.parts)
        if self._policy == "optimal" and not ranks and len(candidates) == len(self._machines):
            machines = bounded(self._machines, owned, self._more)
            remark = bound_remark(self._nodes, self._machines, machines, nbytes) or remark
        self.number += 1
        self._next_unit += len(units)
        self._ready = set()
        self._specs = declared
        self.in_flight = Plan(generation=self.number, units=tuple(units), remark=remark, choice=choice)
        return self.in_flight

    def _settled(self, specs: Sequence[TensorSpec]) -> tuple[list[TensorSpec], str, str]:
        """Return *specs* with each optional codec decided, and the texts for that (`codec_choice.settled`)."""
        candidates = self._candidates(specs[0].ranks, helpers=True)
        return codec_choice.settled(
            specs, [machine for _, machine in candidates], [self._copy_rates[node] for node, _ in candidates],
            self._policy, self._partition_nbytes, self._fusion_nbytes)

    def _owned_of(self, units: Sequence[UnitPlan]) -> list[int]:
        """Return the bytes of *units* that each node owns."""
        return owned_by(((part.wire_nbytes, part.owner) for unit in units for part in unit.parts), len(self._owned))

    def _owned_beside(self, family: str) -> list[int]:
        """Return the bytes that each node owns of what is pushed beside an edition of *family*."""
        others = [unit for unit in self.units if family and unit.edition_of == family]
        return [all_ - theirs for all_, theirs in zip(self._owned, self._owned_of(others))]

    def _candidates(self, ranks: Sequence[int], helpers: bool) -> list[tuple[int, Machine]]:
        """Return (node, machine) of those that may own tensors of *ranks* (empty: all): their nodes, and *helpers*."""
        return [(node.index, machine) for node, machine in zip(self._nodes, self._machines)
                if node.index not in self._absent
                and ((helpers and not node.ranks) or (node.ranks and (not ranks or set(node.ranks) & set(ranks))))]

    def _for_workers(self, units: Sequence[UnitPlan], family: str, most: int) -> list[UnitPlan]:
        """Return *units* of one *family* of editions, numbered anew; those with a store once for each worker.

        Raises CapacityError if they have more than *most* partitions.
        """
        made: list[UnitPlan] = []
        for unit in units:
            if unit.store is None:
                made.append(msgspec.structs.replace(unit, unit=self._next_unit + len(made), edition_of=family))
                continue
            workers = workers_of(unit.store, unit.ranks, [node.ranks for node in self._nodes])
            first = self._next_unit + len(made)
            made += [msgspec.structs.replace(unit, unit=first + i, ranks=theirs, store_unit=first,
                                             n_workers=len(workers)) for i, theirs in enumerate(workers)]
        n_parts = sum(len(unit.parts) for unit in made)
        if n_parts > most:
            raise CapacityError(f"stores for each worker bring these tensors to {n_parts} partitions, {most} are left "
                                "in this job; raise partition_bytes, or let the ranks of a node push together")
        return made

    def _numbered(self, units: Sequence[UnitPlan]) -> list[UnitPlan]:
        """Return *units* with consecutive partition numbers that no other unit has."""
        n_parts = sum(len(unit.parts) for unit in units)
        place = next((place for place, (_, number) in enumerate(self._free) if number >= n_parts), None)
        if place is None:
            first = self._next_part
            self._next_part += n_parts
        else:
            first, number = self._free[place]
            self._free[place:place + 1] = [(first + n_parts, number - n_parts)] if number > n_parts else []
        numbered = []
        for unit in units:
            parts = tuple(msgspec.structs.replace(part, part=first + i) for i, part in enumerate(unit.parts))
            first += len(parts)
            numbered.append(msgspec.structs.replace(unit, parts=parts, first_round=self._first_round))
        return numbered

    def retire(self, rank: int, numbers: Sequence[int], size: int, lost: AbstractSet[int] = frozenset()
               ) -> tuple[list[UnitPlan], list[int]]:
        """Note that *rank* does not need the committed units *numbers* any more.

        Returns the units that none of their ranks (of *size*, except those *lost*) needs now, which are forgotten, and
        the numbers that are not of a committed unit.
        """
        known = self._by_number
        for number in numbers:
            if number in known:
                self._retiring.setdefault(number, set()).add(rank)
        return (self._forget_retired([number for number in numbers if number in known], size, lost),
                [number for number in numbers if number not in known])

    def retire_without(self, size: int, lost: AbstractSet[int]) -> list[UnitPlan]:
        """Return the units that all their ranks have retired except those *lost*, which are forgotten."""
        return self._forget_retired(list(self._retiring), size, lost)

    def _forget_retired(self, numbers: Sequence[int], size: int, lost: AbstractSet[int]) -> list[UnitPlan]:
        known = self._by_number
        over = [number for number in numbers if not set(known[number].ranks or range(size)) - self._retiring[number]
                - lost]
        if not over:
            return []
        for number in over:
            if known[number].store is not None:
                self._gone_from.setdefault(known[number].store_unit, set()).update(self._retiring[number])
            del self._retiring[number]
            for part in known[number].parts:
                self._owned[part.owner] -= part.wire_nbytes
            self._free_numbers([part.part for part in known[number].parts])
        gone = set(over)
        self.units = [unit for unit in self.units if unit.unit not in gone]
        alive = {unit.store_unit for unit in self.units}
        self._gone_from = {first: ranks for first, ranks in self._gone_from.items() if first in alive}
        return [known[number] for number in over]

    def is_retiring(self, rank: int, tensors: Sequence[TensorSpec]) -> bool:
        """Whether *rank* has retired a unit with one of *tensors*, and other ranks or workers have not yet."""
        known = self._by_number
        retiring = [known[number] for number, ranks in self._retiring.items() if rank in ranks]
        gone = {first for first, ranks in self._gone_from.items() if rank in ranks}
        if gone:
            retiring += [unit for unit in self.units if unit.store_unit in gone]
        if not retiring:
            return False
        names = {spec.name for spec in tensors}
        return any(member.name in names for unit in retiring for member in unit.members)

    @property
    def _by_number(self) -> dict[int, UnitPlan]:
        """The committed units by number. With thousands of ranks and units it is not made for each message."""
        if self._indexed[0] is not self.units or len(self._index) != len(self.units):
            self._indexed = (self.units,)
            self._index = {unit.unit: unit for unit in self.units}
        return self._index

    def is_committed(self, name: str) -> bool:
        """Whether a committed unit has a tensor *name*."""
        return _has(self.units, name)

    def _free_numbers(self, parts: Sequence[int]) -> None:
        if not parts:
            return
        for part in parts:
            self.changes.pop(part, None)
        joined: list[tuple[int, int]] = []
        for first, number in sorted([*self._free, (parts[0], len(parts))]):
            if joined and sum(joined[-1]) == first:
                joined[-1] = joined[-1][0], joined[-1][1] + number
            else:
                joined.append((first, number))
        self._free = joined

    def can_own(self, node: int, more_nbytes: int) -> None:
        """Note how many more bytes *node* can own, -1 if its memory is not bounded."""
        self._more[node] = more_nbytes

    def ready(self, node: int, generation: int) -> Commit | None:
        """Note that *node* has prepared *generation*; return the commit if it was the last. Ignores late messages."""
        if self.in_flight is None or generation != self.number:
            return None
        self._ready.add(node)
        if self._unready():
            return None
        self.units += self.in_flight.units
        for unit in self.in_flight.units:
            for part in unit.parts:
                self._owned[part.owner] += part.wire_nbytes
        self.in_flight = None
        return Commit(generation=generation, order=tuple(rank_parts(self.units)))

    def abandon(self, generation: int) -> list[str]:
        """Drop *generation*, which a node cannot prepare; return its tensors' names, [] if it is not in progress."""
        if self.in_flight is None or generation != self.number:
            return []
        names = [member.name for unit in self.in_flight.units for member in unit.members]
        self.in_flight = None
        return names

    def not_ready(self, name: str) -> list[int]:
        """Return the nodes that still prepare the generation with tensor *name*, [] if it is not in progress."""
        return self._unready() if self.in_flight is not None and _has(self.in_flight.units, name) else []

    def in_the_way(self, name: str) -> list[int]:
        """Return the nodes that still prepare a generation without tensor *name*, if that is not committed."""
        return self._unready() if self.in_flight is not None and not _has(self.units, name) else []

    def _unready(self) -> list[int]:
        return [node for node in range(len(self._machines)) if node not in self._ready and node not in self._absent]

    # -- losses and newcomers ------------------------------------------------------------------------------------------

    def lose(self, node: int) -> Sequence[TensorSpec]:
        """Place nothing on *node* any more; return what was in progress, which is given up and to be proposed anew."""
        self._absent.add(node)
        return self.withdraw()

    def withdraw(self) -> Sequence[TensorSpec]:
        """Give up what is in progress, and return it, to be proposed anew."""
        withdrawn: Sequence[TensorSpec] = self._specs if self.in_flight is not None else ()
        self.in_flight = None
        return withdrawn

    def replace_lost(self, moves: Sequence[PartitionMove]) -> tuple[list[UnitPlan], list[OwnerChange]]:
        """Begin a generation in which partitions of lost nodes change owners; return units concerned and changes.

        What survivors own stays. Raises `CapacityError` if the nodes that could own them have refused too much for want
        of memory.
        """
        self.number += 1
        owned = [0 if node in self._absent else nbytes for node, nbytes in enumerate(self._owned)]
        more = [self._limits.get(node, rest) for node, rest in enumerate(self._more)]
        owners = assign_among([move.part.wire_nbytes for move in moves], bounded(self._machines, owned, more), owned,
                              lambda position: moves[position].candidates, self._is_wanted)
        own = owned_by(zip((move.part.wire_nbytes for move in moves), owners), len(owned))
        full = {node for node, most in self._limits.items() if own[node] > most}
        if full:  # a node without the last result of a partition cannot own it
            left = [move for move, owner in zip(moves, owners) if owner in full]
            nodes = sorted({node for move in left for node in move.candidates})
            limits = ", ".join(f"node {node} {self._limits[node]} bytes" for node in nodes if node in self._limits)
            nbytes = sum(move.part.wire_nbytes for move in left)
            raise CapacityError(
                f"{nbytes} bytes of partitions need another owner, and no memory is left for all of them at nodes "
                f"{nodes}, which have their last results: at most {limits} more")
        return self._reassigned(moves, owners)

    def limit(self, node: int, room_nbytes: int, refused_nbytes: int) -> None:
        """Give *node* at most *room_nbytes* of what changes owners, until that is committed.

        If it refuses again what it said that it has room for, give it half of that.
        """
        is_known = node not in self._limits and room_nbytes < refused_nbytes
        self._limits[node] = room_nbytes if is_known else refused_nbytes // 2

    def share(self, moves: Sequence[PartitionMove]) -> tuple[list[UnitPlan], list[OwnerChange]]:
        """Begin a generation in which newcomers, the candidates of *moves*, get their share; returns as `replace_lost`.

        As many partitions are moved as the policy's placement gains by.
        """
        self.number += 1
        machines = bounded(self._machines, self._owned, self._more)
        owners = shared([move.part.wire_nbytes for move in moves], [move.part.owner for move in moves],
                        [tuple(move.candidates) for move in moves], machines, self._owned, self._policy)
        moved = [(move, owner) for move, owner in zip(moves, owners) if owner != move.part.owner]
        return self._reassigned([move for move, _ in moved], [owner for _, owner in moved])

    @staticmethod
    def _reassigned(moves: Sequence[PartitionMove], owners: Sequence[int]
                    ) -> tuple[list[UnitPlan], list[OwnerChange]]:
        of = {move.part.part: owner for move, owner in zip(moves, owners)}
        units = [with_owners(unit, lambda part: of.get(part.part, part.owner))
                 for unit in {move.unit.unit: move.unit for move in moves}.values()]
        return units, [move.owner_change(owner) for move, owner in zip(moves, owners)]

    def owners_changed(self, units: Sequence[UnitPlan], changes: Sequence[OwnerChange], redone: Sequence[Redo] = (),
                       keepers: Sequence[NewKeeper] = ()) -> Commit:
        """Count on the new owners of *units*, for which all nodes are ready; return the commit. Rest as in `Recover`.
        """
        self._limits.clear()
        note_changes(self.changes, changes, redone, keepers)
        known = {unit.unit: unit for unit in units}
        self.units = [known.get(unit.unit, unit) for unit in self.units]
        self._owned = self._owned_of(self.units)
        return Commit(generation=self.number, order=tuple(rank_parts(self.units)))

    def _is_wanted(self, node: int) -> bool:
        """Whether the policy would place something on *node*, if there is a choice."""
        if self._policy not in ("colocated", "ps"):
            return True
        return self._machines[node].has_ranks == (self._policy == "colocated")


def _has(units: Sequence[UnitPlan], name: str) -> bool:
    return any(member.name == name for unit in units for member in unit.members)
