"""From a plan to memory and engine calls: what this node does for each partition of a generation.

    owner            result here (both parities); a slot per wire peer with ranks of it; inputs in node order;
                     weights and momentum, if it keeps them: once for the units of all workers
    member           partial here if several of its ranks are local; the owner's result arrives here (a wire: tcp, rdma)
                     or is read where the owner keeps it (shm)
    neither          a node without a rank that pushes it, and which does not own it: nothing

A generation is prepared whole before anybody is told `Ready`: allocated, bound to lanes, known to the engine (which
keeps it inactive until the commit), shared with peers of this host, told to peers that write into it by RDMA. If
another node cannot, `drop` forgets it.
"""
from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence

from ..orchestration.errors import ProtocolError
from ..orchestration.messages import Extent, NodeInfo, PartPlan, Plan, UnitPlan
from ..orchestration.partition import ITEM_NBYTES
from ..orchestration.rows import ROWS, part_rows
from ..pyx.engine import Engine
from ..pyx.pages import Segment
from ..trace import Part
from ..transport import Link, WireLink, wire
from ..transport.rdma import PeerSlots, RdmaLink
from ..transport.shm import PeerExtent, PeerExtents, PeerSegment, ShmLink
from .coded_state import CodedPart, CodedState
from .coding import PartCodec, part_codec
from .generation import Generation, Holding
from .regions import Arena, Chunk, Place, Regions, page_round
from .standing import Standing
from .vaults import Vault, Vaults


