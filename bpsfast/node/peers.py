"""Connects a node to its peers, and reports lost peers to the scheduler.

    welcomed    the scheduler has named the peers: `Peering` connects to all of them
    connected   runtime, ranks and plans are told; NICs are measured first, if a setting asks for it
    late        a node that joins the running job has connected; it takes part from the next change of epoch on
    lost        a connection or process has ended: another link (`LinkChanges`) where one is possible, else a
                report to the scheduler
"""
from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ..base.resources import is_ready
from ..base.settings import Settings
from ..orchestration import messages
from ..orchestration.errors import PeerLostError, ProtocolError
from ..orchestration.placement import forecast, rates
from ..pyx.engine import NOBODY
from .control_loop import ControlLoop
from .event_loop import EventLoop
from .link_changes import LinkChanges
from .local_ranks import LocalRanks
from .metrics import Member
from .plans import Plans
from .transport import Epochs, Link, Peering, TalkingLink, nic_probe, shm, talking
from .transport.rdma import LinkClosed, LinkResumed, LinkTaken, RdmaLink

log = logging.getLogger("bpsfast.node")

#: How long ranks have to read why a job was aborted; and, if lease_s is not longer, how long the scheduler has to
#: decide what the loss of a peer means: it may first have to find out whether that node is alive.
GRACE_S = 2.0
_FLUSH_S = 0.05


