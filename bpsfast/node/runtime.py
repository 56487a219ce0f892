"""The vertex that sums: the engine with its board, doorbell, regions, links and communication service.

Everything native that a node owns is made here and taken down here, in the one order that is safe: service,
wires, engine, then the memory they wrote to. Longer than other files: that one life is read in one place.
"""
from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence

from ..base.settings import Settings
from ..orchestration.clock_offset import Point
from ..orchestration.errors import BpsError, PeerLostError, ProtocolError, StallError
from ..orchestration.messages import LagRow, Message, NodeInfo, ShareDevice, Stage, Welcome
from ..pyx import ring
from ..pyx.engine import Engine
from ..pyx.pages import Segment
from ..trainer.node_connection import error_of
from . import stages
from .affinity import NodeAffinity
from .copy_rate import n_threads
from .dispatch import Dispatcher
from .generation import Generation
from .gpu_direct import GpuDirect
from .local_rank import LocalRank
from .owner_changes import Succession
from .plan_installer import PlanInstaller
from .regions import MIN_SEGMENT_NBYTES, Chunk, Regions
from .tracing import Tracing
from .transport import Link, TalkingLink, WireLink, rdma, shm, talking, tcp, wire
from .transport.rdma import limits

log = logging.getLogger("bpsfast.node")

#: A kernel takes milliseconds; one that takes this long is stuck.
_FREEZE_TIMEOUT_S = 30.0
#: For so long a kernel is waited for at once; longer than that, while the node goes on beating.
_BLINK_S = 0.05
#: A process that was killed ends at once, unless the kernel is in its way.
_END_TIMEOUT_S = 5.0
#: Counters of a wire that go on when another link takes its place.
_ADDED_UP = ("bytes_sent", "bytes_received", "writes_sent", "writes_received", "writes_damaged")