class Wiring:
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
    """

    def __init__(
        self, me: NodeInfo, nodes: Sequence[NodeInfo], engine: Engine, regions: Regions,
        links: Mapping[int, Link], sources: Mapping[int, int], local: Sequence[int], sums: bool = True,
    ) -> None:
        self._me = me
        self._engine = engine
        self._regions = regions
        self._links = links
        self._sources = sources
        self._sums = sums
        self._standing = Standing(me, nodes, links, local)
        self._shared: set[int] = set()
        self._early: dict[int, list[tuple[int, PeerExtents | PeerSlots]]] = {}
        self._holdings: dict[int, Holding] = {}  # of committed units
        self._vaults = Vaults(engine, regions.stores)
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
        return -1 if self._me.ranks else self._regions.ownable_nbytes(len(self._standing.members_of(()).wired))

    # -- preparing ----------------------------------------------------------------------------------------

    def prepare(self, plan: Plan) -> Generation:
        """Allocate, bind, install and share everything of *plan*; `Generation.awaited` says who has not done so.

        Raises
        ------
        CapacityError
            If the machine cannot hold it; nothing of it was kept.
        """
        self._check_room(plan)
        generation = Generation(plan)
        try:
            for unit in plan.units:
                holding = generation.holdings[unit.unit] = Holding()
                self._prepare_unit(unit, generation, holding)
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

    def peer_said(self, generation: Generation | None, index: int, message: PeerExtents | PeerSlots) -> None:
        """Note where node *index* keeps its results, or its slots; it may be ahead of our own plan."""
        if generation is not None and generation.plan.generation == message.generation:
            self._take(generation, index, message)
        else:
            self._early.setdefault(message.generation, []).append((index, message))

    def drop(self, generation: Generation) -> None:
        """Forget a generation that was refused: its parts and its memory."""
        for holding in generation.holdings.values():
            for part in holding.parts:
                self._engine.remove(part.part)
            self._give_back(holding)
        self._early.pop(generation.plan.generation, None)

    def committed(self, generation: Generation) -> None:
        """Remember the names of the parts, for traces, where their units begin, and what is written to whom."""
        for unit in generation.plan.units:
            for number, part in enumerate(unit.parts):
                self.first_parts[part.part] = unit.parts[0].part
                self.parts[part.part] = Part(unit.name, number, len(unit.parts), part.owner)
                written_to = self._written_to(unit.ranks, part)
                if part.owner == self._me.index:
                    self.readers[part.part] = written_to
                for source in written_to:
                    self.shares[source] = self.shares.get(source, 0) + part.wire_nbytes
        self._holdings |= generation.holdings

    def retire(self, units: Sequence[int]) -> list[int]:
        """Give back all that committed *units* use, which every rank of the job has retired; return their parts here.

        Nothing of them can be under way: a rank retires what it has seen complete, so every input was summed and every
        result has arrived where somebody waits for it. Their memory stays mapped, and registered, for the next units.
        """
        retired = [part.part for number in units for part in self._holdings[number].parts]
        try:
            self._engine.retire(retired)
        except ValueError as exc:
            raise ProtocolError(f"units {list(units)} cannot be retired on node {self._me.index}: {exc}") from exc
        for number in units:
            holding = self._holdings.pop(number)
            for part in holding.parts:
                self.first_parts.pop(part.part, None)
                self.readers.pop(part.part, None)
                for source in self._written_to(holding.ranks, part):
                    self.shares[source] -= part.wire_nbytes
            self._give_back(holding)
        return retired

    def ranks_of(self, parts: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that push the committed *parts*."""
        wanted = set(parts)
        return tuple(sorted({rank for holding in self._holdings.values()
                             if any(part.part in wanted for part in holding.parts) for rank in holding.ranks}))

    def coded_state(self, number: int) -> CodedState | None:
        """Return the state that committed unit *number* has here; None if it is not compressed between these nodes."""
        holding = self._holdings.get(number)
        if holding is None or holding.codec is None:
            return None
        return CodedState(self._engine, self._me.index, holding.codec, holding.dtype, holding.coded)

    def result_segments(self, generation: Generation) -> Iterator[tuple[int, int, Segment]]:
        """Yield (node, number, segment) of every segment that results of *generation* appear in."""
        for node, number in sorted({(extent.node, extent.segment) for extent in generation.extents.values()}):
            link = self._links.get(node)
            if isinstance(link, ShmLink):
                yield node, number, link.segments[number]
            else:
                yield node, number, self._regions.chunk(number).segment

    def share_chunk(self, chunk: Chunk, kind: str) -> None:
        """Let all peers of this host map *chunk*, once."""
        if chunk.index not in self._shared:
            self._shared.add(chunk.index)
            message = PeerSegment(segment=chunk.index, kind=kind, nbytes=chunk.segment.nbytes)
            for link in self._shm_links():
                link.tell(message, [chunk.segment.fileno()])

    # -- innards ------------------------------------------------------------------------------------------

    def _give_back(self, holding: Holding) -> None:
        for index, part in holding.bound:
            link = wire(self._links[index])  # maybe another one than was bound: a pair may go over to tcp
            assert link is not None, "bytes are written over it"
            link.unbind(part)
        for arena, place, nbytes in holding.places:
            arena.release(place, nbytes)
        for vault in holding.vaults:
            self._vaults.give_back(vault)

    def _shm_links(self) -> list[ShmLink]:
        return [link for _, link in sorted(self._links.items()) if isinstance(link, ShmLink)]

    def _rdma_links(self) -> list[RdmaLink]:
        return [link for _, link in sorted(self._links.items()) if isinstance(link, RdmaLink) and not link.fenced]

    def _written_to(self, ranks: tuple[int, ...], part: PartPlan) -> tuple[int, ...]:
        """Return the sources that get a partial or the result of *part*, of *ranks*, from this node over a wire."""
        return tuple(self._sources[index] for index in self._standing.written_to(ranks, part))

    @staticmethod
    def _bind(holding: Holding, link: WireLink, unit: UnitPlan, part: PartPlan, even: int, odd: int, coded: bool
              ) -> None:
        link.bind(part.part, even, odd, part.wire_nbytes if coded else part.nbytes, unit.n_streams,
                  coded or unit.op == ROWS)
        holding.bound.append((link.index, part.part))

    def _check_room(self, plan: Plan) -> None:
        room = self._standing.room(plan)
        self._room = room
        regions = self._regions
        wanted = [(arena, room[arena.kind]) for arena in (regions.results, regions.partials, regions.slots,
                                                          regions.frames, regions.states, regions.stores)]
        shown = ", ".join(f"{kind}s {nbytes}" for kind, nbytes in room.items())
        regions.require(wanted, f"generation {plan.generation} on node {self._me.index} ({shown} bytes)")

    def _allocate(self, holding: Holding, arena: Arena, nbytes: int) -> Place:
        place, _ = arena.allocate(nbytes, self._room[arena.kind])
        holding.places.append((arena, place, nbytes))
        self._room[arena.kind] -= page_round(nbytes)
        return place

    def _prepare_unit(self, unit: UnitPlan, generation: Generation, holding: Holding) -> None:
        from .. import kernels
        from . import no_sum  # compiles: not before somebody needs a sum

        holding.ranks = unit.ranks
        coded = self._standing.is_coded(unit)
        if coded:
            holding.codec, holding.dtype = unit.codec, unit.dtype
        op = "sum" if unit.op == ROWS else unit.op
        kernel = kernels.address(unit.dtype, op) if self._sums else no_sum.address()
        here = [part for part in unit.parts if self._standing.appears_here(unit, part)]
        even_nbytes = sum(page_round(part.nbytes) for part in here)
        # One run per parity and unit: neighbours stay neighbours, so a rank's view is few mappings.
        at = self._allocate(holding, self._regions.results, 2 * even_nbytes) if here else Place(0, 0, 0)
        for part in unit.parts:
            outputs = (at.address, at.address + even_nbytes)
            if self._standing.appears_here(unit, part):
                generation.extents[part.part] = Extent(node=self._me.index, segment=at.segment, offset_even=at.offset,
                                                       offset_odd=at.offset + even_nbytes, nbytes=part.nbytes)
                step = page_round(part.nbytes)
                at = Place(at.segment, at.offset + step, at.address + step)
            if part.owner != self._me.index and not self._standing.members_of(unit.ranks).local:
                continue
            codec = self._codec(unit, part, holding) if coded else None
            if part.owner == self._me.index:
                self._own(unit, part, kernel, outputs, holding, codec)
            else:
                self._join_in(unit, part, kernel, outputs, holding, codec)
            holding.parts.append(part)

    def _codec(self, unit: UnitPlan, part: PartPlan, holding: Holding) -> PartCodec:
        """Return the codec of *part* with its state, which begins as zeros."""
        assert unit.codec is not None, "only then it is coded"
        states = dict.fromkeys(("error", "momentum", "error_back"), 0)
        sizes = self._standing.states_of(unit, part)
        for name, nbytes in sizes.items():
            states[name] = self._allocate(holding, self._regions.states, nbytes).address
            ctypes.memset(states[name], 0, nbytes)
        holding.coded.append(CodedPart(part.part, part.offset, part.nbytes, part.owner == self._me.index,
                                       tuple((states[name], nbytes) for name, nbytes in sizes.items())))
        return part_codec(unit.codec, unit.dtype, part.nbytes // ITEM_NBYTES[unit.dtype])._replace(
            error=states["error"], momentum=states["momentum"], error_back=states["error_back"])

    def _frames(self, part: PartPlan, arena: Arena, holding: Holding) -> tuple[int, int]:
        """Return addresses of memory for frames of the result of *part*, by parity."""
        nbytes = page_round(part.wire_nbytes)
        at = self._allocate(holding, arena, 2 * nbytes).address
        return at, at + nbytes

    def _own(self, unit: UnitPlan, part: PartPlan, kernel: int, outputs: tuple[int, int], holding: Holding,
             codec: PartCodec | None) -> None:
        if codec is not None:
            codec = codec._replace(frames=self._frames(part, self._regions.frames, holding))
        members = self._standing.members_of(unit.ranks)
        before: list[tuple[int, int]] = []
        after: list[tuple[int, int]] = []
        for index in members.nodes:
            if index == self._me.index:
                continue
            link = wire(self._links[index])
            slot = 0
            if link is not None:
                nbytes = part.nbytes if codec is None else part.wire_nbytes
                slot = self._allocate(holding, self._regions.slots, nbytes).address
                self._bind(holding, link, unit, part, slot, slot, codec is not None)
            (before if index < self._me.index else after).append((self._sources[index], slot))
        vault: Vault | None = None
        if unit.store is not None:
            vault = self._vaults.take(unit, part, self._room["store"])
            holding.vaults.append(vault)
            if vault.n_users == 1:  # made just now
                self._room["store"] -= page_round(vault.nbytes)
        self._engine.add_owned(
            part.part, nbytes=part.nbytes, n_elements=part.nbytes // ITEM_NBYTES[unit.dtype], unit_offset=part.offset,
            kernel=kernel, divisor=members.n_ranks if unit.average else 1, before=before, local=list(members.local),
            after=after, outputs=outputs, to_wire=bool(members.wired),
            shm_peers=[self._sources[link.index] for link in self._shm_links() if link.index in members.nodes],
            codec=codec, rows=_rows(unit, part), store=vault.handle if vault is not None else 0,
        )
        if vault is not None:
            vault.is_engaged = True

    def _join_in(self, unit: UnitPlan, part: PartPlan, kernel: int, outputs: tuple[int, int], holding: Holding,
                 codec: PartCodec | None) -> None:
        link = wire(self._links[part.owner])
        arriving = outputs
        if codec is not None and link is not None:
            arriving = self._frames(part, self._regions.slots, holding)
            codec = codec._replace(frames=arriving, results=outputs)
        if link is not None:
            self._bind(holding, link, unit, part, *arriving, codec is not None)
        partial = Place(0, 0, 0)
        if nbytes := self._standing.partial_nbytes(unit, part):
            partial = self._allocate(holding, self._regions.partials, nbytes)
        if codec is not None:
            codec = codec._replace(frame=partial.address)
        self._engine.add_member(
            part.part, nbytes=part.nbytes, n_elements=part.nbytes // ITEM_NBYTES[unit.dtype], unit_offset=part.offset,
            kernel=kernel, local=list(self._standing.members_of(unit.ranks).local), owner=self._sources[part.owner],
            partial=(partial.address, partial.segment, partial.offset), codec=codec, rows=_rows(unit, part),
        )

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


def _rows(unit: UnitPlan, part: PartPlan) -> tuple[int, int, int, int] | None:
    """Return what the engine has to know of the frames of *part*, if its unit is a table that is summed by rows."""
    if unit.op != ROWS:
        return None
    n_rows, *row = unit.members[0].shape
    n_elements = math.prod(row)
    in_part = part_rows(n_rows, len(unit.parts), part.part - unit.parts[0].part)
    return in_part, unit.frame_rows, n_elements, n_elements * ITEM_NBYTES[unit.dtype]
