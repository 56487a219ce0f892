"""A pair of nodes whose RDMA fails in the middle of a job goes on by tcp, and no sum knows of it.

    begin       a lane failed here, or the peer says that one failed there
    fence       our queue pairs are destroyed, so what has arrived is known for good: the peer is told (`Fenced`)
    connect     once both have said so, `Peering.detour` makes a link as at the start
    resume      all parts are bound to it; what has not arrived is written again, then what waited

Nothing is lost and nothing comes twice: a write is repeated if and only if the peer awaits it, and its bytes are still
where they were (`Dispatcher.detour`). With transport=rdma, and if the peer does not answer, it is lost as ever.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..orchestration.errors import ProtocolError
from ..settings import Settings
from ..transport import Peering
from ..transport.rdma import Fenced, RdmaLink
from ..transport.tcp import TcpLink
from .event_loop import EventLoop
from .vertex import Vertex

log = logging.getLogger("bpsfast.node")


@dataclass
class Detour:
    """One pair on its way from RDMA to tcp. `awaited`: what the peer has not got, once it has said so."""

    link: RdmaLink
    reason: str
    awaited: dict[int, int] | None = None


class Detours:
    """All detours of one node. Owned and called by the control loop's thread.

    Parameters
    ----------
    patiently
        Does what may take long while the node goes on beating (`Node.patiently`).
    on_fenced
        Called with a node's index when nothing is to be expected any more on the channel to it.
    on_lost
        Called with a node's index and the reason when a detour has failed.
    """

    def __init__(self, settings: Settings, loop: EventLoop, vertex: Vertex, peering: Peering,
                 patiently: Callable[[Callable[[], Any]], Any], on_fenced: Callable[[int], None],
                 on_lost: Callable[[int, str], None]) -> None:
        self._allowed = settings.transport == "auto"
        # A peer may be busy for as long as it may be at the start; one that was stopped is found by its lease.
        self._timeout_s = settings.start_timeout_s
        self._loop = loop
        self._vertex = vertex
        self._peering = peering
        self._patiently = patiently
        self._on_fenced = on_fenced
        self._on_lost = on_lost
        self._under_way: dict[int, Detour] = {}

    def begin(self, index: int, reason: str) -> bool:
        """Part with RDMA to node *index* because of *reason*; False if that cannot be, and the node is lost."""
        if index in self._under_way:
            return True
        link = self._vertex.links.get(index)
        if not self._allowed or not isinstance(link, RdmaLink):
            return False
        if not self._patiently(partial(self._vertex.part_with, link)):
            return False  # it may still be written into our memory
        self._peering.give_up(index, reason)  # before the peer hears of it, which may then dial at once
        log.info("rdma with node %d is over: %s", index, reason)
        detour = self._under_way[index] = Detour(link, reason)
        link.tell(Fenced(reason=reason, awaited=tuple(link.awaited().items())))
        self._on_fenced(index)
        self._loop.call_at(time.monotonic() + self._timeout_s, lambda: self._check(index, detour))
        return True

    def peer_fenced(self, link: RdmaLink, message: Fenced) -> None:
        """Node *link* leads to has parted with RDMA: do so too, and connect by tcp."""
        if not self.begin(link.index, f"node {link.index} says: {message.reason}"):
            self._on_lost(link.index, message.reason)
            return
        detour = self._under_way[link.index]
        if detour.awaited is not None:
            raise ProtocolError(f"node {link.index} said twice that its queue pairs are gone")
        detour.awaited = dict(message.awaited)
        self._peering.detour(link.index)
        self.connected()  # it may have been let in beside another one

    def connected(self) -> None:
        """Go on with those whom `Peering` has connected meanwhile; or its error ends the job for all."""
        for index, detour in list(self._under_way.items()):
            link = self._peering.links.get(index)
            if detour.awaited is not None and isinstance(link, TcpLink):
                del self._under_way[index]
                self._peering.take(index)
                self._loop.forget(detour.link.channel.fileno())
                self._patiently(partial(self._vertex.resume, link, detour.awaited))
                log.warning("node %d is reached by tcp from now on, not by rdma: %s", index, detour.reason)

    def forget(self, index: int) -> None:
        """Go on with nothing for node *index*: it is lost, and the job goes on without it."""
        self._under_way.pop(index, None)

    def channel_ended(self, index: int) -> bool:
        """The channel to node *index* is at its end: whether that is in order, since all was said on it."""
        detour = self._under_way.get(index)
        return detour is not None and detour.awaited is not None

    def _check(self, index: int, detour: Detour) -> None:
        if self._under_way.get(index) is detour and detour.awaited is None:
            self._on_lost(index, f"{detour.reason}; and it did not answer within {self._timeout_s:g} s that it goes "
                                 "on by tcp")

