"""Owns all native parts of a node: the summing engine, notification words, memory, links and communication thread.

They are made here, and closed here in the one safe order: service, wires, engine, then the memory they wrote to.
"""
from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..base.settings import Settings
from ..base.trace_file import Origin, write
from ..base.trace_records import RECORD, Part, SendLog, limits
from ..orchestration.clock_offset import Point
from ..orchestration.errors import BpsError, CapacityError, PeerLostError, ProtocolError, StallError, error_of
from ..orchestration.messages import LagRow, Message, NodeInfo, ShareDevice, Stage, Welcome
from ..orchestration.placement.partition import rounds_ahead
from ..pyx import ring
from ..pyx.engine import Engine
from ..pyx.pages import Segment
from .affinity import NodeAffinity
from .capacity import n_summing_threads
from .dispatch import Dispatcher
from .generation import Generation
from .gpu_direct import GpuDirect
from .local_rank import LocalRank
from .owner_changes import OwnerTransfer
from .plan_installer import PlanInstaller
from .regions import MIN_SEGMENT_NBYTES, Chunk, Regions
from .transport import Link, TalkingLink, WireLink, rdma, shm, talking, tcp, wire
from .transport.rdma import rails as rdma_rails

log = logging.getLogger("bpsfast.node")

#: A kernel takes milliseconds; one that takes this long is stuck.
_FREEZE_TIMEOUT_S = 30.0
#: A longer wait for a kernel needs heartbeats meanwhile.
_SHORT_WAIT_S = 0.05
#: A process that was killed ends at once, unless the kernel delays it.
_END_TIMEOUT_S = 5.0
#: Counters of a wire that go on when another link takes its place.
_CUMULATIVE = ("bytes_sent", "bytes_received", "writes_sent", "writes_received", "writes_damaged")


