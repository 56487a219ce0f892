"""The other nodes of a job, as one node sees them: connected once, read while the job runs, and lost.

    welcomed    the scheduler has said who they are: `Peering` connects to all of them
    connected   engine, ranks and plans learn of it; NICs are measured first, where that was asked for
    met         a node that comes late has connected, while the job goes on; taken in with the next change of epoch
    lost        a connection or process is gone: a detour, if there may be one, else the scheduler hears of it
"""
from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ..base.settings import Settings
from ..orchestration import messages
from ..orchestration.errors import PeerLostError, ProtocolError
from ..orchestration.placement import forecast, rates
from ..pyx.engine import NOBODY
from .event_loop import EventLoop
from .local_ranks import LocalRanks
from .metrics_collector import Member
from .plans import Plans
from .reconnects import Reconnects
from .transport import Epochs, Link, Peering, TalkingLink, nic_probe, shm, talking

if TYPE_CHECKING:
    from .main import Node

log = logging.getLogger("bpsfast.node")

#: How long ranks have to read why a job was aborted; and, if the lease is no longer, a scheduler to say what a lost
#: peer means: it may have to hear first whether that one lives.
GRACE_S = 2.0


class Peers:
    """The peers of *node*. Called by the control loop's thread, but for `source_lost_soon`.

    Parameters
    ----------
    listener
        Where other nodes' data connections come in; `close` closes it, if the job has begun.
    """

    def __init__(self, node: Node, loop: EventLoop, settings: Settings, key: bytes, listener: socket.socket,
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
        self._reconnects: Reconnects | None = None
        self._welcome: messages.Welcome | None = None
        self._nodes: dict[int, messages.NodeInfo] = {}
        self._late: set[int] = set()  # who is to come, and not connected yet
        self._lost_peers: set[int] = set()
        self._parted: set[int] = set()  # with whom the whole job has parted
        #: Called once all peers of the start are connected that the job has not parted with.
        self.on_connected: Callable[[], None] = lambda: None

    def welcomed(self, message: messages.Welcome) -> None:
        """Begin to connect."""
        self._welcome = message
        self._nodes = {node.index: node for node in message.nodes}
        runtime = self._node.runtime
        self._peering = Peering(self._settings, self._key, self._epochs, message.nodes[message.index], message.nodes,
                                self._listener, runtime.shm_endpoint, runtime.rails,
                                lambda: self._loop.call_soon(self._changed), (*message.lost, *message.joining),
                                message.is_late)
        self._peering.start()
        self._changed()

    def visit(self, message: messages.ProbeRequest) -> None:
        """Find out for the scheduler whether a node answers at its data port."""
        assert self._peering is not None
        self._peering.visit(message.node, lambda index, outcome: self._loop.call_soon(
            lambda: self._node.say(messages.ProbeResult(node=index, outcome=outcome))))

    def came(self, link: shm.ShmLink) -> None:
        """Take in a node of this host that came to the local socket."""
        assert self._peering is not None
        self._peering.offer(link, "a memfd exchange over this node's local socket worked")

    def expect(self, message: messages.Joined) -> None:
        """Let a node that comes late connect."""
        assert self._peering is not None
        self._late.add(message.node.index)
        self._nodes[message.node.index] = message.node
        self._epochs.expect(message.node.index)
        self._peering.expect(message.node)
        self._node.send(messages.NewcomerReady(node=message.node.index))

    def not_coming(self, message: messages.NewcomerGone) -> None:
        """Expect a node no more that was to come late."""
        assert self._peering is not None
        self._parted.add(message.node)
        self._late.discard(message.node)
        self._peering.forget(message.node)
        self._peering.give_up(message.node, "the job goes on without it")

    def take_in(self, index: int) -> None:
        """Let node *index*, which has come late, be a peer, if it is to be one of this node's, and is not yet."""
        assert self._peering is not None
        runtime, name = self._node.runtime, f"node {index}"
        link = self._peering.take(index).get(index) if index not in runtime.links else None
        if link is not None:
            transport = self._peering.describe()[name]
            log.info("%s, which has come late, by %s", name, transport)
            error = self._node.run_with_heartbeats(lambda: _error_of(lambda: runtime.take_in(link, transport)))
            if error is not None:  # the job can do without it
                self._lost(index, f"it cannot be made a peer of {self._node.name} ({transport}): {error!r}")
                return
            self._watch(link)

    def rates_known(self, message: messages.Rates) -> None:
        """Say what to expect now that all NICs are measured."""
        assert self._welcome is not None
        self._say_what_to_expect([msgspec.structs.replace(node, nic_rate_bytes=rate)
                                  for node, rate in zip(self._welcome.nodes, message.nic_rate_bytes)])

    def source_lost_soon(self, source: int, code: int) -> None:
        """Hear, from any thread, that the engine or a lane gave *source* up; *code* is an errno."""
        self._loop.call_soon(lambda: self._source_lost(source, code))

    def part_with(self, index: int) -> None:
        """Watch and expect node *index* no more: the job goes on without it."""
        self._parted.add(index)
        if self._peering is not None and not self._node.runtime.connected:
            assert self._welcome is not None
            self._welcome = msgspec.structs.replace(self._welcome, lost=(*self._welcome.lost, index))
            self._peering.part_with(index)
            return
        link = self._node.runtime.links.get(index)
        if link is None:
            return  # neither of the two has ranks; or it was parted with before
        if (talking_link := talking(link)) is not None:
            self._loop.forget(talking_link.channel.fileno())
        if isinstance(link, shm.ShmLink):
            self._loop.forget(link.pidfd)
        if self._reconnects is not None:
            self._reconnects.forget(index)

    def leave_rdma(self, index: int, reason: str) -> bool:
        """Part with the RDMA link to node *index* because of *reason*, for one by tcp; whether that can be."""
        return self._reconnects is not None and self._reconnects.begin(index, reason)

    def announce_shutdown(self) -> None:
        """Tell all peers that the ranks of this node have left, for there is no scheduler to tell them."""
        assert self._peering is not None
        self._peering.peer_shutdowns.announce_shutdown()

    @property
    def peer_shutdowns(self) -> set[int]:
        """The peers that have said that all their ranks have left."""
        return self._peering.peer_shutdowns.said if self._peering is not None else set()

    @property
    def has_announced_shutdown(self) -> bool:
        """Whether all peers that can be reached know that the ranks of this node have left."""
        return self._peering is not None and self._peering.peer_shutdowns.are_announced

    def members(self) -> tuple[Member, ...]:
        """Return the nodes of the job, this one too, and which of them are there."""
        assert self._welcome is not None
        gone = {*self._welcome.lost, *self._parted, *self._lost_peers, *self._late}
        return tuple(Member(index, node.host, not node.ranks, index not in gone)
                     for index, node in sorted(self._nodes.items()))

    def close(self) -> None:
        """Stop connecting; close what was not handed on."""
        if self._peering is not None:
            self._peering.close()

    # -- innards ------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Once every peer is connected: tell the engine, the ranks, and do what was held back."""
        assert self._peering is not None and self._welcome is not None
        if self._peering.error is not None:
            self._node.fail(self._peering.error)
        for index, why in self._peering.unreached().items():
            self._lost(index, why)
        if self._reconnects is not None and not self._node.ending:
            self._reconnects.connected()
            for index in sorted(self._peering.refused() - self._parted - self.peer_shutdowns):
                self._node.say(messages.ProbeResult(node=index, outcome="refused"))
        if self._node.runtime.connected and not self._node.ending:
            self._meet()
        if not self._peering.done or self._node.runtime.connected or self._node.ending:
            return
        for name, choice in self._peering.describe().items():
            log.info("%s by %s", name, choice)
        me, nodes = self._welcome.nodes[self._welcome.index], self._welcome.nodes
        if nic_probe.partners(me, nodes):
            links, deadline = self._peering.links, time.monotonic() + self._settings.start_timeout_s
            rate = self._node.run_with_heartbeats(lambda: nic_probe.measure(me, nodes, links, deadline))
            if me.probes:
                self._node.send(messages.Measured(nic_rate_bytes=rate))
        if not any(node.probes for node in nodes):
            self._say_what_to_expect(nodes)
        self._node.runtime.connect(me, self._welcome, self._peering.take(), self._peering.describe(), self._local_ranks.ranks)
        for link in self._node.runtime.talking_links():
            self._watch(link)
        self._reconnects = Reconnects(self._settings, self._loop, self._node.runtime, self._peering, self._node.run_with_heartbeats,
                                self._plans.without, self._lost)
        self._local_ranks.connected(me, self._welcome, self._peering.describe())
        self._plans.connected()
        self._reconnects.connected()  # a link may have ended before anybody could part with it
        self._meet()
        self.on_connected()
        if self._welcome.is_late:
            plan_installer, welcome = self._node.runtime.plan_installer, self._welcome
            self._node.run_with_heartbeats(lambda: plan_installer.warm(welcome.kinds, welcome.share_nbytes))
            self._node.send(messages.NewcomerReady(node=me.index, is_linked=True))

    def _meet(self) -> None:
        """Say which nodes that come late are connected."""
        assert self._peering is not None
        for index in sorted(self._late & self._peering.links.keys()):
            self._late.discard(index)
            self._node.send(messages.NewcomerReady(node=index, is_linked=True))

    def _watch(self, link: Link) -> None:
        if (talking_link := talking(link)) is not None:
            self._loop.watch(talking_link.channel.fileno(), partial(self._read, talking_link))
        if isinstance(link, shm.ShmLink):
            self._loop.watch(link.pidfd, partial(self._lost, link.index, link.gone))

    def _say_what_to_expect(self, nodes: Sequence[messages.NodeInfo]) -> None:
        """Log, on one node of the job, what the placement promises, and why it cannot win where it cannot."""
        assert self._peering is not None and self._welcome is not None
        if self._welcome.index != 0:
            return
        policy = self._settings.placement
        if policy == "ps" and all(node.ranks for node in nodes):
            policy = "colocated"  # as the scheduler does without a helper
        machines = rates.machines_of(nodes)
        log.info("%s", forecast.first_line(machines, policy))
        if any(link.kind != "shm" for link in self._peering.links.values()):  # else no NIC is in the way
            for warning in (*rates.remarks(nodes, policy), *forecast.warnings(machines, policy)):
                log.warning("%s", warning)

    def _read(self, link: TalkingLink) -> None:
        assert self._reconnects is not None
        try:
            received = link.channel.recv_nowait()
        except PeerLostError:
            self._loop.forget(link.channel.fileno())
            if not self._reconnects.channel_ended(link.index):
                self._lost(link.index, link.gone)
            return
        for message, fds in received:
            self._node.heard()
            self._plans.peer_said(link, message, fds)

    def _source_lost(self, source: int, code: int) -> None:
        """A broken connection, or rubbish that was announced."""
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
        if index in self._parted:
            return
        if code == errno.EPROTO or index is None:
            what = self._node.runtime.why_lost(index, code) if index is not None else os.strerror(code)
            # It ends the job, for all of us: what that one does sum may be as wrong.
            rubbish = f"{who} announced or sent what fits no partition ({what})"
            self._node.fail(ProtocolError(f"{rubbish}: mixed versions, or our bug"), "" if index is not None else who)
            return
        if index in self.peer_shutdowns:
            return
        reason = f"its data connection ended ({self._node.runtime.why_lost(index, code)})"
        if self._reconnects is None or not self._reconnects.begin(index, reason):
            self._lost(index, reason)

    def _lost(self, index: int, reason: str) -> None:
        """Report a lost peer. The scheduler knows whether the job had ended anyway; without its word we abort."""
        link = self._node.runtime.links.get(index)
        if isinstance(link, shm.ShmLink):
            self._loop.forget(link.pidfd)
        if index in self._lost_peers | self._parted or index in self.peer_shutdowns or self._node.ending:
            return
        self._lost_peers.add(index)
        host = self._nodes[index].host
        log.info("node %d (%s) is lost: %s", index, host, reason)
        self._node.send(messages.Lost(who=f"node {index}", reason=reason))
        error = PeerLostError(f"node {index} ({host}) is lost: {reason}")
        wait_s = max(GRACE_S, self._settings.lease_s)  # one that is silent for longer is lost itself
        self._loop.call_at(time.monotonic() + wait_s, lambda: self._without_word(index, error))

    def _without_word(self, index: int, error: PeerLostError, was_without: bool = False) -> None:
        """End the job unless the scheduler has said meanwhile that it goes on without node *index*, or is lost.

        A helper ends alone, and says so: the job can do without it. *was_without*: it was lost when last asked:
        the next one has as long to say so as any.
        """
        self._node.catch_up()  # this thread may have been at work for longer than the scheduler took
        if index in self._parted:
            return
        if self._node.is_without_scheduler and not self._nodes[index].ranks:
            self._loop.call_at(time.monotonic() + GRACE_S, lambda: self._without_word(index, error, True))
        elif was_without:
            wait_s = max(GRACE_S, self._settings.lease_s)
            self._loop.call_at(time.monotonic() + wait_s, lambda: self._without_word(index, error))
        else:
            self._node.fail(error, tell=not self._local_ranks.ranks)


def _error_of(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as exc:
        return exc
    return None
