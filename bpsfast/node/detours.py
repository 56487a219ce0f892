"""A pair of nodes whose link ends in the middle of a job goes on over another one, and no sum knows of it.

    begin      a connection or lane failed here, or the peer asks for another link: ours is closed for good, so what has
               arrived over it is known; `Peering.seek` looks for another one, by tcp
    called     the peer has parted with a link that seems whole here, or has ended while nobody looked
    connected  both have parted, and said what they await: all parts are bound to the new link, what has not arrived
               is written again, then what waited
    gone       it was not reached in time

Nothing is lost and nothing comes twice: a write is repeated if and only if the peer awaits it, and its bytes are still
where they were (`Dispatcher.detour`). With transport=rdma, and if there is no other link, the peer is lost as ever.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..settings import Settings
from ..transport import Peering
from ..transport.rdma import RdmaLink
from ..transport.tcp import TcpLink
from .event_loop import EventLoop
from .vertex import Vertex

log = logging.getLogger("bpsfast.node")


@dataclass
class Detour:
    """One pair without a link: the one it had, and why it has ended."""

    link: TcpLink | RdmaLink
    reason: str


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
        self._leaves_rdma = settings.transport == "auto"
        # A peer may be busy for as long as it may be at the start; one that does not answer at all is given up sooner.
        self._timeout_s = settings.start_timeout_s
        self._loop = loop
        self._vertex = vertex
        self._peering = peering
        self._patiently = patiently
        self._on_fenced = on_fenced
        self._on_lost = on_lost
        self._under_way: dict[int, Detour] = {}
        self._forgotten: set[int] = set()

    def begin(self, index: int, reason: str) -> bool:
        """Part with the link to node *index* because of *reason*; False if that cannot be, and the node is lost."""
        if index in self._under_way:
            return True
        link = self._vertex.links.get(index)
        if not isinstance(link, TcpLink) and not (isinstance(link, RdmaLink) and self._leaves_rdma):
            return False
        if self._vertex.straight.reaches(link):
            log.warning("node %d is not reached by tcp instead: BPSFAST_GPU_DIRECT is on, partitions lie in GPU memory",
                        index)
            return False
        if not self._patiently(partial(self._vertex.part_with, link)):
            return False  # it may still be written into our memory
        log.info("%s with node %d is over: %s", link.kind, index, reason)
        detour = self._under_way[index] = Detour(link, reason)
        self._seek(index, detour)
        self._on_fenced(index)
        return True

    def connected(self) -> None:
        """Go on with what `Peering` has found meanwhile: links, nodes that want one, nodes that are gone."""
        for index in self._peering.called():
            if index not in self._forgotten:
                self._called(index)
        for index, why in self._peering.gone().items():
            if index in self._under_way:
                self._on_lost(index, f"{self._under_way.pop(index).reason}; {why}")
        for index, detour in list(self._under_way.items()):
            link = self._peering.take(index).get(index)
            if isinstance(link, TcpLink):
                del self._under_way[index]
                if isinstance(detour.link, RdmaLink):
                    self._loop.forget(detour.link.channel.fileno())
                self._patiently(partial(self._vertex.resume, link))
                if isinstance(detour.link, RdmaLink):
                    log.warning("node %d is reached by tcp from now on, not by rdma: %s", index, detour.reason)
                else:
                    log.warning("node %d is reached by new connections: %s", index, detour.reason)

    def forget(self, index: int) -> None:
        """Look for no link to node *index* any more: it is lost, and the job goes on without it."""
        self._forgotten.add(index)
        self._under_way.pop(index, None)
        self._peering.give_up(index, "the job goes on without it")

    def channel_ended(self, index: int) -> bool:
        """The channel to node *index* is at its end: whether that is in order, since another link is sought."""
        return index in self._under_way

    def _called(self, index: int) -> None:
        detour = self._under_way.get(index)
        if detour is not None:  # the link that was to take its place has ended already
            self._seek(index, detour)
        elif not self.begin(index, f"node {index} has parted with it"):
            self._on_lost(index, f"node {index} has parted with its link, and there can be no other")

    def _seek(self, index: int, detour: Detour) -> None:
        self._peering.seek(index, detour.link.awaited, detour.reason if isinstance(detour.link, RdmaLink) else "")
        self._loop.call_at(time.monotonic() + self._timeout_s, lambda: self._check(index, detour))

    def _check(self, index: int, detour: Detour) -> None:
        if self._under_way.get(index) is detour:
            del self._under_way[index]
            why = f"there was no other link within {self._timeout_s:g} s"
            self._peering.give_up(index, why)
            self._on_lost(index, f"{detour.reason}; and {why}")