class NodeRuntime:
    """Sums on this node. Owned and called by the control loop's thread.

    Parameters
    ----------
    on_lost
        Called from the service's thread with (source, errno) when the engine or a lane gives a source up.
    seats
        Where memory is to be; None: anywhere.
    patiently
        Does what may take long while the node goes on beating (`Node.run_with_heartbeats`).
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
            self._board, self._doorbell, n_threads=n_threads(settings),
            nontemporal_nbytes=settings.nontemporal_bytes, awake_us=settings.awake_us,
            fifo=settings.scheduling == "fifo", **self._tracing.limits._asdict())
        self._plan_installer: PlanInstaller | None = None
        self._dispatcher: Dispatcher | None = Dispatcher(
            self._engine, settings.credit_bytes, on_lost, self._tracing.sends, fifo=settings.scheduling == "fifo")
        self._sources: dict[int, tuple[str, int | None]] = {}
        self._ranks: dict[int, int] = {}
        self._lanes: dict[int, Segment] = {}
        self._source_of: dict[int, int] = {}
        self._moved: dict[int, dict[str, int]] = {}
        self._left: list[shm.ShmLink] = []  # by lost nodes of this host: their memory stays in use
        self._stopped = False
        self._place_of: Callable[[int], int] = lambda index: index
        self.regions = Regions(settings.max_bytes, settings.huge_pages == "auto",
                               *((affinity.homes, affinity.seat.home) if affinity is not None else ()))
        self.shm_endpoint = shm.ShmEndpoint(self._doorbell)
        self.rails = rdma.Rails(settings, limits.least(settings.transport, MIN_SEGMENT_NBYTES),
                                affinity.allowed if affinity is not None else frozenset())
        self.links: dict[int, Link] = {}
        self.gpu_direct = GpuDirect(settings, self.regions, self.rails, self.links)
        self.transports: dict[str, str] = {}

    @property
    def connected(self) -> bool:
        """Whether all peers are known to the engine."""
        return self._plan_installer is not None

    @property
    def running(self) -> bool:
        """Whether `stop` has not been called."""
        return not self._stopped

    @property
    def plan_installer(self) -> PlanInstaller:
        """What turns plans into memory and engine parts. Only once connected."""
        assert self._plan_installer is not None
        return self._plan_installer

    @property
    def engine(self) -> Engine:
        """The engine, until `stop`."""
        assert self._engine is not None
        return self._engine

    def connect(self, me: NodeInfo, welcome: Welcome, links: Mapping[int, Link], transports: Mapping[str, str],
                ranks: Sequence[LocalRank]) -> None:
        """Make ranks (in local order) and peers (in node order) the engine's sources, and start the service.

        *links* are this object's to close from now on.

        Raises
        ------
        CapacityError
            If memory that ranks have already cannot be registered for RDMA.
        """
        self.links.update(links)
        engine = self.engine
        assert self._dispatcher is not None
        self.rails.settle()
        if self.rails.used:
            self.regions.register_with(self.rails)
        for rank in ranks:
            rank.source = engine.add_rank(rank.lane)
            self._sources[rank.source] = rank.describe(), None
            self._ranks[rank.source] = rank.rank
            self._lanes[rank.source] = rank.lane
        self.transports.update(transports)
        self._place_of = lambda index: (index - me.index) % len(welcome.nodes)
        for _, link in sorted(self.links.items()):
            self._know(link)
        self._plan_installer = PlanInstaller(me, welcome.nodes, engine, self.regions, self.links, self._source_of,
                              [rank.source for rank in ranks], sums=self._settings.sums == "on",
                              gpu_direct=self.gpu_direct)
        self._dispatcher.start()
        for wired in self.wires():
            wired.start(engine, self._source_of[wired.index])

    def take_in(self, link: Link, transport: str) -> None:
        """Make the node behind *link*, which comes late, a peer; the link is this object's to close from now on.

        If that raises, whatever it is, the node can still be excluded.
        """
        try:
            self._know(link)
        except BaseException:
            link.close()
            raise
        self.links[link.index] = link
        self.transports[f"node {link.index}"] = transport
        if isinstance(link, shm.ShmLink):
            self.plan_installer.share_all(link)
        else:
            link.start(self.engine, self._source_of[link.index])

    def _know(self, link: Link) -> None:
        """Make the node behind *link* a source of the engine, and a destination of the service."""
        assert self._dispatcher is not None
        if isinstance(link, shm.ShmLink):
            source = self.engine.add_shm_peer(link.incoming, link.outgoing, link.doorbell)
        else:  # a wire
            source = self.engine.add_wire_peer()
            self._dispatcher.add(source, link, self._place_of(link.index))
        self._source_of[link.index] = source
        self._sources[source] = f"node {link.index}", link.index

    def part_with(self, link: WireLink) -> bool:
        """Write nothing more over *link*, and let nothing more arrive; whether that is certain. Until `resume`."""
        assert self._dispatcher is not None
        self._dispatcher.hold(self._source_of[link.index])
        link.fence()
        self.rails.settle()  # before anybody wants memory registered: its device may be what is gone
        return link.sealed

    def resume(self, link: tcp.TcpLink) -> None:
        """Reach by *link* from now on the node whose link was parted with; what it awaits is written again."""
        old = wire(self.links[link.index])
        assert old is not None and self._dispatcher is not None
        awaited = old.awaited()
        for part, bound in old.bound.items():
            link.expect(part, *bound, next_round=awaited[part])
        self._tracing.keep(old)
        counted, before = old.counters(), self._moved.get(link.index, {})
        self._moved[link.index] = {name: counted[name] + before.get(name, 0) for name in _ADDED_UP}
        self._moved[link.index]["replaced"] = before.get("replaced", 0) + 1
        self.links[link.index] = link  # ours to close from here on, whatever comes
        try:
            self._dispatcher.replace_link(self._source_of[link.index], link, link.awaited_there)
        finally:
            old.close()

    @property
    def service_error(self) -> Exception | None:
        """Why the communication service has stopped, if it has."""
        return self._dispatcher.error if self._dispatcher is not None else None

    @property
    def engine_error(self) -> BpsError:
        """Why the engine has failed, which has said that nobody else is to blame."""
        name, _, reason = self.engine.failure.partition(": ")
        return error_of(name, reason)

    def who(self, source: int) -> tuple[str, int | None]:
        """Return how *source* is called, and its node index if it is a node."""
        return self._sources.get(source, (f"source {source}", None))

    def wires(self) -> list[WireLink]:
        """Return the links over which bytes are written, in node order."""
        return [found for _, link in sorted(self.links.items()) if (found := wire(link)) is not None]

    def talking_links(self) -> list[TalkingLink]:
        """Return the links with a channel, in node order."""
        return [found for _, link in sorted(self.links.items()) if (found := talking(link)) is not None]

    def why_lost(self, index: int, code: int) -> str:
        """Return in words why the wire to node *index* was lost; *code* is that of EVENT_LOST."""
        link = wire(self.links.get(index))
        if link is None:
            return os.strerror(code)
        n_damaged = self._moved.get(index, {}).get("writes_damaged", 0) + link.counters()["writes_damaged"]
        return link.why(code) + (f"; damaged writes of this pair by now: {n_damaged}" if n_damaged else "")

    def fds_for(self, rank: LocalRank) -> tuple[int, int, int, int]:
        """Return what a rank gets when it is attached: lane, board, doorbell, the node's pidfd."""
        return rank.lane.fileno(), self._board.fileno(), self._doorbell.fileno(), self.shm_endpoint.pidfd

    def input_grew(self, source: int, chunk: Chunk) -> None:
        """Let the engine and the peers of this host read a new segment of a rank's inputs."""
        self.engine.map_segment(source, chunk.index, chunk.segment.address, chunk.segment.nbytes)
        self.plan_installer.share_chunk(chunk, "input")

    def share_device(self, rank: LocalRank, message: ShareDevice, fd: int) -> int:
        """Take in memory of *rank*'s device; return its segment. *fd* is ours in any case; raises as `take_in`."""
        chunk = self.gpu_direct.take_in(rank.local_rank, message, fd)
        self.engine.map_segment(rank.source, chunk.index, chunk.segment.address, chunk.segment.nbytes)
        return chunk.index

    def peer_said(
        self, link: TalkingLink, message: Message, fds: tuple[int, ...], generation: Generation | None
    ) -> None:
        """Act on what a peer said on its channel."""
        if isinstance(link, shm.ShmLink) and isinstance(message, shm.PeerSegment) and len(fds) == 1:
            segment = link.map(message, fds[0])
            self.engine.map_segment(self._source_of[link.index], message.segment, segment.address, segment.nbytes)
        elif isinstance(message, shm.PeerExtents if isinstance(link, shm.ShmLink) else rdma.PeerSlots) and not fds:
            self.plan_installer.peer_said(generation, link.index, message)
        else:
            for fd in fds:
                os.close(fd)
            raise ProtocolError(f"node {link.index} sent {type(message).__name__} with {len(fds)} descriptors")

    def freeze(self, purpose: str) -> None:
        """Sum and pass on nothing until a commit; `StallError`, which names the *purpose*, if a kernel does not end."""
        engine = self.engine
        try:
            try:
                engine.freeze(_BLINK_S)
            except TimeoutError:
                self._run_with_heartbeats(lambda: engine.freeze(_FREEZE_TIMEOUT_S))
        except TimeoutError as exc:
            raise StallError(f"{purpose}: {exc}") from exc

    def commit(self, generation: Generation, order: tuple[int, ...]) -> None:
        """Freeze, look, commit: from now on the parts of *generation* are summed, all in the policy's *order*."""
        engine = self.engine
        assert self._dispatcher is not None
        self.freeze(f"generation {generation.plan.generation} cannot be committed")
        if log.isEnabledFor(logging.DEBUG):
            under_way = sum(1 for part in engine.report() if part[1])
            log.debug("committing generation %d: %d new parts, %d in use", generation.plan.generation,
                      sum(len(resources.parts) for resources in generation.unit_resources.values()), under_way)
        self.plan_installer.committed(generation)
        self._dispatcher.commit(order, self.plan_installer.first_parts, self.plan_installer.shares, self.plan_installer.readers)
        # The job's numbers have gaps where a generation was refused; the engine counts its own commits.
        engine.commit(engine.generation + 1, order)

    def exclude(self, index: int) -> None:
        """Part for good with node *index*, which is lost: nothing of it reaches this node any more. While frozen.

        Raises
        ------
        PeerLostError
            If that is not certain: it may still write into memory here.
        """
        link = self.links.get(index)
        if link is None:
            return  # neither of the two has ranks
        source = self._source_of[index]
        assert self._dispatcher is not None
        self._dispatcher.drop(source)
        if isinstance(link, shm.ShmLink):
            link.end_process(_END_TIMEOUT_S)
            self._left.append(link)
        else:
            self._close_wire(link)
        self.engine.detach(source)
        self.plan_installer.peer_lost(link)
        del self.links[index]

    def _close_wire(self, link: WireLink) -> None:
        self._tracing.keep(link)
        link.close()
        if isinstance(link, rdma.RdmaLink):
            self.rails.settle()
            if not link.sealed:
                raise PeerLostError(f"node {link.index} is lost, and a queue pair to it could not be destroyed: it may "
                                    "still write into this node's memory")

    def succeed(self, generation: Generation, succession: Succession, order: tuple[int, ...]) -> None:
        """Commit a frozen engine to new owners of parts whose owners were excluded, or give them up."""
        engine = self.engine
        assert self._dispatcher is not None
        self.plan_installer.succeeded(generation)
        self._dispatcher.commit(order, self.plan_installer.first_parts, self.plan_installer.shares, self.plan_installer.readers)
        self._dispatcher.forget(succession.given_up)  # before `begin` passes on again what belongs to the new owner
        succession.begin()
        for resend in succession.resends:
            self._dispatcher.resend(resend)
        engine.commit(engine.generation + 1, order)

    def retire(self, units: Sequence[int]) -> None:
        """Give back all that *units* use, which all ranks have retired."""
        assert self._dispatcher is not None
        parts = self.plan_installer.retire(units)
        self._dispatcher.retire(parts, self.plan_installer.shares)

    def set_credit(self, nbytes: int) -> None:
        """Let *nbytes* be under way to one peer from now on; 0: what the setting says."""
        assert self._dispatcher is not None
        self._dispatcher.set_credit(nbytes or self._settings.credit_bytes)

    def missing(self, part: int, round_: int) -> tuple[Stage, tuple[int, ...], tuple[int, ...]]:
        """Return (stage, ranks, nodes): how far *round_* of *part* has come here, and who it waits for."""
        return stages.missing(self.engine, self.plan_installer, self._ranks, lambda source: self.who(source)[1], part, round_)

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
        """Return the counters of engine, service, each rank of this machine and each wire."""
        assert self._dispatcher is not None
        found = {"engine": self.engine.counters(), "dispatch": self._dispatcher.counters()}
        for source, rank in self._ranks.items():
            found[f"rank_{rank}"] = {"pushed_bytes": self.engine.pushed_nbytes(source),
                                     **ring.tally(self._lanes[source])}
        for link in self.wires():
            before = self._moved.get(link.index, {})
            found[f"wire_{link.index}"] = {name: value + before.get(name, 0) for name, value in link.counters().items()}
            found[f"wire_{link.index}"]["replaced"] = before.get("replaced", 0)
        if self.rails.used:
            found["rdma"] = self.rails.counters()
        if self.gpu_direct.is_used:
            found["direct"] = self.gpu_direct.counters()
        return found

    def abort(self, error: BpsError) -> None:
        """Make every wait of every local rank end with *error*; peers reached by RDMA are cut off.

        A card writes on when the process behind it was stopped or given up: only the end of the queue pair ends that.
        """
        if self._engine is not None:
            self._engine.abort(f"{type(error).__name__}: {error}")
        if self._dispatcher is not None:
            self._dispatcher.abandon()
        for link in self.links.values():
            if isinstance(link, rdma.RdmaLink):
                link.fence()

    def flush(self) -> None:
        """Send what channels to peers could not take before."""
        for link in self.talking_links():
            if link.channel.backlog:
                try:
                    link.channel.flush()
                except PeerLostError:
                    log.debug("the channel to node %d ended with a backlog", link.index)

    def stop(self) -> None:
        """Stop service, wires and engine; what they have traced is kept for `write_trace`."""
        assert self._dispatcher is not None and self._engine is not None
        self._stopped = True
        self._dispatcher.stop()
        self._tracing.keep(self._engine)
        for link in self.wires():
            self._tracing.keep(link)
            link.close()
        self._engine.close()

    def write_trace(self, me: NodeInfo, clock: tuple[Point, ...]) -> None:
        """Write what was traced, if anything was to be; *clock*: what is known of the scheduler's. After `stop`."""
        assert self._dispatcher is not None
        urgency = dict(enumerate(self._dispatcher.order))
        parts = self._plan_installer.parts if self._plan_installer is not None else {}
        self._tracing.write(
            me.index, {number: part._replace(urgency=urgency.get(number, -1)) for number, part in parts.items()},
            {source: index for index, source in self._source_of.items()}, clock)

    def close(self) -> None:
        """Unmap everything. After `stop`, and after the ranks' lanes are closed.

        What cannot be closed keeps nothing else open: its error comes when all others are closed.
        """
        for link in (*self.talking_links(), *self._left):
            link.close()
        # The last references: the engine's exports of board and doorbell end with them.
        self._engine = self._dispatcher = self._plan_installer = None
        self.links.clear()
        self._lanes.clear()
        with contextlib.ExitStack() as last:
            for each in (self._doorbell, self._board, self.regions, self.rails, self.shm_endpoint):
                last.callback(each.close)


