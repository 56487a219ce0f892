"""Installs a plan's units in this node's memory and engine, partition by partition.

    owner            result here (both parities); a slot per wire peer with ranks of it; inputs in node order;
                     weights and momentum, if it keeps them: once for the units of all workers
    member           partial here if several of its ranks are local; the owner's result arrives here (a wire: tcp, rdma)
                     or is read where the owner keeps it (shm)
    neither          a node without a rank that pushes it, and which does not own it: nothing
"""
from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import kernels
from ..orchestration.errors import CapacityError
from ..orchestration.messages import Extent, NodeInfo, PartPlan, UnitPlan
from ..orchestration.placement.partition import ITEM_NBYTES, ROWS, part_rows, round_after
from ..pyx.direct import format_channel
from ..pyx.engine import Engine
from .codec_state import CodedPart, PartCodec, part_codec
from .generation import Generation, ParameterStore, ParameterStores, UnitResources
from .partition_role import PartitionRole
from .regions import Arena, Place, Regions, page_round
from .transport import Link, WireLink, wire
from .transport.shm import ShmLink

log = logging.getLogger("bpsfast.node")


class NodeParts(NamedTuple):
    """The objects of this node that plans are installed in; see `PlanInstaller`."""

    me: NodeInfo
    engine: Engine
    regions: Regions
    links: Mapping[int, Link]
    sources: Mapping[int, int]
    role: PartitionRole
    stores: ParameterStores
    sums: bool


