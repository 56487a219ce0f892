"""A pair of nodes whose link ends in the middle of a job goes on over another one, and no sum knows of it.

    begin      a connection or lane failed here, or the peer asks for another link: ours is closed for good, so what has
               arrived over it is known; `Peering.seek` looks for another one, by tcp
    called     the peer has parted with a link that seems whole here, or has ended while nobody looked
    connected  both have parted, and said what they await: all parts are bound to the new link, what has not arrived
               is written again, then what waited
    gone       it was not reached in time

Nothing is lost and nothing comes twice: a write is repeated if and only if the peer awaits it, and its bytes are still
where they were (`Dispatcher.reconnect`). With transport=rdma, and if there is no other link, the peer is lost as ever.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..base.settings import Settings
from .event_loop import EventLoop
from .runtime import NodeRuntime
from .transport import Peering
from .transport.rdma import RdmaLink
from .transport.tcp import TcpLink

log = logging.getLogger("bpsfast.node")


@dataclass
class Reconnect:
    """One pair without a link: the one it had, and why it has ended."""

    link: TcpLink | RdmaLink
    reason: str


class Reconnects:
    """All detours of one node. Owned and called by the control loop's thread.

    Parameters
    ----------
    patiently
        Does what may take long while the node goes on beating (`Node.run_with_heartbeats`).
    on_fenced
        Called with a node's index when nothing is to be expected any more on the channel to it.
    on_lost
        Called with a node's index and the reason when a detour has failed.
    """

    def __init__(self, settings: Settings, loop: EventLoop, runtime: NodeRuntime, peering: Peering,
                 run_with_heartbeats: Callable[[Callable[[], Any]], Any], on_fenced: Callable[[int], None],
                 on_lost: Callable[[int, str], None]) -> None:
        self._leaves_rdma = settings.transport == "auto"
        # A peer may be busy for as long as it may be at the start; one that does not answer at all is given up sooner.
        self._timeout_s = settings.start_timeout_s
        self._loop = loop
        self._runtime = runtime
        self._peering = peering
        self._run_with_heartbeats = run_with_heartbeats
        self._on_fenced = on_fenced
        self._on_lost = on_lost
        self._under_way: dict[int, Reconnect] = {}
        self._forgotten: set[int] = set()

    def begin(self, index: int, reason: str) -> bool:
        """Part with the link to node *index* because of *reason*; False if that cannot be, and the node is lost."""
        if index in self._under_way:
            return True
        link = self._runtime.links.get(index)
        if not isinstance(link, TcpLink) and not (isinstance(link, RdmaLink) and self._leaves_rdma):
            return False
        if self._runtime.gpu_direct.reaches(link):
            log.warning("node %d is not reached by tcp instead: BPSFAST_GPU_DIRECT is on, partitions lie in GPU memory",
                        index)
            return False
        if not self._run_with_heartbeats(partial(self._runtime.part_with, link)):
            return False  # it may still be written into our memory
        log.info("%s with node %d is over: %s", link.kind, index, reason)
        reconnect = self._under_way[index] = Reconnect(link, reason)
        self._seek(index, reconnect)
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
        for index, reconnect in list(self._under_way.items()):
            link = self._peering.take(index).get(index)
            if isinstance(link, TcpLink):
                del self._under_way[index]
                if isinstance(reconnect.link, RdmaLink):
                    self._loop.forget(reconnect.link.channel.fileno())
                self._run_with_heartbeats(partial(self._runtime.resume, link))
                if isinstance(reconnect.link, RdmaLink):
                    log.warning("node %d is reached by tcp from now on, not by rdma: %s", index, reconnect.reason)
                else:
                    log.warning("node %d is reached by new connections: %s", index, reconnect.reason)

    def forget(self, index: int) -> None:
        """Look for no link to node *index* any more: it is lost, and the job goes on without it."""
        self._forgotten.add(index)
        self._under_way.pop(index, None)
        self._peering.give_up(index, "the job goes on without it")

    def channel_ended(self, index: int) -> bool:
        """The channel to node *index* is at its end: whether that is in order, since another link is sought."""
        return index in self._under_way

    def _called(self, index: int) -> None:
        reconnect = self._under_way.get(index)
        if reconnect is not None:  # the link that was to take its place has ended already
            self._seek(index, reconnect)
        elif not self.begin(index, f"node {index} has parted with it"):
            self._on_lost(index, f"node {index} has parted with its link, and there can be no other")

    def _seek(self, index: int, reconnect: Reconnect) -> None:
        self._peering.seek(index, reconnect.link.awaited, reconnect.reason if isinstance(reconnect.link, RdmaLink) else "")
        self._loop.call_at(time.monotonic() + self._timeout_s, lambda: self._check(index, reconnect))

    def _check(self, index: int, reconnect: Reconnect) -> None:
        if self._under_way.get(index) is reconnect:
            del self._under_way[index]
            why = f"there was no other link within {self._timeout_s:g} s"
            self._peering.give_up(index, why)
            self._on_lost(index, f"{reconnect.reason}; and {why}")
