"""Sets up what the scheduler's plans need on this node (memory, transports, sums); releases it when units are retired.

A generation is prepared whole before anybody is told `Ready`: allocated, bound to streams, known to the engine (which
keeps it inactive until the commit), shared with peers of this host, told to peers that write into it by RDMA. If
another node cannot, `drop` forgets it.
"""
from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from ..base.trace_records import Part
from ..orchestration.errors import CapacityError, PeerLostError, ProtocolError
from ..orchestration.messages import Extent, NodeInfo, PartPlan, Plan, Recover, UnitPlan
from ..pyx.engine import Engine
from ..pyx.pages import Segment
from .codec_state import CodedState
from .generation import Generation, ParameterStores, UnitResources
from .gpu_direct import GpuDirect
from .owner_changes import OwnerTransfer, SharedMemoryTakeover
from .partition_role import PartitionRole
from .redone_rounds import Dropped
from .regions import Chunk, Regions
from .transport import Link, wire
from .transport.rdma import PeerSlots, RdmaLink
from .transport.shm import PeerExtent, PeerExtents, PeerSegment, ShmLink
from .unit_installer import NodeParts, UnitInstaller, kernel

log = logging.getLogger("bpsfast.node")


class PlanInstaller:
    """Turns plans into memory, bindings and engine parts of this node, and keeps track of them.

    Parameters
    ----------
    me, nodes
        This node and all nodes, in node order: the order in which partials are added.
    links, sources
        By node index: the connection, and the engine's source id.
    local
        Source ids of the local ranks, in local-rank order.
    sums
        False: parts are moved, but nothing is summed (`kernels.no_sum_address`).
    gpu_direct
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
        self._role = PartitionRole(me, nodes, links, local, gpu_direct)
        self._shared: dict[int, tuple[Chunk, str]] = {}
        self._early: dict[int, list[tuple[int, PeerExtents | PeerSlots]]] = {}
        self._unit_resources: dict[int, UnitResources] = {}  # of committed units
        self._takeovers: dict[int, SharedMemoryTakeover] = {}  # of nodes of this host that are lost
        self._stores = ParameterStores(engine, regions.stores)
        self._parts = NodeParts(me, engine, regions, links, sources, self._role, self._stores, sums)
        # since the last commit of a change of epoch: what was dropped, and by partition the rounds that are sent again
        self._dropped: Dropped = set()
        self._sent_again: dict[int, int] = {}
        #: The newest generation whose parts were bound here, committed or not.
        self.newest_generation = 0
        self.parts: dict[int, Part] = {}
        self.first_parts: dict[int, int] = {}
        #: source -> bytes that go to it over a wire when all parts are pushed once.
        self.shares: dict[int, int] = {}
        #: part that this node owns -> sources that get its result over a wire
        self.readers: dict[int, tuple[int, ...]] = {}

    @property
    def uses_wires(self) -> bool:
        """Whether any peer is reached other than by shared memory."""
        return any(wire(link) is not None for link in self._links.values())

    @property
    def ownable_nbytes(self) -> int:
        """Bytes of partitions that this node can own in addition, -1: any (always so for nodes with ranks)."""
        return -1 if self._me.ranks else self._regions.ownable_nbytes(len(self._role.members_of(()).wired))

    @property
    def room_nbytes(self) -> int:
        """About how many bytes of partitions of lost nodes this node has memory for."""
        return self._regions.takeable_nbytes(len(self._role.members_of(()).wired), has_results=bool(self._me.ranks))

    def prepare(self, plan: Plan) -> Generation:
        """Allocate, bind, install and share everything of *plan*; `Generation.awaited` names peers that have not.

        Raises `CapacityError` if the machine cannot hold it; nothing of it was kept.
        """
        unit_installer = UnitInstaller(self._parts, self._role.room(plan), f"generation {plan.generation}")
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
        self._exchange_slots(generation)
        return generation

    def warm(self, kinds: Iterable[tuple[str, str]], owned_nbytes: int) -> None:
        """Compile the kernels of these (dtype, op), and allocate and release memory to own so many bytes of partitions,
        as far as there is any: a joining node must not delay others with that, or with registering it.
        """
        for dtype, op in kinds:
            kernel(dtype, op, self._sums)
        n_writers, room_nbytes = len(self._role.members_of(()).wired), self.ownable_nbytes
        nbytes = owned_nbytes if room_nbytes < 0 else min(owned_nbytes, room_nbytes)
        made = []
        try:
            if n_writers:  # else it can own no partition of others
                for arena, size in ((self._regions.results, 2 * nbytes), (self._regions.slots, n_writers * nbytes)):
                    made.append((arena, arena.allocate(size)[0], size))
        except CapacityError as exc:
            log.info("there is no memory for %d bytes of partitions: %s", nbytes, exc)
        for arena, place, size in made:
            arena.release(place, size)

    def peer_message(self, generation: Generation | None, index: int, message: PeerExtents | PeerSlots) -> None:
        """Record the addresses of node *index*'s results or slots; they may come before this node's own plan."""
        if generation is not None and generation.plan.generation == message.generation:
            self._take(generation, index, message)
        else:
            self._early.setdefault(message.generation, []).append((index, message))

    def forget_early(self, index: int) -> None:
        """Drop what node *index* has told before its plan came here: its link has ended, and the addresses with it."""
        self._early = {number: [each for each in told if each[0] != index] for number, told in self._early.items()}

    def drop(self, generation: Generation) -> None:
        """Forget a generation that was refused: its parts and its memory."""
        for resources in generation.unit_resources.values():
            for part in resources.parts if not generation.is_owner_change else ():
                self._engine.remove(part.part)
            self._give_back(resources)
        self._early.pop(generation.plan.generation, None)

    def committed(self, generation: Generation) -> None:
        """Record the parts of a committed generation: names for traces, first parts of units, bytes to each peer."""
        for unit in generation.plan.units:
            generation.unit_resources[unit.unit].extents = {
                part.part: generation.extents[part.part] for part in unit.parts if part.part in generation.extents}
            for number, part in enumerate(unit.parts):
                self._add_part(unit, number, part)
        self._unit_resources |= generation.unit_resources
        self._forget_early(generation)

    def _add_part(self, unit: UnitPlan, number: int, part: PartPlan) -> None:
        """Record *part*, the *number*-th of *unit*, with its new owner."""
        self.first_parts[part.part] = unit.parts[0].part
        self.parts[part.part] = Part(unit.name, number, len(unit.parts), part.owner)
        written_to = self._written_to(unit.ranks, part)
        if part.owner == self._me.index:
            self.readers[part.part] = written_to
        for source in written_to:
            self.shares[source] = self.shares.get(source, 0) + part.wire_nbytes

    def _remove_owner(self, unit: UnitPlan, part: PartPlan, owner: int) -> None:
        """Remove from the bytes to each peer what *part* added while *owner* owned it."""
        self.readers.pop(part.part, None)
        if owner == self._me.index or owner in self._links:
            for source in self._written_to(unit.ranks, msgspec.structs.replace(part, owner=owner)):
                self.shares[source] -= part.wire_nbytes

    def retire(self, units: Sequence[int]) -> list[int]:
        """Release all that committed *units* use, which every rank of the job has retired; return their parts here.

        Nothing of them is under way: a rank retires what is complete for it, so every input was summed and every result
        has arrived. Their memory stays mapped, and registered, for the next units.
        """
        # A node that joined late knows only the units that it owns a part of.
        units = [number for number in units if number in self._unit_resources]
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

    # -- nodes are lost, or join --------------------------------------------------------------------------

    @property
    def near(self) -> tuple[int, ...]:
        """The nodes that this one shares memory with, including lost ones."""
        return tuple(sorted({*(link.index for link in self._shm_links()), *self._takeovers}))

    @property
    def n_lost(self) -> int:
        """How many ranks the job goes on without."""
        return len(self._role.lost)

    def lose_ranks(self, ranks: Sequence[int]) -> None:
        """Go on without *ranks*: all that the job has lost by now."""
        self._role.lose(ranks)

    def require_undropped(self, index: int, awaited_there: Mapping[int, int]) -> None:
        """Raise `PeerLostError` if a link to node *index*, which awaits these rounds, cannot replace the one before.

        One of the two would write again what the other has dropped, or is to drop, because a rank is lost, and that
        could not be told from what comes instead.
        """
        if (any(node == index for node, _, _ in self._dropped)
                or any(awaited_there.get(part) == round_ for part, round_ in self._sent_again.items())):
            raise PeerLostError(f"the connection to node {index} has ended while the job was going on without a lost "
                                "rank: what was sent over it cannot be told from what is summed again")

    def peer_lost(self, link: Link) -> None:
        """Record the loss of the node behind *link*, which is closed or whose process has ended; keep its memory."""
        if isinstance(link, ShmLink):
            self._takeovers[link.index] = SharedMemoryTakeover(link, self._regions)
        self.shares.pop(self._sources[link.index], None)
        for resources in self._unit_resources.values():
            resources.bound = [bound for bound in resources.bound if bound[0] != link.index]

    def progress(self, lost: Sequence[int], everything: bool = False) -> tuple[tuple[int, int, int, int], ...]:
        """Return the entries of `FreezeReport` for the partitions that *lost* nodes owned and ranks here push.

        *everything*: for all that ranks here push, and all that this node owns.
        """
        here = bool(self._me.ranks)
        return tuple((part.part, *self._engine.progress(part.part), resources.extents[part.part].node if here else -1)
                     for resources in self._unit_resources.values() if resources.extents or everything
                     for part in resources.parts if everything or (here and part.owner in lost))

    def prepare_owner_change(self, message: Recover) -> tuple[Generation, OwnerTransfer]:
        """Allocate and bind what the new owners of *message* need here.

        Raises as `prepare`, and `PeerLostError` if a new owner cannot reach input that lies on a device.
        """
        self._require_reach(message)
        generation = Generation(Plan(generation=message.generation, units=message.units), is_owner_change=True)
        transfer = OwnerTransfer(self._parts, self._unit_resources, self._takeovers, message, self._dropped)
        try:
            transfer.prepare(generation)
            self._sent_again = dict(transfer.rounds_sent_again)
        except BaseException:
            self.drop(generation)
            raise
        for chunk in self._regions.partials.chunks:
            self.share_chunk(chunk, "partial")
        self._exchange_slots(generation)
        return generation, transfer

    def succeeded(self, generation: Generation) -> None:
        """Record the new owners of a generation that `prepare_owner_change` has made."""
        self._dropped.clear()
        self._sent_again.clear()
        for unit in generation.plan.units:
            fresh = generation.unit_resources.get(unit.unit)
            resources = self._unit_resources.setdefault(unit.unit, UnitResources(ranks=unit.ranks,
                                                                                 is_average=unit.average))
            mine = {part.part for part in resources.parts}
            if fresh is not None:
                resources.absorb(fresh)
                mine |= {part.part for part in fresh.parts}
            if not self._role.members_of(unit.ranks).local:
                mine = {part.part for part in unit.parts if part.part in mine and part.owner == self._me.index}
            resources.parts = [part for part in unit.parts if part.part in mine]
            for number, part in enumerate(unit.parts):
                known = self.parts.get(part.part)
                if known is None or known.owner != part.owner:
                    if known is not None:
                        self._remove_owner(unit, part, known.owner)
                    self._add_part(unit, number, part)
        if self._role.lost:
            self._count_again()
        self._forget_early(generation)

    def _count_again(self) -> None:
        """Find `shares` and `readers` anew: nodes may have lost the last rank that pushes something."""
        self.shares.clear()
        self.readers.clear()
        for resources in self._unit_resources.values():
            for part in resources.parts:
                written_to = self._written_to(resources.ranks, part)
                if part.owner == self._me.index:
                    self.readers[part.part] = written_to
                for source in written_to:
                    self.shares[source] = self.shares.get(source, 0) + part.wire_nbytes

    def result_segments(self, generation: Generation) -> Iterator[tuple[int, int, Segment]]:
        """Yield (node, number, segment) of every segment that holds results of *generation*, except device memory."""
        for node, number in sorted({(extent.node, extent.segment) for extent in generation.extents.values()
                                    if not extent.on_device}):
            link = self._links.get(node)
            if isinstance(link, ShmLink):
                yield node, number, link.segments[number]
            else:
                segment = self._regions.chunk(number).segment
                assert isinstance(segment, Segment), "all others are a device's"
                yield node, number, segment

    def channel_segments(self, generation: Generation) -> Iterator[tuple[int, Segment]]:
        """Yield (number, segment) of every segment in which ranks here sum units of *generation* directly."""
        for number in sorted({place.segment for place in generation.channels.values()}):
            segment = self._regions.chunk(number).segment
            assert isinstance(segment, Segment), "no channel lies on a device"
            yield number, segment

    def share_chunk(self, chunk: Chunk, kind: str) -> None:
        """Share *chunk* with all peers of this host, once."""
        if chunk.index not in self._shared:
            self._shared[chunk.index] = chunk, kind
            for link in self._shm_links():
                _share_with(link, chunk, kind)

    def share_all(self, link: ShmLink) -> None:
        """Share with a peer of this host that has joined late what all others have mapped."""
        for chunk, kind in self._shared.values():
            _share_with(link, chunk, kind)

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
                        "survives the loss of a node only if nodes that are reached by RDMA can replace it")

    def _forget_early(self, committed: Generation) -> None:
        """Drop messages about generations before the one that is *committed*: they were withdrawn."""
        self._early = {number: said for number, said in self._early.items() if number > committed.plan.generation}

    def _give_back(self, resources: UnitResources) -> None:
        for index, part in resources.bound:
            link = wire(self._links[index])  # maybe not the one that was bound: tcp may have replaced it
            assert link is not None, "bytes are written over it"
            link.unbind(part)
        for arena, place, nbytes in resources.places:
            arena.release(place, nbytes)
        for store in resources.parameter_stores:
            self._stores.give_back(store)

    def _shm_links(self) -> list[ShmLink]:
        return [link for _, link in sorted(self._links.items()) if isinstance(link, ShmLink)]

    def uncovered(self, number: int) -> list[RdmaLink]:
        """Return the links to peers that have not said where this node writes the parts of generation *number*.

        There are some only where RDMA has taken the place of tcp meanwhile.
        """
        return [link for link in self._rdma_links() if link.covered < number]

    def _rdma_links(self) -> list[RdmaLink]:
        return [link for _, link in sorted(self._links.items()) if isinstance(link, RdmaLink) and not link.fenced]

    def _written_to(self, ranks: tuple[int, ...], part: PartPlan) -> tuple[int, ...]:
        """Return the sources to which this node writes a partial or result of *part*, of *ranks*, over a wire."""
        return tuple(self._sources[index] for index in self._role.written_to(ranks, part))

    def _share(self, generation: Generation) -> None:
        """Share partials and results with peers of this host, and tell them where this generation's results appear."""
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

    def _exchange_slots(self, generation: Generation) -> None:
        """Send peers the addresses to which they write by RDMA, and await theirs; take what came early of any peer."""
        number = generation.plan.generation
        self.newest_generation = number
        for wired in self._rdma_links():
            wired.announce(number)
            if wired.covered < number:
                generation.awaited.add(wired.index)
        for index, message in self._early.pop(number, ()):
            self._take(generation, index, message)

    def _take(self, generation: Generation, index: int, message: PeerExtents | PeerSlots) -> None:
        link = self._links[index]
        if isinstance(message, PeerSlots):
            if isinstance(link, RdmaLink):  # else tcp has replaced the link meanwhile
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


def _share_with(link: ShmLink, chunk: Chunk, kind: str) -> None:
    link.tell(PeerSegment(segment=chunk.index, kind=kind, nbytes=chunk.segment.nbytes), [chunk.segment.fileno()])
