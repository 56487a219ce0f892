"""Replaces the links between two nodes that end in the middle of a job: `LinkChanges`."""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ..base.settings import Settings
from ..orchestration.errors import BpsError
from .event_loop import EventLoop
from .runtime import NodeRuntime
from .transport import Peering, TalkingLink, WireLink
from .transport.rdma import LinkClosed, LinkResumed, LinkTaken, RdmaLink
from .transport.rdma.returns import FIRST_PAUSE_S
from .transport.tcp import TcpLink

log = logging.getLogger("bpsfast.node")

#: How long an RDMA link has to live for the next return to RDMA to come soon; the longest pause before it.
_SHORT_LIFE_S, _MOST_PAUSE_S = 60.0, 300.0
_WATCH_RAILS_S = 1.0


@dataclass
class LinkChange:
    """A peer without a link: the link it had, and why that has ended.

    `by_tcp`: whether tcp may take its place. `fresh`: the RDMA link that is received over, while the peer has not said
    what it awaits, and where. `deadline`: when the peer is lost, in monotonic seconds.
    """

    link: WireLink
    reason: str
    by_tcp: bool
    fresh: RdmaLink | None = None
    deadline: float = 0.0


class LinkChanges:
    """Replaces links that end in the middle of a job, without any effect on sums. Used by the control loop's thread.

    begin      a connection or queue pair failed here, or the peer asks for another link: this node closes its own for
               good, so what has arrived over it is known; `Peering.seek` looks for another link, by tcp
    requested  the peer has closed a link that seems whole here
    connected  both sides have closed it and told each other what they await: all partitions are bound to the new link,
               what has not arrived is written again, then what waited
    failed     there was no new link in time: the peer is lost

    A write is repeated if and only if the peer awaits it, and its bytes are still in place (`Dispatcher.resume`).

    Where RDMA has failed, an RDMA link is made again in the background (`RdmaReturns`), and takes the place of tcp:

    made         both sides have the link; the side that accepted it says so (LinkTaken)
    change over  the other side closes its tcp link, binds all partitions to the new link, and tells the peer what it
                 awaits, and where (LinkResumed); the peer then does the same
    resumed      the peer's LinkResumed has come: writes go on

    The same happens at once where tcp must not be used: with transport=rdma, or partitions in GPU memory. If the new
    link fails before it is used, tcp is sought as for any other.

    *run_with_heartbeats*: see `ControlLoop`. *watch*: reads the channel of a link from now on. *is_ending*: whether the
    job is over here. *on_fenced*: called with a node's index when its slots need not be waited for. *on_lost*: called
    with a node's index and the reason when a change has failed.
    """

    def __init__(self, settings: Settings, loop: EventLoop, runtime: NodeRuntime, peering: Peering,
                 run_with_heartbeats: Callable[[Callable[[], Any]], Any], watch: Callable[[TalkingLink], None],
                 is_ending: Callable[[], bool], on_fenced: Callable[[int], None],
                 on_lost: Callable[[int, str], None]) -> None:
        self._leaves_rdma = settings.transport == "auto"
        # A peer may be as busy as at the start; one that does not answer at all is given up sooner.
        self._timeout_s = settings.start_timeout_s
        self._loop = loop
        self._runtime = runtime
        self._peering = peering
        self._run_with_heartbeats = run_with_heartbeats
        self._watch = watch
        self._is_ending = is_ending
        self._on_fenced = on_fenced
        self._on_lost = on_lost
        self._under_way: dict[int, LinkChange] = {}
        self._forgotten: set[int] = set()
        self._made: dict[int, RdmaLink] = {}  # in the background, and not used yet
        self._rails: dict[int, dict[str, str]] = {}  # the most that have reached each node; see `RdmaLink.rails`
        self._returned_at: dict[int, float] = {}
        self._pauses_s: dict[int, float] = {}
        self._without_tcp: set[int] = set()  # the nodes that have said that tcp must not be used
        self._is_watching_rails = False

    def begin(self, index: int, reason: str) -> bool:
        """Close the link to node *index* because of *reason*, and seek another; False if that is impossible."""
        change = self._under_way.get(index)
        if change is not None and change.fresh is None:
            return True
        link = self._runtime.links.get(index)
        if not isinstance(link, TcpLink | RdmaLink) or not self._close(index, link, reason):
            return False
        was_fresh = change is not None and change.fresh is link
        change = self._under_way[index]
        if was_fresh and isinstance(link, RdmaLink):
            self._returned_at[index] = time.monotonic()
            link.tell(LinkClosed(by_tcp=change.by_tcp))  # the peer may not use it yet, so would not notice
        if not change.by_tcp and isinstance(link, RdmaLink) and not link.may_return:
            del self._under_way[index]
            return False
        log.info("the %s link to node %d has ended: %s", link.kind, index, reason)
        if index not in self._made or not self._change_over(index, reason):
            self._seek(index, change)
        return True

    def connected(self) -> None:
        """Handle what `Peering` has found meanwhile: new links, peers that ask for one, peers that are gone."""
        for made in self._peering.rdma_returns.links():
            if self._made.get(made.index) is not made:
                self._made[made.index] = made
                self._watch(made)
                if made.index > self._peering.index:
                    made.tell(LinkTaken())
        for index in self._peering.reconnector.requested():
            if index not in self._forgotten:
                self._on_request(index)
        for index, why in self._peering.reconnector.failed().items():
            if index in self._under_way:
                self._on_lost(index, f"{self._under_way.pop(index).reason}; {why}")
        for index, change in list(self._under_way.items()):
            link = self._peering.take(index).get(index) if change.fresh is None else None
            if isinstance(link, TcpLink):
                del self._under_way[index]
                if isinstance(change.link, RdmaLink):
                    self._loop.forget(change.link.channel.fileno())
                self._run_with_heartbeats(partial(self._runtime.resume, link))
                if isinstance(change.link, RdmaLink):
                    log.warning("node %d is reached by tcp from now on, not by rdma: %s", index, change.reason)
                else:
                    log.warning("node %d is reached by new connections: %s", index, change.reason)
                if index in self._rails and not self._peering.rdma_returns.seeks(index):
                    self._seek_rdma(index, 1)

    def message(self, link: RdmaLink, message: LinkTaken | LinkResumed | LinkClosed) -> None:
        """Handle what the peer says about *link*."""
        index = link.index
        if self._is_ending():
            return
        if isinstance(message, LinkClosed):
            if self._made.get(index) is link:
                self._drop_made(index)
                return
            if not message.by_tcp:
                self._without_tcp.add(index)
            change = self._under_way.get(index)
            if change is not None and change.link is link and change.fresh is None:
                if message.by_tcp or not change.by_tcp:
                    return  # both know, and seek the same
                change.by_tcp = False
                self._seek(index, change)
            elif self._runtime.links.get(index) is link:
                self.begin(index, f"node {index} has closed it")
            return
        if self._made.get(index) is link and not self._change_over(index, "rdma works again"):
            if index in self._under_way:
                self._seek(index, self._under_way[index])
            return
        change = self._under_way.get(index)
        if isinstance(message, LinkResumed) and change is not None and change.fresh is link:
            del self._under_way[index]
            self._peering.reconnector.resumed(index, message.link)
            self._run_with_heartbeats(partial(self._runtime.resume_rdma, link, message))
            self._on_fenced(index)
            log.warning("node %d is reached by rdma again, over %s", index, " and ".join(link.rails))
            self._returned_at[index] = time.monotonic()
            if len(link.rails) < len(self._rails.get(index, {})):
                self._seek_rdma(index, len(link.rails) + 1)

    def channel_ended(self, link: TalkingLink) -> bool:
        """Handle the end of the channel of *link*; return whether its node is alive, and another link is sought."""
        index = link.index
        if self._made.get(index) is link:
            self._drop_made(index)
            return True
        if self._runtime.links.get(index) is not link:
            return True  # of a link that was replaced
        change = self._under_way.get(index)
        if change is not None and change.fresh is link:
            return self.begin(index, "the connection of its rendezvous ended")
        if self._peering.rdma_returns.seeks(index) and not self._is_ending():
            # The peer closes its old link when it changes over. If it has died instead, the scheduler notices.
            return self.begin(index, f"node {index} has closed it")
        return change is not None and change.by_tcp

    def forget(self, index: int) -> None:
        """Stop seeking a link to node *index*: it is lost, and the job goes on without it."""
        self._forgotten.add(index)
        self._under_way.pop(index, None)
        self._peering.reconnector.give_up(index, "the job goes on without it")
        self._drop_made(index)
        self._peering.rdma_returns.stop(index)

    def _on_request(self, index: int) -> None:
        change = self._under_way.get(index)
        if change is None or change.fresh is not None:
            if not self.begin(index, f"node {index} has closed it"):
                self._on_lost(index, f"node {index} has closed the link, and there can be no other")
        elif change.by_tcp:  # the replacement has ended already
            self._seek(index, change)
        else:  # it does not know that tcp must not be used
            self._refuse_tcp(index, change)

    def _close(self, index: int, link: TcpLink | RdmaLink, reason: str) -> bool:
        """Close *link*, which is under way then; False if the peer may still write over it."""
        if not self._run_with_heartbeats(partial(self._runtime.stop_link, link)):
            return False
        by_tcp = isinstance(link, TcpLink)
        if isinstance(link, RdmaLink):
            self._rails[index] = max(self._rails.get(index, {}), link.rails, key=len)
            by_tcp = (self._leaves_rdma and index not in self._without_tcp
                      and not self._runtime.gpu_direct.reaches(link))
        self._under_way[index] = LinkChange(link, reason, by_tcp)
        self._on_fenced(index)
        if not self._is_watching_rails:
            self._is_watching_rails = True
            self._loop.call_at(time.monotonic() + _WATCH_RAILS_S, self._watch_rails)
        return True

    def _watch_rails(self) -> None:
        """Close the devices that are gone, while a port is waited for: their driver waits for that."""
        self._runtime.rails.close_gone()
        for index, change in list(self._under_way.items()):
            link = change.link
            if not change.by_tcp and not change.fresh and isinstance(link, RdmaLink) and not link.may_return:
                del self._under_way[index]
                self._on_lost(index, f"{change.reason}; this machine's device is gone")
        self._is_watching_rails = bool(self._under_way or self._peering.rdma_returns.seeks())
        if self._is_watching_rails:
            self._loop.call_at(time.monotonic() + _WATCH_RAILS_S, self._watch_rails)

    def _seek(self, index: int, change: LinkChange) -> None:
        if change.by_tcp:
            reason = change.reason if isinstance(change.link, RdmaLink) else ""
            self._peering.seek(index, change.link.awaited, reason)
        else:
            self._drop_made(index)
            self._refuse_tcp(index, change)
            self._peering.seek_rdma(index, self._rails[index], 1, is_urgent=True)
        self._check_later(index, change)

    def _refuse_tcp(self, index: int, change: LinkChange) -> None:
        self._peering.reconnector.cancel(index)
        if isinstance(change.link, RdmaLink):
            change.link.tell(LinkClosed(by_tcp=False))

    def _seek_rdma(self, index: int, least_rails: int) -> None:
        """Seek an RDMA link in the background; the sooner, the longer the last one has lived."""
        self._drop_made(index)
        if not self._runtime.rails.used:
            return
        lived_s = time.monotonic() - self._returned_at.get(index, float("-inf"))
        pause_s = FIRST_PAUSE_S
        if lived_s < _SHORT_LIFE_S:
            pause_s = min(2 * self._pauses_s.get(index, FIRST_PAUSE_S), _MOST_PAUSE_S)
        self._pauses_s[index] = pause_s
        self._peering.seek_rdma(index, self._rails[index], least_rails, pause_s=pause_s)

    def _change_over(self, index: int, reason: str) -> bool:
        """Receive over the RDMA link that was made to node *index*, and tell it.

        False if that is impossible: it is closed, and if a `LinkChange` is under way, another link is to be sought.
        """
        made = self._made.pop(index)
        taken = self._peering.rdma_returns.take(index)
        assert taken is made, "only this thread takes or drops it"
        # Its descriptor is watched again once the link is used: who closes it closes that, too.
        self._loop.forget(made.channel.fileno())
        current = self._runtime.links.get(index)
        if index not in self._under_way and (
                not isinstance(current, TcpLink | RdmaLink) or not self._close(index, current, reason)):
            made.close()
            self._on_lost(index, "a queue pair to it could not be destroyed")
            return False
        change = self._under_way[index]
        before = change.link.channel.fileno() if isinstance(change.link, RdmaLink) else -1
        self._peering.reconnector.cancel(index)
        try:
            begun = self._run_with_heartbeats(partial(self._runtime.begin_rdma, made))
        except (BpsError, LookupError, OSError) as exc:  # it is closed
            log.warning("node %d is not reached by rdma again: %s", index, exc)
            self._returned_at[index] = time.monotonic()
            return False
        if before >= 0:
            self._loop.forget(before)  # it is closed
        self._watch(made)
        self._peering.replaced(made, f"rdma works again ({change.reason})")
        change.fresh = made
        made.tell(msgspec.structs.replace(begun, link=self._peering.reconnector.newest(index)))
        self._check_later(index, change)
        return True

    def _check_later(self, index: int, change: LinkChange) -> None:
        """Give up node *index* after start_timeout_s, unless it is reached by then or this is called again."""
        change.deadline = time.monotonic() + self._timeout_s
        self._loop.call_at(change.deadline, lambda: self._check(index, change))

    def _drop_made(self, index: int) -> None:
        made = self._made.pop(index, None)
        if made is not None:
            self._loop.forget(made.channel.fileno())
            self._peering.rdma_returns.drop(index)

    def _check(self, index: int, change: LinkChange) -> None:
        if self._under_way.get(index) is change and time.monotonic() >= change.deadline:
            del self._under_way[index]
            why = f"there was no other link within {self._timeout_s:g} s"
            self._peering.reconnector.give_up(index, why)
            self._on_lost(index, f"{change.reason}; and {why}")
