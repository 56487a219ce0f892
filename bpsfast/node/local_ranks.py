"""Handles the requests that this machine's ranks, and BytePS-style server processes, send to their node."""
from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence

from ..base.message_socket import MessageSocket
from ..base.settings import Settings
from ..base.value_formats import format_cpus
from ..orchestration import messages
from ..orchestration.errors import BpsError, CapacityError, ConfigError, MismatchError, PeerLostError, ProtocolError
from .affinity import NodeAffinity
from .control_loop import ControlLoop
from .event_loop import EventLoop
from .generation import Generation
from .local_listener import refuse
from .local_rank import LocalRank, check_attach
from .plan_installer import PlanInstaller

log = logging.getLogger("bpsfast.node")

#: Messages of a rank to the scheduler: the node forwards them, and only checks that they are the rank's own.
_FORWARDED = (messages.Declare, messages.Retire, messages.Credit, messages.BarrierEnter, messages.StallQuestion,
              messages.LagQuestion, messages.Publish, messages.Withdraw, messages.Lookup)
#: A killed process closes its channel just before its pidfd becomes readable, which gives the better reason.
_EXIT_DELAY_S = 0.1


class LocalRanks:
    """Owns the attached ranks of *node* (in local-rank order once complete) and its server processes."""

    def __init__(
        self, node: ControlLoop, loop: EventLoop, settings: Settings, package: str, fingerprint: Mapping[str, str]
    ) -> None:
        self.ranks: list[LocalRank] = []
        self._node = node
        self._loop = loop
        self._package = package
        self._fingerprint = dict(fingerprint)
        self._expected = settings.local_size
        self._goes_on = settings.on_worker_loss == "continue"
        self._servers: list[MessageSocket] = []
        self._attached = False
        self._has_affinity = False
        self._first_left: messages.FirstRankLeft | None = None

    @property
    def n_servers(self) -> int:
        """Server processes that have attached."""
        return len(self._servers)

    def requested_ranks(self) -> tuple[int, ...]:
        """Return the global ranks that the local ranks request (-1: any); empty until all have attached."""
        return tuple(rank.rank for rank in self.ranks) if self.ranks and len(self.ranks) == self._expected else ()

    def set_affinity(self, node_affinity: NodeAffinity) -> None:
        """Choose CPUs and memory for each rank, once all have attached; raises `ConfigError` as `NodeAffinity.of`."""
        if self.requested_ranks() and not self._has_affinity:
            self._has_affinity = True
            for rank, affinity in zip(self.ranks, node_affinity.of([rank.attach for rank in self.ranks])):
                rank.set_affinity(affinity)

    def missing(self) -> str:
        """Name the local ranks that have not attached."""
        here = {rank.local_rank for rank in self.ranks}
        return "local rank " + ", ".join(str(number) for number in range(max(1, self._expected)) if number not in here)

    def attach_rank(self, link: MessageSocket, message: messages.Attach, pidfd: int) -> None:
        """Attach a rank, or raise the reason against it. When the last one has attached, the node joins the job."""
        check_attach(message, self._package, self._fingerprint)
        if self._node.admitted:
            raise ConfigError(f"local rank {message.local_rank} (process {message.pid}) attached too late: the job of "
                              "this node is complete without it")
        if self._expected < 0 and not self.ranks:
            self._expected = message.local_size  # a server process's node: the first rank tells how many there are
        if message.local_size != self._expected:
            raise ConfigError(f"local_size: local rank {message.local_rank} (process {message.pid}) says "
                              f"{message.local_size}, the node of this machine expects {max(0, self._expected)}")
        for other in self.ranks:
            if other.local_rank == message.local_rank:
                raise ConfigError(
                    f"local rank {message.local_rank} is process {other.pid} already, now process {message.pid} claims "
                    "it: two machines of a job on one host need different BPSFAST_NODE_ID, on their ranks and nodes")
        if not self.ranks:
            self._node.first_rank_attached()
        rank = LocalRank(link, message, pidfd, self._node.runtime.regions)
        self.ranks.append(rank)
        self.ranks.sort(key=lambda each: each.local_rank)
        self._loop.watch(link.fileno(), lambda: self._read(rank))
        self._loop.watch(pidfd, lambda: self._died(rank))
        if len(self.ranks) == self._expected:
            self._loop.call_soon(self._node.join)

    def attach_server(self, link: MessageSocket, message: messages.AttachServer) -> None:
        """Attach a server process, which found the machine's node running, until the job ends."""
        if message.version != messages.VERSION:
            raise ConfigError(f"protocol version: server process {message.pid} has {message.version}, the node "
                              f"{messages.VERSION}")
        self._servers.append(link)
        self._loop.watch(link.fileno(), lambda: self._server_left(link))
        if not self._node.admitted and (self._expected <= 0 or self.requested_ranks()):
            self._loop.call_soon(self._node.join)

    def admitted(self, me: messages.NodeInfo) -> None:
        """Set the global rank of each local rank."""
        for rank in self.ranks:
            rank.rank = me.ranks[rank.local_rank]

    def connected(self, me: messages.NodeInfo, welcome: messages.Welcome, transports: dict[str, str]) -> None:
        """Send `Attached` to the ranks, with all they need to begin: every node of the job is connected."""
        n_ranks = sum(len(node.ranks) for node in welcome.nodes)
        n_helpers = sum(not node.ranks for node in welcome.nodes)
        runtime = self._node.runtime
        machines = tuple((len(node.ranks), min((rate for rate in (node.nic_rate_bytes, node.nic_limit_bytes) if rate),
                                               default=0.0)) for node in welcome.nodes)
        self._attached = True
        for rank in self.ranks:
            rank.tell(messages.Attached(
                rank=rank.rank, size=n_ranks, local_rank=rank.local_rank, local_size=len(self.ranks), node_pid=me.pid,
                node=me.index, n_nodes=len(welcome.nodes) - n_helpers, n_helpers=n_helpers, transports=transports,
                settings=self._fingerprint, machines=machines, cpus=format_cpus(rank.affinity.cpus),
                job=welcome.job),
                runtime.fds_for(rank))
        if self._first_left is not None:
            self.tell_all(self._first_left)

    # -- messages from ranks ------------------------------------------------------------------------------

    def _read(self, rank: LocalRank) -> None:
        try:
            received = rank.channel.recv_nowait()
        except PeerLostError:
            self._loop.forget(rank.channel.fileno())
            self._loop.call_at(time.monotonic() + _EXIT_DELAY_S, lambda: self._channel_ended(rank))
            return
        except ProtocolError as exc:
            self._loop.forget(rank.channel.fileno())
            self._lose(rank, str(exc))
            return
        for message, fds in received:
            if isinstance(message, messages.ShareDevice) and self._attached and len(fds) == 1:
                self._share_device(rank, message, fds[0])
                continue
            for fd in fds:
                os.close(fd)
            self._act(rank, message)

    def _act(self, rank: LocalRank, message: messages.Message) -> None:
        if isinstance(message, messages.Allocate) and self._attached:
            self._allocate(rank, message)
        elif isinstance(message, messages.CountersRequest):
            rank.tell(messages.Counters(request=message.request, counters=self._node.counters(),
                                    lags=self._node.runtime.lags(owned=False)))
        elif isinstance(message, messages.StateAsk) and self._attached:
            rank.tell(self._copy_state(rank, message))
        elif isinstance(message, messages.GpuDirectTensors):
            self._node.runtime.gpu_direct.expect(message.names)
        elif isinstance(message, messages.Detach):
            self._detach(rank, message)
        elif isinstance(message, _FORWARDED) and message.rank == rank.rank:
            self._node.send(message)
        else:
            self._lose(rank, f"sent {type(message).__name__} at the wrong time, or for another rank")

    def _allocate(self, rank: LocalRank, message: messages.Allocate) -> None:
        try:
            runtime = self._node.runtime
            self._node.run_with_heartbeats(
                lambda: rank.allocate(message, lambda chunk: runtime.input_grew(rank.source, chunk)))
        except CapacityError as exc:
            rank.tell(messages.Refuse(error="CapacityError", reason=str(exc)))

    def _share_device(self, rank: LocalRank, message: messages.ShareDevice, fd: int) -> None:
        runtime = self._node.runtime
        try:
            segment = self._node.run_with_heartbeats(lambda: runtime.share_device(rank, message, fd))
        except BpsError as exc:
            rank.tell(messages.DeviceShared(request=message.request, error=type(exc).__name__, reason=str(exc)))
        else:
            rank.tell(messages.DeviceShared(request=message.request, segment=segment))

    def _copy_state(self, rank: LocalRank, message: messages.StateAsk) -> messages.StateDone:
        try:
            state = self._node.runtime.installer.coded_state(message.unit)
            if state is None:
                if message.nbytes:
                    raise MismatchError(f"{message.nbytes} bytes of state are to be loaded, but nothing is compressed "
                                        "here: the job has one node")
                return messages.StateDone(request=message.request)
            address = rank.address_of(message.segment, message.offset, message.nbytes) if message.nbytes else 0
            if message.action == "load":
                state.load(address, message.nbytes)
            elif message.action == "save" and message.nbytes == state.nbytes:
                state.save(address)
        except BpsError as exc:
            return messages.StateDone(request=message.request, error=type(exc).__name__, reason=str(exc))
        return messages.StateDone(request=message.request, nbytes=state.nbytes)

    def _detach(self, rank: LocalRank, message: messages.Detach) -> None:
        if rank.left:
            return
        rank.left = True
        if not message.clean:
            rank.tell(messages.Detached())
            self._lose(rank, message.reason or "left with an error")
        elif self._attached and not self._node.ending:
            self._node.send(messages.RankLeft(rank=rank.rank))
            if rank.pid == os.getppid():
                self._node.starter_left(rank.rank)
        else:
            rank.tell(messages.Detached())
            if not self._node.ending:
                self._lose(rank, "left before the job was complete")

    def _died(self, rank: LocalRank) -> None:
        """Handle the end of a rank's process: harmless if it has detached, even in its very last message."""
        self._loop.forget(rank.pidfd)
        if not rank.left:
            self._read(rank)
        self._loop.forget(rank.channel.fileno())
        if not rank.left:
            self._lose(rank, "died without leaving")
        rank.dead = True

    def _channel_ended(self, rank: LocalRank) -> None:
        if not rank.left:
            self._lose(rank, "closed its channel without leaving")

    def _lose(self, rank: LocalRank, reason: str) -> None:
        text = f"{rank.describe()} (local rank {rank.local_rank}, process {rank.pid}) is lost: {reason}"
        if not self._goes_on or not self._attached or self._node.ending:
            self._node.fail(PeerLostError(text), rank.describe() if rank.rank >= 0 else "", reason)
        elif not rank.lost:
            rank.lost = rank.left = True
            log.info("%s", text)  # the scheduler's decision is a warning, on one node
            self._node.send(messages.Lost(who=rank.describe(), reason=reason))

    def _server_left(self, link: MessageSocket) -> None:
        try:
            link.recv_nowait()
        except BpsError:
            log.info("the server process beside this node has ended")
            self._loop.forget(link.fileno())
            self._servers.remove(link)
            link.close()

    # -- messages to ranks --------------------------------------------------------------------------------

    def tell(self, rank: int, message: messages.Message) -> None:
        """Send *message* to the global *rank*, if it is here."""
        for each in self.ranks:
            if each.rank == rank:
                each.tell(message)

    def tell_all(self, message: messages.Message) -> None:
        """Send *message* to every rank."""
        for rank in self.ranks:
            rank.tell(message)

    def first_rank_left(self, message: messages.FirstRankLeft) -> None:
        """Tell every rank that a rank has left; ranks that are not attached yet are told then."""
        self._first_left = message
        if self._attached:
            self.tell_all(message)

    @property
    def is_heard(self) -> bool:
        """Whether a rank is left that raises the error with which the job ends."""
        return any(not rank.gone for rank in self.ranks)

    def gone(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of the global *ranks* that have left."""
        return tuple(each.rank for each in self.ranks if each.left and not each.lost and each.rank in ranks)

    def declare(self, generation: Generation, installer: PlanInstaller) -> None:
        """Tell the ranks whose units are in *generation* that it was committed, and where their results appear."""
        concerned = [rank for rank in self.ranks if generation.concerns([rank.rank])]
        if not concerned:
            return
        segments = list(installer.result_segments(generation))
        channels = list(installer.channel_segments(generation))
        for rank in concerned:
            for number, segment in channels:
                rank.share_channels(number, segment)
            for node, number, segment in segments:
                rank.share_result(node, number, segment)
            rank.tell(messages.Declared(generation=generation.plan.generation,
                                        units=generation.ready_units(rank.rank)))

    def abort(self, error: BpsError) -> None:
        """Send *error* to those who cannot read it on the board: ranks that are not attached, and server processes."""
        for rank in self.ranks:
            if not self._attached and not rank.dead:
                refuse(rank.channel, error)
        for link in self._servers:
            refuse(link, error)

    def finish(self) -> None:
        """Detach all ranks and server processes: the job is over."""
        self.tell_all(messages.Detached())
        for link in self._servers:
            link.post(messages.Detached())

    def settled(self, exit_code: int) -> bool:
        """Whether the node may end: everything has been sent, or, after an error, all ranks have left."""
        if exit_code == 0 or not self._attached:
            return not any(link.backlog for link in self._links())
        return all(rank.gone for rank in self.ranks)

    def flush(self) -> None:
        """Send what the channels could not take before."""
        for link in self._links():
            try:
                link.flush()
            except PeerLostError:
                log.debug("a local channel ended with a backlog")

    def _links(self) -> list[MessageSocket]:
        return [rank.channel for rank in self.ranks if not rank.dead] + self._servers

    def close(self) -> None:
        """Close all channels. After the engine has ended."""
        for rank in self.ranks:
            self._loop.forget(rank.pidfd)
            self._loop.forget(rank.channel.fileno())
            rank.close()
        for link in self._servers:
            self._loop.forget(link.fileno())
            link.close()
