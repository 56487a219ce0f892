"""`LinkChanges`: the order in which a node changes links, what it tells the peer, and when it reports the peer lost."""
from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from bpsfast.base import settings
from bpsfast.base.message_socket import MessageSocket
from bpsfast.node.event_loop import EventLoop
from bpsfast.node.link_changes import LinkChanges
from bpsfast.node.transport.rdma import LinkClosed, LinkResumed, LinkTaken, RdmaLink, rdma_messages
from bpsfast.node.transport.tcp import TcpLink
from bpsfast.orchestration.errors import CapacityError

PEER = 0  # this node is 1, which dials


class Node:
    """Node 1 with one peer; `done` says in which order what was done to its links, and sought."""

    def __init__(self, transport: str = "auto") -> None:
        self.done: list[str] = []
        self.made: list[RdmaLink] = []
        self.refuses = False
        self.lost: list[str] = []
        self.far: list[MessageSocket] = []
        self.loop = EventLoop(self._raised)
        self.links: dict[int, TcpLink | RdmaLink] = {}
        runtime = SimpleNamespace(
            links=self.links, stop_link=self._stop, begin_rdma=self._begin,
            gpu_direct=SimpleNamespace(reaches=lambda link: False),
            resume_rdma=lambda link, message: self.done.append("write over rdma"),
            rails=SimpleNamespace(used=True, close_gone=lambda: None))
        returns = SimpleNamespace(links=lambda: list(self.made), seeks=lambda index=None: bool(self.made),
                                  take=lambda index: self.made.pop(), drop=lambda index: self.made.clear(),
                                  stop=lambda index: self.made.clear())
        reconnector = SimpleNamespace(
            cancel=lambda index: self.done.append("no tcp"), newest=lambda index: 4, requested=lambda: [],
            resumed=lambda index, number: self.done.append(f"number after {number}"), failed=dict)
        peering = SimpleNamespace(
            index=1, rdma_returns=returns, reconnector=reconnector, take=lambda index: {},
            seek=lambda *_: self.done.append("seek tcp"),
            seek_rdma=lambda *_, **how: self.done.append("seek rdma at once" if how.get("is_urgent") else "seek rdma"),
            replaced=lambda link, reason: None)
        self.link_changes = LinkChanges(
            settings.load({"transport": transport}, {}), self.loop, runtime, peering, lambda work: work(),
            lambda link: None, lambda: False, lambda index: None, lambda index, why: self.lost.append(why))

    def _stop(self, link) -> bool:
        self.done.append(f"close {link.kind}")
        link.fence()
        return link.is_cut_off

    def _begin(self, link) -> LinkResumed:
        if self.refuses:
            link.close()
            raise CapacityError("a device refuses")
        self.done.append("receive over rdma")
        self.links[PEER] = link
        return LinkResumed(generation=3, awaited={}, slots=())

    def rdma_link(self) -> RdmaLink:
        ours, theirs = socket.socketpair()
        self.far.append(MessageSocket(theirs, rdma_messages.decode))
        return RdmaLink(PEER, 2, (), MessageSocket(ours, rdma_messages.decode))

    def heard(self, number: int = -1) -> list[object]:
        """Return what the peer gets over the channel of one of the links, in the order in which they were made."""
        return [message for message, _ in self.far[number].recv_nowait()]

    def offer(self) -> RdmaLink:
        """Let an RDMA link be made in the background."""
        self.made.append(self.rdma_link())
        self.link_changes.connected()
        return self.made[-1]

    def close(self) -> None:
        for link in [*self.made, *self.links.values()]:
            link.close()
        for channel in self.far:
            channel.close()
        self.loop.close()

    @staticmethod
    def _raised(exc: Exception) -> None:
        raise exc


@pytest.fixture
def node(no_leaks, request):
    made = Node(getattr(request, "param", "auto"))
    yield made
    made.close()


def test_tcp_is_closed_and_all_is_bound_before_the_peer_is_told_and_nothing_is_written_before_it_tells(node):
    node.links[PEER] = TcpLink(PEER)
    link = node.offer()
    assert node.done == [], "the peer may not have it yet"
    node.link_changes.message(link, LinkTaken())
    assert node.done == ["close tcp", "no tcp", "receive over rdma"]
    assert node.heard() == [LinkResumed(generation=3, awaited={}, slots=(), link=4)]
    node.link_changes.message(link, LinkResumed(generation=3, awaited={}, slots=(), link=6))
    assert node.done[3:] == ["number after 6", "write over rdma"]
    node.link_changes.message(link, LinkResumed(generation=3, awaited={}, slots=(), link=6))
    assert len(node.done) == 5, "once"


def test_the_side_that_hears_of_the_change_first_by_the_end_of_its_link_uses_the_new_one(node):
    node.links[PEER] = TcpLink(PEER)
    node.offer()
    assert node.link_changes.begin(PEER, "its data connection ended")
    assert node.done == ["close tcp", "no tcp", "receive over rdma"]


def test_a_link_that_ends_before_it_is_used_changes_nothing(node):
    node.links[PEER] = TcpLink(PEER)
    for how in ("its channel", "by word"):
        link = node.offer()
        if how == "by word":
            node.link_changes.message(link, LinkClosed(by_tcp=True))
        else:
            assert node.link_changes.channel_ended(link)
        assert not node.made and node.done == [], how
        link.close()


def test_a_link_that_fails_before_the_peer_uses_it_is_replaced_by_tcp_and_the_peer_is_told(node):
    node.links[PEER] = TcpLink(PEER)
    link = node.offer()
    node.link_changes.message(link, LinkTaken())
    assert node.link_changes.begin(PEER, "a queue pair failed")
    assert node.done[3:] == ["close rdma", "seek tcp"]
    assert node.heard()[1:] == [LinkClosed(by_tcp=True)]


def test_a_link_over_which_memory_is_refused_is_not_used(node):
    node.links[PEER] = TcpLink(PEER)
    link = node.offer()
    node.refuses = True
    node.link_changes.message(link, LinkTaken())
    assert node.done == ["close tcp", "no tcp", "seek tcp"] and link.channel.fileno() < 0


@pytest.mark.parametrize(("is_sought", "is_lost"), [(True, False), (False, True)])
def test_the_end_of_a_connection_is_the_end_of_the_peer_unless_it_may_have_changed_over(is_sought, is_lost, node):
    """It changes over from one of two rails to both, and this node has not heard of the new link yet."""
    node.links[PEER] = link = node.rdma_link()
    if is_sought:
        node.made.append(node.rdma_link())
    assert node.link_changes.channel_ended(link) is not is_lost
    assert node.done == ([] if is_lost else ["close rdma", "seek tcp"])


def test_a_peer_that_must_not_use_tcp_is_sought_by_rdma_only(node):
    node.links[PEER] = link = node.rdma_link()
    assert node.link_changes.begin(PEER, "a queue pair failed")
    node.link_changes.message(link, LinkClosed(by_tcp=False))
    assert node.done == ["close rdma", "seek tcp", "no tcp", "seek rdma at once"]
    assert node.heard() == [LinkClosed(by_tcp=False)]
    node.link_changes.message(link, LinkClosed(by_tcp=False))
    assert len(node.done) == 4, "both know"


@pytest.mark.parametrize("node", ["rdma"], indirect=True)
def test_with_transport_rdma_a_link_without_a_device_is_the_end(node):
    node.links[PEER] = node.rdma_link()  # of no rail that is open
    assert not node.link_changes.begin(PEER, "the card is gone")
    assert node.done == ["close rdma"] and not node.lost