class Peers:
    """All peers of *node*. For the control loop's thread, except `source_lost_soon`.

    *listener*: where other nodes' data connections come in; `close` closes it, if the job has begun.
    """

    def __init__(self, node: ControlLoop, loop: EventLoop, settings: Settings, key: bytes, listener: socket.socket,
                 plans: Plans, local_ranks: LocalRanks, epochs: Epochs) -> None:
        self._node = node
        self._loop = loop
        self._settings = settings
        self._key = key
        self._listener = listener
        self._plans = plans
        self._local_ranks = local_ranks
        self._epochs = epochs
        self._peering: Peering | None = None
        self._link_changes: LinkChanges | None = None
        self._welcome: messages.Welcome | None = None
        self._nodes: dict[int, messages.NodeInfo] = {}
        self._late: set[int] = set()  # join the running job, and are not connected yet
        self._lost_peers: set[int] = set()
        self._dropped: set[int] = set()  # the whole job goes on without them
        #: Called once all peers of the start are connected that have not been dropped.
        self.on_connected: Callable[[], None] = lambda: None

    def welcomed(self, message: messages.Welcome) -> None:
        """Start to connect to all peers."""
        self._welcome = message
        self._nodes = {node.index: node for node in message.nodes}
        runtime = self._node.runtime
        self._peering = Peering(self._settings, self._key, self._epochs, message.nodes[message.index], message.nodes,
                                self._listener, runtime.shm_endpoint, runtime.rails,
                                lambda: self._loop.call_soon(self._changed), (*message.lost, *message.joining),
                                message.is_late)
        self._peering.start()
        self._changed()

    @property
    def _connector(self) -> Peering:
        assert self._peering is not None
        return self._peering

    @property
    def _job(self) -> messages.Welcome:
        assert self._welcome is not None
        return self._welcome

    def probe(self, message: messages.ProbeRequest) -> None:
        """Test for the scheduler whether a node answers at its data port."""
        self._connector.probe(message.node, lambda index, outcome: self._loop.call_soon(
            lambda: self._node.send_unrecorded(messages.ProbeResult(node=index, outcome=outcome))))

    def add_shm_link(self, link: shm.ShmLink) -> None:
        """Take the link to a node of this host that connected to the local socket."""
        self._connector.offer(link, "a memfd exchange over this node's local socket worked")

    def expect(self, message: messages.Joined) -> None:
        """Allow a node that joins the running job to connect."""
        self._late.add(message.node.index)
        self._nodes[message.node.index] = message.node
        self._epochs.expect(message.node.index)
        self._connector.expect(message.node)
        self._node.send(messages.NewcomerReady(node=message.node.index))

    def not_coming(self, message: messages.NewcomerGone) -> None:
        """Forget a node that was to join the running job."""
        self._dropped.add(message.node)
        self._late.discard(message.node)
        self._connector.forget(message.node)
        self._connector.reconnector.give_up(message.node, "the job goes on without it")

    def add_peer(self, index: int) -> None:
        """Make node *index*, which has joined the running job, a peer, if it is connected and not a peer yet."""
        runtime, name = self._node.runtime, f"node {index}"
        link = self._connector.take(index).get(index) if index not in runtime.links else None
        if link is not None:
            transport = self._connector.describe()[name]
            log.info("%s, which has joined the running job, by %s", name, transport)
            error = self._node.run_with_heartbeats(lambda: _error_of(lambda: runtime.add_link(link, transport)))
            if error is not None:  # the job can do without it
                self._lost(index, f"it cannot be made a peer of {self._node.name} ({transport}): {error!r}")
                return
            self._watch(link)

    def rates_known(self, message: messages.Rates) -> None:
        """Log what to expect, now that all NICs are measured."""
        self._log_forecast([msgspec.structs.replace(node, nic_rate_bytes=rate)
                                  for node, rate in zip(self._job.nodes, message.nic_rate_bytes)])

    def source_lost_soon(self, source: int, code: int) -> None:
        """Handle the loss of *source*, of which the engine or a stream has told; *code* is an errno. Any thread."""
        runtime = self._node.runtime
        index = runtime.who(source)[1]
        link = runtime.links.get(index) if index is not None else None
        self._loop.call_soon(lambda: self._source_lost(source, code, link))

    def drop_peer(self, index: int) -> None:
        """Stop watching node *index*: the job goes on without it."""
        self._dropped.add(index)
        if self._peering is not None and not self._node.runtime.connected:
            self._welcome = msgspec.structs.replace(self._job, lost=(*self._job.lost, index))
            self._connector.drop_peer(index)
            return
        link = self._node.runtime.links.get(index)
        if link is None:
            return  # neither of the two has ranks, or it was dropped before
        if (talking_link := talking(link)) is not None:
            self._loop.forget(talking_link.channel.fileno())
        if isinstance(link, shm.ShmLink):
            self._loop.forget(link.pidfd)
        if self._link_changes is not None:
            self._link_changes.forget(index)

    def await_slots(self, generation: int) -> None:
        """Wait until every peer has told where this node writes the parts of *generation*, which is to be committed.

        It has told before it was ready for the commit. That may not be read yet where RDMA has taken the place of tcp
        since this node was ready, so did not wait for it. A link over which nothing comes is replaced.
        """
        patience_s = self._settings.lease_s / 2  # this node sends no heartbeats meanwhile
        deadline = time.monotonic() + patience_s
        for link in self._node.runtime.installer.uncovered(generation):
            while link.covered < generation and not link.fenced:
                self._node.runtime.flush()  # the peer answers only after it has received all of LinkResumed
                is_ready(link.channel.fileno(), _FLUSH_S)
                if not self._read(link):
                    break
                if time.monotonic() >= deadline:
                    why = f"it did not tell where generation {generation} is to be written within {patience_s:g} s"
                    if self._link_changes is None or not self._link_changes.begin(link.index, why):
                        self._lost(link.index, why)
                    break

    def announce_shutdown(self) -> None:
        """Tell all peers that the ranks of this node have left; there is no scheduler to do so."""
        self._connector.peer_shutdowns.announce_shutdown()

    @property
    def peer_shutdowns(self) -> set[int]:
        """The peers that have announced that all their ranks have left."""
        return self._peering.peer_shutdowns.announced if self._peering is not None else set()

    @property
    def has_announced_shutdown(self) -> bool:
        """Whether all peers that can be reached know that the ranks of this node have left."""
        return self._peering is not None and self._peering.peer_shutdowns.are_announced

    def members(self) -> tuple[Member, ...]:
        """Return the nodes of the job, including this one, and which of them are present."""
        gone = {*self._job.lost, *self._dropped, *self._lost_peers, *self._late}
        return tuple(Member(index, node.host, not node.ranks, index not in gone)
                     for index, node in sorted(self._nodes.items()))

    def close(self) -> None:
        """Stop connecting; close what was not handed on."""
        if self._peering is not None:
            self._connector.close()

    def _changed(self) -> None:
        """Handle news of `Peering`; once every peer is connected, tell the engine and the ranks, and do what waited."""
        if self._connector.error is not None:
            self._node.fail(self._connector.error)
        for index, why in self._connector.unreached().items():
            self._lost(index, why)
        if self._link_changes is not None and not self._node.ending:
            self._link_changes.connected()
            for index in sorted(self._connector.reconnector.refused() - self._dropped - self.peer_shutdowns):
                self._node.send_unrecorded(messages.ProbeResult(node=index, outcome="refused"))
        if self._node.runtime.connected and not self._node.ending:
            self._report_connected()
        if not self._connector.done or self._node.runtime.connected or self._node.ending:
            return
        for name, choice in self._connector.describe().items():
            log.info("%s by %s", name, choice)
        me, nodes = self._job.nodes[self._job.index], self._job.nodes
        if nic_probe.partners(me, nodes):
            links, deadline = self._connector.links, time.monotonic() + self._settings.start_timeout_s
            rate = self._node.run_with_heartbeats(lambda: nic_probe.measure(me, nodes, links, deadline))
            if me.probes:
                self._node.send(messages.Measured(nic_rate_bytes=rate))
        if not any(node.probes for node in nodes):
            self._log_forecast(nodes)
        self._node.runtime.connect(me, self._job, self._connector.take(), self._connector.describe(),
                                   self._local_ranks.ranks)
        for link in self._node.runtime.talking_links():
            self._watch(link)
        self._link_changes = LinkChanges(self._settings, self._loop, self._node.runtime, self._connector,
                                      self._node.run_with_heartbeats, self._watch_channel,
                                      lambda: self._node.ending, self._plans.without, self._lost)
        self._local_ranks.connected(me, self._job, self._connector.describe())
        self._plans.connected()
        self._link_changes.connected()  # a link may have ended before it could be replaced
        self._report_connected()
        self.on_connected()
        if self._job.is_late:
            installer, welcome = self._node.runtime.installer, self._job
            self._node.run_with_heartbeats(lambda: installer.warm(welcome.kinds, welcome.share_nbytes))
            self._node.send(messages.NewcomerReady(node=me.index, is_linked=True))

    def _report_connected(self) -> None:
        """Tell the scheduler which joining nodes are connected."""
        for index in sorted(self._late & self._connector.links.keys()):
            self._late.discard(index)
            self._node.send(messages.NewcomerReady(node=index, is_linked=True))

    def _watch(self, link: Link) -> None:
        if (talking_link := talking(link)) is not None:
            self._watch_channel(talking_link)
        if isinstance(link, shm.ShmLink):
            self._loop.watch(link.pidfd, partial(self._lost, link.index, link.end_reason))

    def _watch_channel(self, link: TalkingLink) -> None:
        self._loop.watch(link.channel.fileno(), partial(self._read, link))
        # Who made the link may have received more than the last message of its handshake.
        self._loop.call_soon(partial(self._read, link))

    def _log_forecast(self, nodes: Sequence[messages.NodeInfo]) -> None:
        """Log on one node of the job what speed the placement promises, and why it may bring nothing."""
        if self._job.index != 0:
            return
        policy = self._settings.placement
        if policy == "ps" and all(node.ranks for node in nodes):
            policy = "colocated"  # as the scheduler does without a helper
        machines = rates.machines_of(nodes)
        log.info("%s", forecast.first_line(machines, policy))
        if any(link.kind != "shm" for link in self._connector.links.values()):  # else no NIC is in the way
            for warning in (*rates.remarks(nodes, policy), *forecast.warnings(machines, policy)):
                log.warning("%s", warning)

    def _read(self, link: TalkingLink) -> bool:
        """Handle what the peer has sent over the channel of *link*; return whether the channel is still open."""
        assert self._link_changes is not None
        if link.channel.fileno() < 0:
            return False
        try:
            received = link.channel.recv_nowait()
        except PeerLostError:
            self._loop.forget(link.channel.fileno())
            if not self._link_changes.channel_ended(link):
                self._lost(link.index, link.end_reason)
            return False
        for message, fds in received:
            self._node.count_message()
            if isinstance(message, LinkTaken | LinkResumed | LinkClosed) and isinstance(link, RdmaLink):
                self._link_changes.message(link, message)
            else:
                self._plans.peer_message(link, message, fds)
        return True

    def _source_lost(self, source: int, code: int, link: Link | None = None) -> None:
        """Handle a broken connection, or an announcement that makes no sense; *link*: the one that ended, if known."""
        if self._node.ending:
            return
        if source < 0:
            error = self._node.runtime.service_error
            self._node.fail(ProtocolError(f"the communication service of {self._node.name} failed: {error!r}"))
            return
        if source == NOBODY:
            self._node.fail(self._node.runtime.engine_error)
            return
        who, index = self._node.runtime.who(source)
        if index in self._dropped:
            return
        if code == errno.EPROTO or index is None:
            what = self._node.runtime.why_lost(index, code) if index is not None else os.strerror(code)
            # The whole job ends: sums of that process may be as wrong.
            nonsense = f"{who} announced or sent what fits no partition ({what})"
            self._node.fail(ProtocolError(f"{nonsense}: mixed versions, or a bug of bpsfast"),
                            "" if index is not None else who)
            return
        if index in self.peer_shutdowns:
            return
        if link is not None and link is not self._node.runtime.links.get(index):
            return  # it was replaced meanwhile
        reason = f"its data connection ended ({self._node.runtime.why_lost(index, code)})"
        if self._link_changes is None or not self._link_changes.begin(index, reason):
            self._lost(index, reason)

    def _lost(self, index: int, reason: str) -> None:
        """Report a lost peer. The scheduler knows whether the job had ended anyway; if it does not answer, abort."""
        link = self._node.runtime.links.get(index)
        if isinstance(link, shm.ShmLink):
            self._loop.forget(link.pidfd)
        if index in self._lost_peers | self._dropped or index in self.peer_shutdowns or self._node.ending:
            return
        self._lost_peers.add(index)
        host = self._nodes[index].host
        log.info("node %d (%s) is lost: %s", index, host, reason)
        self._node.send(messages.Lost(who=f"node {index}", reason=reason))
        error = PeerLostError(f"node {index} ({host}) is lost: {reason}")
        wait_s = max(GRACE_S, self._settings.lease_s)  # a scheduler that is silent for longer is lost itself
        self._loop.call_at(time.monotonic() + wait_s, lambda: self._end_unanswered(index, error))

    def _end_unanswered(self, index: int, error: PeerLostError, was_without: bool = False) -> None:
        """End the job unless the scheduler has dropped node *index* meanwhile, or is lost.

        A helper only ends itself, and reports that: the job goes on. *was_without*: the scheduler was lost at the
        last check; the next one has the full time to answer.
        """
        self._node.catch_up()  # this thread may have been busy for longer than the scheduler took
        if index in self._dropped:
            return
        goes_on = not self._nodes[index].ranks or self._settings.on_worker_loss == "continue"
        if self._node.is_without_scheduler and goes_on:
            self._loop.call_at(time.monotonic() + GRACE_S, lambda: self._end_unanswered(index, error, True))
        elif was_without:
            wait_s = max(GRACE_S, self._settings.lease_s)
            self._loop.call_at(time.monotonic() + wait_s, lambda: self._end_unanswered(index, error))
        else:
            self._node.fail(error, tell=not self._local_ranks.ranks)


def _error_of(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as exc:
        return exc
    return None