class NodeRuntime:
    """The engine of this node and what it needs. For the control loop's thread.

    *on_lost*: called from the service's thread with (source, errno) when the engine or a stream gives up a source.
    *affinity*: on which NUMA nodes memory is allocated; None: anywhere. *run_with_heartbeats*: see `ControlLoop`.
    """

    def __init__(self, settings: Settings, on_lost: Callable[[int, int], None], affinity: NodeAffinity | None = None,
                 run_with_heartbeats: Callable[[Callable[[], None]], None] = lambda work: work()) -> None:
        self._settings = settings
        self._run_with_heartbeats = run_with_heartbeats
        self._board = Segment(ring.BOARD_NBYTES, name="bpsfast-board", huge=False)
        ring.format_board(self._board)
        self._doorbell = Segment(ring.DOORBELL_NBYTES, name="bpsfast-doorbell", huge=False)
        ring.format_doorbell(self._doorbell)
        self._tracing = Tracing(settings)
        self._engine: Engine | None = Engine(
            self._board, self._doorbell, n_threads=n_summing_threads(settings),
            nontemporal_nbytes=settings.nontemporal_bytes, awake_us=settings.awake_us,
            fifo=settings.scheduling == "fifo", **self._tracing.limits._asdict())
        self._installer: PlanInstaller | None = None
        self._dispatcher: Dispatcher | None = Dispatcher(
            self._engine, settings.credit_bytes, on_lost, self._tracing.limits, fifo=settings.scheduling == "fifo")
        self._sources: dict[int, tuple[str, int | None]] = {}
        self._ranks: dict[int, int] = {}
        self._lanes: dict[int, Segment] = {}
        self._source_of: dict[int, int] = {}
        self._moved: dict[int, dict[str, int]] = {}
        self._lost_shm_links: list[shm.ShmLink] = []  # their memory stays in use
        self._order: tuple[int, ...] = ()  # the integer rank of each part; 0 is most urgent
        self._stopped = False
        self._turn_of: Callable[[int], int] = lambda index: index
        self.regions = Regions(settings.max_bytes, settings.huge_pages == "auto",
                               *((affinity.numa_memory, affinity.affinity.home) if affinity is not None else ()))
        self.shm_endpoint = shm.ShmEndpoint(self._doorbell)
        self.rails = rdma.Rails(settings, rdma_rails.least_lockable_nbytes(settings.transport, MIN_SEGMENT_NBYTES),
                                affinity.allowed if affinity is not None else frozenset())
        self.links: dict[int, Link] = {}
        self.gpu_direct = GpuDirect(settings, self.regions, self.rails, self.links)
        self.transports: dict[str, str] = {}

    @property
    def connected(self) -> bool:
        """Whether all peers are known to the engine."""
        return self._installer is not None

    @property
    def running(self) -> bool:
        """Whether `stop` has not been called."""
        return not self._stopped

    @property
    def installer(self) -> PlanInstaller:
        """The object that turns plans into memory and engine parts. Only once connected."""
        assert self._installer is not None
        return self._installer

    @property
    def engine(self) -> Engine:
        """The engine, until `stop`."""
        assert self._engine is not None
        return self._engine

    @property
    def _service(self) -> Dispatcher:
        assert self._dispatcher is not None
        return self._dispatcher

    def connect(self, me: NodeInfo, welcome: Welcome, links: Mapping[int, Link], transports: Mapping[str, str],
                ranks: Sequence[LocalRank]) -> None:
        """Make ranks (in local order) and peers (in node order) the engine's sources, and start the service.

        This object closes *links* from now on.

        Raises `CapacityError` if memory that ranks have already cannot be registered for RDMA.
        """
        self.links.update(links)
        engine = self.engine
        self.rails.settle()
        if self.rails.used:
            self.regions.register_with(self.rails)
        for rank in ranks:
            rank.source = engine.add_rank(rank.lane)
            self._sources[rank.source] = rank.describe(), None
            self._ranks[rank.source] = rank.rank
            self._lanes[rank.source] = rank.lane
        self.transports.update(transports)
        self._turn_of = lambda index: (index - me.index) % len(welcome.nodes)
        for _, link in sorted(self.links.items()):
            self._add_source(link)
        self._installer = PlanInstaller(me, welcome.nodes, engine, self.regions, self.links, self._source_of,
                              [rank.source for rank in ranks], sums=self._settings.sums == "on",
                              gpu_direct=self.gpu_direct)
        self._service.start()
        for wired in self.wires():
            wired.start(engine, self._source_of[wired.index])

    def add_link(self, link: Link, transport: str) -> None:
        """Make the node behind *link*, which joins the running job, a peer; this object closes the link from now on.

        If this raises, the node can still be excluded.
        """
        try:
            self._add_source(link)
        except BaseException:
            link.close()
            raise
        self.links[link.index] = link
        self.transports[f"node {link.index}"] = transport
        if isinstance(link, shm.ShmLink):
            self.installer.share_all(link)
        else:
            link.start(self.engine, self._source_of[link.index])

    def _add_source(self, link: Link) -> None:
        """Make the node behind *link* a source of the engine, and a destination of the service."""
        if isinstance(link, shm.ShmLink):
            source = self.engine.add_shm_peer(link.incoming, link.outgoing, link.doorbell)
        else:  # a wire
            source = self.engine.add_wire_peer()
            self._service.add(source, link, self._turn_of(link.index))
        self._source_of[link.index] = source
        self._sources[source] = f"node {link.index}", link.index

    def stop_link(self, link: WireLink) -> bool:
        """Stop writing and receiving over *link* until `resume`; return whether it is certain that nothing arrives."""
        self._service.hold(self._source_of[link.index])
        link.fence()
        self.rails.close_gone()  # before memory is registered again
        return link.is_cut_off

    def resume(self, link: tcp.TcpLink) -> None:
        """Use *link* in place of one that was stopped by `stop_link`; what the peer awaits is written again."""
        old = self._replaced(link.index)
        self.installer.require_undropped(link.index, link.awaited_there)
        awaited = old.awaited()
        for part, bound in old.bound.items():
            link.expect(part, *bound, next_round=awaited[part])
        self._replace(old, link)
        source = self._source_of[link.index]
        try:
            if self._service.start_link(source, link):
                self._service.resume(source, link.awaited_there)
        finally:
            old.close()

    def begin_rdma(self, link: rdma.RdmaLink) -> rdma.LinkResumed:
        """Receive over *link* in place of one that was stopped by `stop_link`; return what the peer has to know.

        Nothing is written over it before `resume_rdma`. If this raises, *link* is closed, and the one before it can
        still be replaced.
        """
        old = self._replaced(link.index)
        self.installer.require_undropped(link.index, {})
        awaited = old.awaited()
        try:
            if not link.is_usable:
                raise CapacityError(f"a device of the link to node {link.index} has refused memory meanwhile")
            self._service.start_link(self._source_of[link.index], link)
            for part, bound in old.bound.items():
                link.bind(part, *bound, first_round=awaited[part])
        except BaseException:
            link.close()
            raise
        self._replace(old, link)
        old.close()
        return link.resumed(self.installer.newest_generation, awaited)

    def resume_rdma(self, link: rdma.RdmaLink, message: rdma.LinkResumed) -> None:
        """Write over *link*, over which `begin_rdma` receives: the peer has told where, and what it awaits."""
        self.installer.require_undropped(link.index, message.awaited)
        link.aim(message)
        self._service.resume(self._source_of[link.index], message.awaited)

    def _replaced(self, index: int) -> WireLink:
        old = wire(self.links[index])
        assert old is not None
        return old

    def _replace(self, old: WireLink, link: tcp.TcpLink | rdma.RdmaLink) -> None:
        """Record *link*, which this object closes from now on, and what was counted on the one before."""
        self._tracing.keep(old)
        counted, before = old.counters(), self._moved.get(link.index, {})
        self._moved[link.index] = {name: counted[name] + before.get(name, 0) for name in _CUMULATIVE}
        self._moved[link.index]["replaced"] = before.get("replaced", 0) + 1
        self.links[link.index] = link

    @property
    def service_error(self) -> Exception | None:
        """The error of the communication service, if it has failed."""
        return self._dispatcher.error if self._dispatcher is not None else None

    @property
    def engine_error(self) -> BpsError:
        """The error of the engine, if it has failed and no source is the cause."""
        name, _, reason = self.engine.failure.partition(": ")
        return error_of(name, reason)

    def who(self, source: int) -> tuple[str, int | None]:
        """Return the name of *source*, and its node index if it is a node."""
        return self._sources.get(source, (f"source {source}", None))

    def wires(self) -> list[WireLink]:
        """Return the links over which bytes are written, in node order."""
        return [found for _, link in sorted(self.links.items()) if (found := wire(link)) is not None]

    def talking_links(self) -> list[TalkingLink]:
        """Return the links with a channel, in node order."""
        return [found for _, link in sorted(self.links.items()) if (found := talking(link)) is not None]

    def why_lost(self, index: int, code: int) -> str:
        """Return why the wire to node *index* was lost, as text; *code* is that of EVENT_LOST."""
        link = wire(self.links.get(index))
        if link is None:
            return os.strerror(code)
        n_damaged = self._moved.get(index, {}).get("writes_damaged", 0) + link.counters()["writes_damaged"]
        return link.why(code) + (f"; damaged writes between these nodes so far: {n_damaged}" if n_damaged else "")

    def fds_for(self, rank: LocalRank) -> tuple[int, int, int, int]:
        """Return the descriptors that an attached rank gets: lane, board, doorbell, the node's pidfd."""
        return rank.lane.fileno(), self._board.fileno(), self._doorbell.fileno(), self.shm_endpoint.pidfd

    def input_grew(self, source: int, chunk: Chunk) -> None:
        """Let the engine and the peers of this host read a new segment of a rank's inputs."""
        self.engine.map_segment(source, chunk.index, chunk.segment.address, chunk.segment.nbytes)
        self.installer.share_chunk(chunk, "input")

    def share_device(self, rank: LocalRank, message: ShareDevice, fd: int) -> int:
        """Register memory of *rank*'s device; return its segment. Closes *fd* on errors."""
        chunk = self.gpu_direct.register(rank.local_rank, message, fd)
        self.engine.map_segment(rank.source, chunk.index, chunk.segment.address, chunk.segment.nbytes)
        return chunk.index

    def peer_message(
        self, link: TalkingLink, message: Message, fds: tuple[int, ...], generation: Generation | None
    ) -> None:
        """Handle a message of a peer."""
        if isinstance(link, shm.ShmLink) and isinstance(message, shm.PeerSegment) and len(fds) == 1:
            segment = link.map(message, fds[0])
            self.engine.map_segment(self._source_of[link.index], message.segment, segment.address, segment.nbytes)
        elif isinstance(message, shm.PeerExtents if isinstance(link, shm.ShmLink) else rdma.PeerSlots) and not fds:
            self.installer.peer_message(generation, link.index, message)
        else:
            for fd in fds:
                os.close(fd)
            raise ProtocolError(f"node {link.index} sent {type(message).__name__} with {len(fds)} descriptors")

    def freeze(self, purpose: str) -> None:
        """Stop summing and sending until a commit; `StallError`, naming *purpose*, if a kernel does not end."""
        engine = self.engine
        try:
            try:
                engine.freeze(_SHORT_WAIT_S)
            except TimeoutError:
                self._run_with_heartbeats(lambda: engine.freeze(_FREEZE_TIMEOUT_S))
        except TimeoutError as exc:
            raise StallError(f"{purpose}: {exc}") from exc

    def commit(self, generation: Generation, order: tuple[int, ...]) -> None:
        """Freeze and commit: from now on the parts of *generation* are summed, all in the policy's *order*."""
        engine = self.engine
        self.freeze(f"generation {generation.plan.generation} cannot be committed")
        if log.isEnabledFor(logging.DEBUG):
            under_way = sum(1 for part in engine.report() if part[1])
            log.debug("committing generation %d: %d new parts, %d in use", generation.plan.generation,
                      sum(len(resources.parts) for resources in generation.unit_resources.values()), under_way)
        self.installer.committed(generation)
        self._order = order
        self._service.commit(order, self.installer.first_parts, self.installer.shares, self.installer.readers)
        # The job's numbers have gaps where a generation was refused; the engine counts its own commits.
        engine.commit(engine.generation + 1, order)

    def exclude(self, index: int) -> None:
        """Cut off node *index*, which is lost: nothing of it reaches this node any more. While frozen.

        Raises `PeerLostError` if that is not certain: it may still write into memory here.
        """
        link = self.links.get(index)
        if link is None:
            return  # neither of the two has ranks
        source = self._source_of[index]
        self._service.drop(source)
        if isinstance(link, shm.ShmLink):
            link.end_process(_END_TIMEOUT_S)
            self._lost_shm_links.append(link)
        else:
            self._close_wire(link)
        self.engine.detach(source)
        self.installer.peer_lost(link)
        del self.links[index]

    def _close_wire(self, link: WireLink) -> None:
        self._tracing.keep(link)
        link.close()
        if isinstance(link, rdma.RdmaLink):
            self.rails.close_gone()
            if not link.is_cut_off:
                raise PeerLostError(f"node {link.index} is lost, and a queue pair to it could not be destroyed: it may "
                                    "still write into this node's memory")

    def lose_ranks(self, ranks: Sequence[int]) -> None:
        """Go on without *ranks*, all that the job has lost by now; nothing of those here is read. While frozen."""
        for source, rank in self._ranks.items():
            if rank in ranks:
                self.engine.detach(source)
        self.installer.lose_ranks(ranks)

    def succeed(self, generation: Generation, transfer: OwnerTransfer, order: tuple[int, ...]) -> None:
        """Commit a frozen engine to new owners of parts, whose owners were excluded or give them up."""
        engine = self.engine
        self.installer.succeeded(generation)
        self._order = order
        self._service.commit(order, self.installer.first_parts, self.installer.shares, self.installer.readers)
        self._service.forget(transfer.forgotten)  # before `begin` sends again what the new owner needs
        transfer.begin()
        for resend in transfer.resends:
            self._service.resend(resend)
        engine.set_n_lost(self.installer.n_lost)
        engine.commit(engine.generation + 1, order)

    def retire(self, units: Sequence[int]) -> None:
        """Release all that *units* use, which all ranks have retired."""
        parts = self.installer.retire(units)
        self._service.retire(parts, self.installer.shares)

    def set_credit(self, nbytes: int) -> None:
        """Allow *nbytes* under way to one peer from now on; 0: as many as the setting says."""
        self._service.set_credit(nbytes or self._settings.credit_bytes)

    def missing(self, part: int, round_: int) -> tuple[Stage, tuple[int, ...], tuple[int, ...]]:
        """Return (stage, ranks, nodes): the stage of *round_* of *part* on this node, and for whom it waits."""
        try:
            found = self.engine.missing(part)
        except ValueError:
            return "done", (), ()  # a helper without a role in it
        waited_for, sources, owned = found
        if rounds_ahead(waited_for, round_) > 0:
            return "done", (), ()
        if owned and not sources:  # complete: an answer of a store may wait for other workers
            behind = self.installer.ranks_of(self.engine.behind(part))
            return ("push", behind, ()) if behind else ("sum", (), ())
        late = tuple(self._ranks[source] for source in sources if source in self._ranks)
        nodes = tuple(index for source in sources for index in (self.who(source)[1],) if index is not None)
        return "push" if late else "sum" if not nodes else "partial" if owned else "result", late, nodes

    def lags(self, owned: bool) -> tuple[LagRow, ...]:
        """Return how late the inputs of ranks, and of nodes if *owned*, were; see `Engine.lags`."""
        if not self.connected:
            return ()
        return tuple(
            LagRow(rank=self._ranks.get(source, -1), node=-1 if index is None else index, count=count,
                   total_ns=total_ns, max_ns=max_ns, p99_ns=p99_ns, n_last=n_last, last_total_ns=last_total_ns)
            for source, count, total_ns, max_ns, p99_ns, n_last, last_total_ns in self.engine.lags(owned)
            for _, index in (self.who(source),))

    def counters(self) -> dict[str, dict[str, int]]:
        """Return the counters of engine, service, each rank of this machine and each wire.

        What ranks sum directly, without the engine, counts as pushed and published.
        """
        found = {"engine": self.engine.counters(), "dispatch": self._service.counters()}
        for source, rank in self._ranks.items():
            tally = ring.tally(self._lanes[source])
            found[f"rank_{rank}"] = {"pushed_bytes": self.engine.pushed_nbytes(source) + tally["direct_bytes"], **tally}
        found["engine"]["published_bytes"] += self._direct("direct_bytes")
        for link in self.wires():
            before = self._moved.get(link.index, {})
            found[f"wire_{link.index}"] = {name: value + before.get(name, 0) for name, value in link.counters().items()}
            found[f"wire_{link.index}"]["replaced"] = before.get("replaced", 0)
        if self.rails.used:
            found["rdma"] = self.rails.counters()
        if self.gpu_direct.is_used:
            found["direct"] = self.gpu_direct.counters()
        return found

    def progress(self) -> tuple[int, ...]:
        """Return numbers that change when a round has ended, or a direct call of ranks of this machine."""
        counters = self.engine.counters()
        return counters["sums"], counters["published_bytes"], self._direct("direct_calls")

    def _direct(self, counter: str) -> int:
        """Return the largest such counter of a rank here: all ranks take part in most direct calls."""
        return max((ring.tally(lane)[counter] for lane in self._lanes.values()), default=0)

    def flat_counters(self, n_control: int) -> dict[str, int]:
        """Return all counters of a node.

        ``engine_*``, ``dispatch_*``, ``wire_N_*`` (per peer over tcp or rdma), ``rank_N_*`` are the counters of those;
        ``wire_N_replaced``: how often another link has replaced one that ended; ``wire_N_writes_damaged``: how many
        writes arrived damaged, where that is detected (settings checksum and encryption);
        ``control_messages``: messages to and from scheduler, ranks and peers, without heartbeats; ``registrations``:
        the segments ever made; ``rdma_*``, where any peer is reached by it: what its rails count; ``memory_*`` bytes:
        segments by kind, resident memory outside of segments; ``transport_N`` 1 = shm, 2 = tcp, 3 = rdma.
        """
        found = {}
        for group, counters in self.counters().items():
            found.update({f"{group}_{name}": value for name, value in counters.items()})
        found["control_messages"] = n_control
        found["registrations"] = self.regions.n_segments
        for kind, nbytes in self.regions.nbytes_by_kind().items():
            found[f"memory_{kind}"] = nbytes
        found["memory_segments"] = self.regions.nbytes
        found["memory_outside_segments"] = resident_outside_segments()
        for index, link in self.links.items():
            found[f"transport_{index}"] = {"shm": 1, "tcp": 2, "rdma": 3}[link.kind]
        return found

    def abort(self, error: BpsError) -> None:
        """End every wait of every local rank with *error*, and cut off peers that are reached by RDMA.

        A card keeps writing after its process was stopped: only destroying the queue pair ends that.
        """
        if self._engine is not None:
            self._engine.abort(f"{type(error).__name__}: {error}")
        if self._dispatcher is not None:
            self._dispatcher.abandon()
        for link in self.links.values():
            if isinstance(link, rdma.RdmaLink):
                link.fence()

    def flush(self) -> None:
        """Send what the channels to peers could not take before."""
        for link in self.talking_links():
            if link.channel.backlog:
                try:
                    link.channel.flush()
                except PeerLostError:
                    log.debug("the channel to node %d ended with a backlog", link.index)

    def stop(self) -> None:
        """Stop service, wires and engine; their trace records are kept for `write_trace`."""
        self._stopped = True
        self._service.stop()
        self._tracing.sends = self._service.sends()
        self._tracing.keep(self.engine)
        for link in self.wires():
            self._tracing.keep(link)
            link.close()
        self.engine.close()

    def write_trace(self, me: NodeInfo, clock: tuple[Point, ...]) -> None:
        """Write the trace, if tracing is on; *clock*: offsets to the scheduler's clock. After `stop`."""
        urgency = dict(enumerate(self._order))
        parts = self._installer.parts if self._installer is not None else {}
        self._tracing.write(
            me.index, {number: part._replace(urgency=urgency.get(number, -1)) for number, part in parts.items()},
            {source: index for index, source in self._source_of.items()}, clock)

    def close(self) -> None:
        """Unmap everything. After `stop`, and after the ranks' lanes are closed.

        All resources are closed before the first error is raised.
        """
        for link in (*self.talking_links(), *self._lost_shm_links):
            link.close()
        # The last references: the engine's exports of board and doorbell end with them.
        self._engine = self._dispatcher = self._installer = None
        self.links.clear()
        self._lanes.clear()
        with contextlib.ExitStack() as last:
            for each in (self._doorbell, self._board, self.regions, self.rails, self.shm_endpoint):
                last.callback(each.close)


