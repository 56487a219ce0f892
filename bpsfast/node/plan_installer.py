"""From a plan to a generation of this node that is ready, and what is left of it until its units are retired.

A generation is prepared whole before anybody is told `Ready`: allocated, bound to lanes, known to the engine (which
keeps it inactive until the commit), shared with peers of this host, told to peers that write into it by RDMA. If
another node cannot, `drop` forgets it.
"""
from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from ..orchestration.errors import CapacityError, PeerLostError, ProtocolError
from ..orchestration.messages import Extent, NodeInfo, PartPlan, Plan, Recover, UnitPlan
from ..pyx.engine import Engine
from ..pyx.pages import Segment
from ..trace import Part
from .codec_state import CodedState
from .generation import Generation, UnitResources
from .gpu_direct import GpuDirect
from .owner_changes import SharedMemoryTakeover, Succession
from .parameter_stores import ParameterStores
from .partition_role import PartitionRole
from .regions import Chunk, Regions
from .transport import Link, wire
from .transport.rdma import PeerSlots, RdmaLink
from .transport.shm import PeerExtent, PeerExtents, PeerSegment, ShmLink
from .unit_installer import UnitInstaller, kernel

log = logging.getLogger("bpsfast.node")


class PlanInstaller:
    """Knows this node's place among its peers, and turns plans into regions, bindings and engine parts.

    Parameters
    ----------
    me, nodes
        This node and all nodes, in node order: the order in which partials are added.
    links, sources
        By node index: the connection, and the engine's source id.
    local
        Source ids of the local ranks, in local-rank order.
    sums
        False: parts move, but nothing is summed (`no_sum`).
    straight
        What of ranks' devices cards reach.
    """

    def __init__(
        self, me: NodeInfo, nodes: Sequence[NodeInfo], engine: Engine, regions: Regions,
        links: Mapping[int, Link], sources: Mapping[int, int], local: Sequence[int], sums: bool = True,
        gpu_direct: GpuDirect | None = None,
    ) -> None:
        self._me = me
        self._engine = engine
        self._regions = regions
        self._links = links
        self._sources = sources
        self._sums = sums
        self._gpu_direct = gpu_direct
        self._partition_role = PartitionRole(me, nodes, links, local, gpu_direct)
        self._shared: dict[int, tuple[Chunk, str]] = {}
        self._early: dict[int, list[tuple[int, PeerExtents | PeerSlots]]] = {}
        self._unit_resources: dict[int, UnitResources] = {}  # of committed units
        self._takeovers: dict[int, SharedMemoryTakeover] = {}  # of nodes of this host that are lost
        self._stores = ParameterStores(engine, regions.stores)
        self.parts: dict[int, Part] = {}
        self.first_parts: dict[int, int] = {}
        #: source -> bytes that go to it over a wire when all parts are pushed once.
        self.shares: dict[int, int] = {}
        #: part that this node owns -> sources that get its result over a wire
        self.readers: dict[int, tuple[int, ...]] = {}

    @property
    def uses_wires(self) -> bool:
        """Whether any peer is reached otherwise than by shared memory."""
        return any(wire(link) is not None for link in self._links.values())

    @property
    def ownable_nbytes(self) -> int:
        """Bytes of partitions that this node can own more, -1: any; with ranks its memory is first for their gradients.
        """
        return -1 if self._me.ranks else self._regions.ownable_nbytes(len(self._partition_role.members_of(()).wired))

    @property
    def room_nbytes(self) -> int:
        """About how many bytes of partitions this node has memory for to own them in place of lost nodes."""
        return self._regions.takeable_nbytes(len(self._partition_role.members_of(()).wired), has_results=bool(self._me.ranks))

    # -- preparing ----------------------------------------------------------------------------------------

    def prepare(self, plan: Plan) -> Generation:
        """Allocate, bind, install and share everything of *plan*; `Generation.awaited` says who has not done so.

        Raises
        ------
        CapacityError
            If the machine cannot hold it; nothing of it was kept.
        """
        unit_installer = self._unit_installer(self._partition_role.room(plan), f"generation {plan.generation}")
        generation = Generation(plan)
        try:
            for unit in plan.units:
                resources = generation.unit_resources[unit.unit] = UnitResources()
                unit_installer.put(unit, generation, resources)
        except BaseException:
            self.drop(generation)
            raise
        self._share(generation)
        if generation.concerns(self._me.ranks):
            generation.awaited = {part.owner for unit in plan.units for part in unit.parts
                                  if isinstance(self._links.get(part.owner), ShmLink)}
        generation.awaited |= {link.index for link in self._rdma_links()}
        for index, message in self._early.pop(plan.generation, ()):
            self._take(generation, index, message)
        return generation

    def _unit_installer(self, room: dict[str, int], purpose: str) -> UnitInstaller:
        return UnitInstaller(self._me, self._engine, self._regions, self._links, self._sources, self._partition_role,
                            self._stores, self._sums, room, purpose)

    def warm(self, kinds: Iterable[tuple[str, str]], owned_nbytes: int) -> None:
        """Compile what sums of these (dtype, op) need, and have memory at hand for owning so many bytes of partitions,
        as far as there is any: who comes late must not keep others waiting for that, or for it to be registered.
        """
        for dtype, op in kinds:
            kernel(dtype, op, self._sums)
        n_writers, room_nbytes = len(self._partition_role.members_of(()).wired), self.ownable_nbytes
        nbytes = owned_nbytes if room_nbytes < 0 else min(owned_nbytes, room_nbytes)
        made = []
        try:
            if n_writers:  # else it can own nothing that others own
                for arena, size in ((self._regions.results, 2 * nbytes), (self._regions.slots, n_writers * nbytes)):
                    made.append((arena, arena.allocate(size)[0], size))
        except CapacityError as exc:
            log.info("there is no memory at hand for %d bytes of partitions: %s", nbytes, exc)
        for arena, place, size in made:
            arena.release(place, size)

    def peer_said(self, generation: Generation | None, index: int, message: PeerExtents | PeerSlots) -> None:
        """Note where node *index* keeps its results, or its slots; it may be ahead of our own plan."""
        if generation is not None and generation.plan.generation == message.generation:
            self._take(generation, index, message)
        else:
            self._early.setdefault(message.generation, []).append((index, message))

    def drop(self, generation: Generation) -> None:
        """Forget a generation that was refused: its parts and its memory."""
        for resources in generation.unit_resources.values():
            for part in resources.parts if not generation.is_owner_change else ():
                self._engine.remove(part.part)
            self._give_back(resources)
        self._early.pop(generation.plan.generation, None)

    def committed(self, generation: Generation) -> None:
        """Remember the names of the parts, for traces, where their units begin, and what is written to whom."""
        for unit in generation.plan.units:
            generation.unit_resources[unit.unit].extents = {
                part.part: generation.extents[part.part] for part in unit.parts if part.part in generation.extents}
            for number, part in enumerate(unit.parts):
                self._count_on(unit, number, part)
        self._unit_resources |= generation.unit_resources
        self._forget_early(generation)

    def _count_on(self, unit: UnitPlan, number: int, part: PartPlan) -> None:
        """Remember *part*, the *number*-th of *unit*, under its owner, who is new."""
        self.first_parts[part.part] = unit.parts[0].part
        self.parts[part.part] = Part(unit.name, number, len(unit.parts), part.owner)
        written_to = self._written_to(unit.ranks, part)
        if part.owner == self._me.index:
            self.readers[part.part] = written_to
        for source in written_to:
            self.shares[source] = self.shares.get(source, 0) + part.wire_nbytes

    def _count_off(self, unit: UnitPlan, part: PartPlan, owner: int) -> None:
        """Forget what was written here because of *owner*, who lives and owns *part* no more, or is lost."""
        self.readers.pop(part.part, None)
        if owner == self._me.index or owner in self._links:
            for source in self._written_to(unit.ranks, msgspec.structs.replace(part, owner=owner)):
                self.shares[source] -= part.wire_nbytes

    def retire(self, units: Sequence[int]) -> list[int]:
        """Give back all that committed *units* use, which every rank of the job has retired; return their parts here.

        Nothing of them can be under way: a rank retires what it has seen complete, so every input was summed and every
        result has arrived where somebody waits for it. Their memory stays mapped, and registered, for the next units.
        """
        units = [number for number in units if number in self._unit_resources]  # who came late knows only what it owns
        retired = [part.part for number in units for part in self._unit_resources[number].parts]
        try:
            self._engine.retire(retired)
        except ValueError as exc:
            raise ProtocolError(f"units {list(units)} cannot be retired on node {self._me.index}: {exc}") from exc
        for number in units:
            resources = self._unit_resources.pop(number)
            if self._gpu_direct is not None:
                self._gpu_direct.forget(resources.names)
            for part in resources.parts:
                self.first_parts.pop(part.part, None)
                self.readers.pop(part.part, None)
                for source in self._written_to(resources.ranks, part):
                    self.shares[source] -= part.wire_nbytes
            self._give_back(resources)
        return retired

    def ranks_of(self, parts: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that push the committed *parts*."""
        wanted = set(parts)
        return tuple(sorted({rank for resources in self._unit_resources.values()
                             if any(part.part in wanted for part in resources.parts) for rank in resources.ranks}))

    def coded_state(self, number: int) -> CodedState | None:
        """Return the state that committed unit *number* has here; None if it is not compressed between these nodes."""
        resources = self._unit_resources.get(number)
        if resources is None or resources.codec is None:
            return None
        return CodedState(self._engine, self._me.index, resources.codec, resources.dtype, resources.coded)

    # -- when a node is lost, or comes late ---------------------------------------------------------------

    @property
    def near(self) -> tuple[int, ...]:
        """The nodes that this one shares memory with, those included that are lost."""
        return tuple(sorted({*(link.index for link in self._shm_links()), *self._takeovers}))

    def peer_lost(self, link: Link) -> None:
        """Know that the node behind *link*, which is closed or whose process is gone, is lost; keep what it leaves."""
        if isinstance(link, ShmLink):
            self._takeovers[link.index] = SharedMemoryTakeover(link, self._regions)
        self.shares.pop(self._sources[link.index], None)
        for resources in self._unit_resources.values():
            resources.bound = [bound for bound in resources.bound if bound[0] != link.index]

    def progress(self, lost: Sequence[int], everything: bool = False) -> tuple[tuple[int, int, int, int], ...]:
        """Return, of partitions that *lost* nodes owned and ranks here push, what `Frozen` says of them.

        If *everything*, of all that ranks here push, and of those that this node owns.
        """
        here = bool(self._me.ranks)
        return tuple((part.part, *self._engine.progress(part.part), resources.extents[part.part].node if here else -1)
                     for resources in self._unit_resources.values() if resources.extents or everything
                     for part in resources.parts if everything or (here and part.owner in lost))

    def prepare_owner_change(self, message: Recover) -> tuple[Generation, Succession]:
        """Allocate and bind what the new owners of *message* need here; raises as `prepare`, and `PeerLostError` if a
        partition whose input lies on a device would be summed by who cannot reach it.
        """
        self._require_reach(message)
        generation = Generation(Plan(generation=message.generation, units=message.units), is_owner_change=True)
        succession = Succession(self._me, self._engine, self._links, self._sources, self._partition_role, self._unit_resources,
                                self._regions, self._takeovers, message)
        try:
            succession.prepare(generation, self._unit_installer)
        except BaseException:
            self.drop(generation)
            raise
        for chunk in self._regions.partials.chunks:
            self.share_chunk(chunk, "partial")
        for wired in self._rdma_links():
            wired.announce(message.generation)
        generation.awaited = {link.index for link in self._rdma_links()}
        for index, said in self._early.pop(message.generation, ()):
            self._take(generation, index, said)
        return generation, succession

    def succeeded(self, generation: Generation) -> None:
        """Count on the new owners of a generation that `prepare_owner_change` has made."""
        for unit in generation.plan.units:
            fresh = generation.unit_resources.get(unit.unit)
            resources = self._unit_resources.setdefault(unit.unit, UnitResources(ranks=unit.ranks))
            mine = {part.part for part in resources.parts}
            if fresh is not None:
                resources.absorb(fresh)
                mine |= {part.part for part in fresh.parts}
            if not self._partition_role.members_of(unit.ranks).local:
                mine = {part.part for part in unit.parts if part.part in mine and part.owner == self._me.index}
            resources.parts = [part for part in unit.parts if part.part in mine]
            for number, part in enumerate(unit.parts):
                known = self.parts.get(part.part)
                if known is None or known.owner != part.owner:
                    if known is not None:
                        self._count_off(unit, part, known.owner)
                    self._count_on(unit, number, part)
        self._forget_early(generation)

    def result_segments(self, generation: Generation) -> Iterator[tuple[int, int, Segment]]:
        """Yield (node, number, segment) of every segment that results of *generation* appear in, but a rank's own: of
        its device.
        """
        for node, number in sorted({(extent.node, extent.segment) for extent in generation.extents.values()
                                    if not extent.on_device}):
            link = self._links.get(node)
            if isinstance(link, ShmLink):
                yield node, number, link.segments[number]
            else:
                segment = self._regions.chunk(number).segment
                assert isinstance(segment, Segment), "all others are a device's"
                yield node, number, segment

    def share_chunk(self, chunk: Chunk, kind: str) -> None:
        """Let all peers of this host map *chunk*, once."""
        if chunk.index not in self._shared:
            self._shared[chunk.index] = chunk, kind
            for link in self._shm_links():
                _show(link, chunk, kind)

    def share_all(self, link: ShmLink) -> None:
        """Let a peer of this host that has come late map what all others have."""
        for chunk, kind in self._shared.values():
            _show(link, chunk, kind)

    # -- innards ------------------------------------------------------------------------------------------

    def _require_reach(self, message: Recover) -> None:
        changed = {each.part for each in message.owner_changes}
        for unit in message.units:
            resources = self._unit_resources.get(unit.unit)
            for part in unit.parts if resources is not None else ():
                extent = resources.extents.get(part.part) if resources is not None else None
                if part.part not in changed or extent is None or not extent.on_device:
                    continue
                link = self._links.get(part.owner)
                if not isinstance(link, RdmaLink) or link.fenced:
                    who = "this node" if part.owner == self._me.index else f"node {part.owner}"
                    raise PeerLostError(
                        f"{who} would sum a partition of {unit.members[0].name!r} from now on, and cannot read node "
                        f"{self._me.index}'s input of it, which lies in GPU memory: with BPSFAST_GPU_DIRECT=1 a job "
                        "goes on without a lost node only where others that are reached by RDMA take its place")


    def _forget_early(self, committed: Generation) -> None:
        """Drop what was said of generations before the one that is *committed*: they were withdrawn."""
        self._early = {number: said for number, said in self._early.items() if number > committed.plan.generation}

    def _give_back(self, resources: UnitResources) -> None:
        for index, part in resources.bound:
            link = wire(self._links[index])  # maybe another one than was bound: a pair may go over to tcp
            assert link is not None, "bytes are written over it"
            link.unbind(part)
        for arena, place, nbytes in resources.places:
            arena.release(place, nbytes)
        for store in resources.parameter_stores:
            self._stores.give_back(store)

    def _shm_links(self) -> list[ShmLink]:
        return [link for _, link in sorted(self._links.items()) if isinstance(link, ShmLink)]

    def _rdma_links(self) -> list[RdmaLink]:
        return [link for _, link in sorted(self._links.items()) if isinstance(link, RdmaLink) and not link.fenced]

    def _written_to(self, ranks: tuple[int, ...], part: PartPlan) -> tuple[int, ...]:
        """Return the sources that get a partial or the result of *part*, of *ranks*, from this node over a wire."""
        return tuple(self._sources[index] for index in self._partition_role.written_to(ranks, part))

    def _share(self, generation: Generation) -> None:
        """Show peers of this host our partials and results, and all peers where parts of this generation lie."""
        for kind, arena in (("partial", self._regions.partials), ("result", self._regions.results)):
            for chunk in arena.chunks:
                self.share_chunk(chunk, kind)
        owned = tuple(
            PeerExtent(part=part.part, segment=extent.segment, offset_even=extent.offset_even,
                       offset_odd=extent.offset_odd)
            for unit in generation.plan.units for part in unit.parts if part.owner == self._me.index
            for extent in (generation.extents[part.part],)
        )
        for link in self._shm_links():
            link.tell(PeerExtents(generation=generation.plan.generation, extents=owned))
        for wired in self._rdma_links():
            wired.announce(generation.plan.generation)

    def _take(self, generation: Generation, index: int, message: PeerExtents | PeerSlots) -> None:
        link = self._links[index]
        if isinstance(message, PeerSlots):
            if isinstance(link, RdmaLink):  # else the pair has gone over to tcp since it was sent
                link.aim(message)
            generation.awaited.discard(index)
            return
        if not generation.concerns(self._me.ranks):
            return
        sizes = {part.part: part.nbytes for unit in generation.plan.units for part in unit.parts}
        for extent in message.extents:
            generation.extents[extent.part] = Extent(
                node=index, segment=extent.segment, offset_even=extent.offset_even, offset_odd=extent.offset_odd,
                nbytes=sizes[extent.part],
            )
        generation.awaited.discard(index)


def _show(link: ShmLink, chunk: Chunk, kind: str) -> None:
    link.tell(PeerSegment(segment=chunk.index, kind=kind, nbytes=chunk.segment.nbytes), [chunk.segment.fileno()])