class UnitInstaller:
    """Installs the units of one plan, while its generation is prepared.

    *room*: bytes by kind of arena that will be allocated; *purpose*: for errors.

    Raises `CapacityError` if the machine has not enough memory; nothing was allocated. Where only channels do not fit,
    the units get none, and this node sums what their ranks would.
    """

    def __init__(self, parts: NodeParts, room: dict[str, int], purpose: str) -> None:
        (self._me, self._engine, self._regions, self._links, self._sources, self._role, self._stores,
         self._sums) = parts
        self._room = room  # what is not allocated yet
        self._purpose = purpose
        me, regions = parts.me, parts.regions
        wanted = [(arena, room[arena.kind]) for arena in (regions.results, regions.partials, regions.slots,
                                                          regions.frames, regions.states, regions.stores)]
        shown = ", ".join(f"{kind}s {nbytes}" for kind, nbytes in room.items())
        regions.require(wanted, f"{purpose} on node {me.index} ({shown} bytes)")
        self._has_channels = room["channel"] > 0
        if self._has_channels:
            try:
                regions.require([*wanted, (regions.channels, room["channel"])], f"direct sums on node {me.index}")
            except CapacityError as exc:
                self._without_channels(exc)

    def _without_channels(self, why: CapacityError) -> None:
        log.warning("%s: tensors of %s are summed by their node, and not by their ranks", why, self._purpose)
        self._has_channels = False

    def _allocate_channel(self, resources: UnitResources, nbytes: int) -> Place | None:
        """Return memory for a channel; None if it does not fit, now or between what is allocated."""
        try:
            return self._allocate(resources, self._regions.channels, nbytes)
        except CapacityError as exc:
            self._without_channels(exc)
            return None

    def put(self, unit: UnitPlan, generation: Generation, resources: UnitResources) -> None:
        """Allocate for *unit*, bind what is written to this node, and tell the engine.

        Everything is recorded in *resources* at once, so that it can be released if a later step fails.
        """
        resources.ranks, resources.is_average = unit.ranks, unit.average
        resources.names = tuple(member.name for member in unit.members)
        coded = self._role.is_coded(unit)
        if coded:
            resources.codec, resources.dtype = unit.codec, unit.dtype
        here = [part for part in unit.parts if self._role.appears_here(unit, part)]
        places = self._place_on_device(resources, [part for part in here if self._role.is_direct(unit, part)])
        direct = set(places)
        self._role.count_direct(unit, here, direct)
        places |= self._side_by_side(resources, self._regions.results,
                                     [part for part in here if part.part not in places])
        channel_nbytes = self._role.channel_nbytes(unit)
        channel = self._allocate_channel(resources, channel_nbytes) if channel_nbytes and self._has_channels else None
        if channel is not None:
            n_ranks = len(self._role.members_of(unit.ranks).local)
            format_channel(channel.address, n_ranks, round_after(unit.first_round, -1))
            generation.channels[unit.unit] = channel
        for part in unit.parts:
            outputs = (0, 0)
            if part.part in places:
                even, odd = places[part.part]
                outputs = even.address, odd.address
                generation.extents[part.part] = Extent(node=self._me.index, segment=even.segment,
                                                       offset_even=even.offset, offset_odd=odd.offset,
                                                       nbytes=part.nbytes, on_device=part.part in direct)
            if part.owner != self._me.index and not self._role.members_of(unit.ranks).local:
                continue
            if part.owner == self._me.index:
                arguments, store = self.owned(unit, part, outputs, resources, unit.first_round)
                self._engine.add_owned(part.part, **arguments)
                if store is not None:
                    store.is_engaged = True
            else:
                self._engine.add_member(part.part, **self.member(unit, part, outputs, resources, unit.first_round))
            resources.parts.append(part)

    def _codec(self, unit: UnitPlan, part: PartPlan, resources: UnitResources) -> PartCodec:
        """Return the codec of *part* with its state, which begins as zeros."""
        assert unit.codec is not None, "only then it is coded"
        states = dict.fromkeys(("error", "momentum", "error_back"), 0)
        sizes = self._role.states_of(unit, part)
        for name, nbytes in sizes.items():
            states[name] = self._allocate(resources, self._regions.states, nbytes).address
            ctypes.memset(states[name], 0, nbytes)
        resources.coded.append(CodedPart(part.part, part.offset, part.nbytes, part.owner == self._me.index,
                                       tuple((states[name], nbytes) for name, nbytes in sizes.items())))
        return part_codec(unit.codec, unit.dtype, part.nbytes // ITEM_NBYTES[unit.dtype])._replace(
            error=states["error"], momentum=states["momentum"], error_back=states["error_back"])

    def owned(self, unit: UnitPlan, part: PartPlan, outputs: tuple[int, int], resources: UnitResources, first_round: int
              ) -> tuple[dict[str, Any], ParameterStore | None]:
        """Return the arguments of `Engine.add_owned` for *part*, which is summed into *outputs*, and its store, if any.

        Memory is allocated, and bound to the streams of the nodes that write here, from *first_round* on.
        """
        codec = self._codec(unit, part, resources) if self._role.is_coded(unit) else None
        if codec is not None:
            codec = codec._replace(frames=self.by_parity(resources, self._regions.frames, part.wire_nbytes))
        members = self._role.members_of(unit.ranks)
        before: list[tuple[int, int]] = []
        after: list[tuple[int, int]] = []
        for index in members.nodes:
            if index == self._me.index:
                continue
            link = wire(self._links[index])
            slot = 0
            if link is not None:
                nbytes = part.nbytes if codec is None else part.wire_nbytes
                slot = self._allocate(resources, self._regions.slots, nbytes).address
                resources.owned.setdefault(part.part, []).append((self._regions.slots, slot, nbytes))
                bind(resources, link, unit, part, (slot, slot), codec is not None, first_round)
            (before if index < self._me.index else after).append((self._sources[index], slot))
        if not members.local:
            resources.owned.setdefault(part.part, []).extend(
                (self._regions.results, address, part.nbytes) for address in outputs)
        store: ParameterStore | None = None
        if unit.store is not None:
            store = self._stores.take(unit, part, self._room["store"])
            resources.parameter_stores.append(store)
            if store.n_users == 1:  # made just now
                self._room["store"] -= page_round(store.nbytes)
        return dict(
            nbytes=part.nbytes, n_elements=part.nbytes // ITEM_NBYTES[unit.dtype], unit_offset=part.offset,
            kernel=kernel(unit.dtype, unit.op, self._sums), divisor=members.n_ranks if unit.average else 1,
            before=before, local=list(members.local), after=after, outputs=outputs, to_wire=bool(members.wired),
            shm_peers=[self._sources[index] for index, link in sorted(self._links.items())
                       if isinstance(link, ShmLink) and index in members.nodes],
            codec=codec, rows=_rows(unit, part), store=store.handle if store is not None else 0,
            first_round=unit.first_round,
        ), store

    def member(self, unit: UnitPlan, part: PartPlan, outputs: tuple[int, int], resources: UnitResources,
               first_round: int, partial: Place | None = None) -> dict[str, Any]:
        """Return the arguments of `Engine.add_member` for *part*, whose result is read at *outputs*.

        Memory is allocated, except *partial* if it is given, and bound to the owner's stream from *first_round* on, if
        the owner is reached over a wire.
        """
        codec = self._codec(unit, part, resources) if self._role.is_coded(unit) else None
        link = wire(self._links[part.owner])
        arriving = outputs
        if codec is not None and link is not None:
            arriving = self.by_parity(resources, self._regions.slots, part.wire_nbytes)
            codec = codec._replace(frames=arriving, results=outputs)
        if link is not None:
            bind(resources, link, unit, part, arriving, codec is not None, first_round)
            resources.arriving[part.part] = arriving
        nbytes = self._role.partial_nbytes(unit, part)
        if partial is None:
            partial = self._allocate(resources, self._regions.partials, nbytes) if nbytes else Place(0, 0, 0)
        if nbytes:
            resources.partials[part.part] = partial
        if codec is not None:
            codec = codec._replace(frame=partial.address)
        return dict(
            nbytes=part.nbytes, n_elements=part.nbytes // ITEM_NBYTES[unit.dtype], unit_offset=part.offset,
            kernel=kernel(unit.dtype, unit.op, self._sums), local=list(self._role.members_of(unit.ranks).local),
            owner=self._sources[part.owner], partial=(partial.address, partial.segment, partial.offset), codec=codec,
            rows=_rows(unit, part), first_round=unit.first_round,
        )

    def _allocate(self, resources: UnitResources, arena: Arena, nbytes: int) -> Place:
        place, _ = arena.allocate(nbytes, self._room[arena.kind])
        resources.places.append((arena, place, nbytes))
        self._room[arena.kind] -= page_round(nbytes)
        return place

    def _side_by_side(self, resources: UnitResources, arena: Arena, parts: Sequence[PartPlan], at: Place | None = None
                      ) -> dict[int, tuple[Place, Place]]:
        """Return places for both results of *parts*, from *at* on if that is given: one run for each parity.

        Neighbouring parts stay neighbours, so a rank needs few mappings.
        """
        even_nbytes = sum(page_round(part.nbytes) for part in parts)
        if at is None and parts:
            at = self._allocate(resources, arena, 2 * even_nbytes)
        found, offset = {}, 0
        for part in parts:
            assert at is not None, "it was allocated"
            found[part.part] = at.beyond(offset), at.beyond(offset + even_nbytes)
            offset += page_round(part.nbytes)
        return found

    def _place_on_device(self, resources: UnitResources, parts: Sequence[PartPlan]) -> dict[int, tuple[Place, Place]]:
        """Do as `_side_by_side`, in memory of a rank's device; return nothing if that has no room in one piece."""
        nbytes = 2 * sum(page_round(part.nbytes) for part in parts)
        at = self._regions.direct.fit(nbytes) if parts else None
        if at is None:
            return {}
        resources.places.append((self._regions.direct, at, nbytes))
        return self._side_by_side(resources, self._regions.direct, parts, at)

    def by_parity(self, resources: UnitResources, arena: Arena, nbytes: int) -> tuple[int, int]:
        """Return addresses of new memory for *nbytes* of even and of odd rounds."""
        at = self._allocate(resources, arena, 2 * page_round(nbytes)).address
        return at, at + page_round(nbytes)


def kernel(dtype: str, op: str, sums: bool) -> int:
    """Return the address of what adds up inputs of *dtype* by *op*; not *sums*: of what does nothing."""
    return kernels.address(dtype, "sum" if op == ROWS else op) if sums else kernels.no_sum_address()


def bind(resources: UnitResources, link: WireLink, unit: UnitPlan, part: PartPlan, at: tuple[int, int], coded: bool,
         first_round: int) -> None:
    """Expect *part* from *first_round* on over *link*, at these addresses by parity; record it in *resources*."""
    link.bind(part.part, *at, part.wire_nbytes if coded else part.nbytes, unit.n_streams, coded or unit.op == ROWS,
              first_round)
    resources.bound.append((link.index, part.part))


def _rows(unit: UnitPlan, part: PartPlan) -> tuple[int, int, int, int] | None:
    """Return what the engine needs for the frames of *part*, if its unit is a table that is summed by rows."""
    if unit.op != ROWS:
        return None
    n_rows, *row = unit.members[0].shape
    n_elements = math.prod(row)
    in_part = part_rows(n_rows, len(unit.parts), part.part - unit.parts[0].part)
    return in_part, unit.frame_rows, n_elements, n_elements * ITEM_NBYTES[unit.dtype]