class Tracing:
    """Collects trace records of engine, links and service until the end, then writes them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.limits = limits(settings)
        self.sends = SendLog(self.limits)
        self._records: list[bytes] = []

    def keep(self, ended: Engine | WireLink) -> None:
        """Keep the trace records of *ended*, which is closed, or about to be."""
        if self.limits.trace_capacity:
            self._records += [ended.trace()] if isinstance(ended, Engine) else ended.traces()

    def write(self, node: int, parts: Mapping[int, Part], peers: Mapping[int, int], clock: tuple[Point, ...]) -> None:
        """Write the trace, if tracing is on; *parts* by number, *peers*: nodes by source, *clock*: as in `Origin`."""
        if not self.limits.trace_capacity:
            return
        room = self.limits.trace_capacity * RECORD.size
        origin = Origin(node=node, clock=clock, peers=dict(peers), credit_nbytes=self._settings.credit_bytes,
                        full=self.sends.full or any(len(records) >= room for records in self._records))
        write(self._settings.trace_dir, f"node {node}", b"".join(self._records), parts, origin, self.sends.spans(peers))


def resident_outside_segments() -> int:
    """Return the resident bytes of this process that are not shared memory (memfds count as shared memory)."""
    nbytes = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile"):
            nbytes += int(value.split()[0]) * 1024
    return nbytes
