"""How two nodes find out that there will be no RDMA between them, without any device: words to both, sockets closed."""
from __future__ import annotations

import socket
import threading
import time

import msgspec
import pytest

from bpsfast.base.message_socket import MessageSocket
from bpsfast.node.transport.rdma import NoRdmaError, handshake, rdma_messages
from bpsfast.orchestration.errors import BpsError, PeerLostError, ProtocolError, StallError
from bpsfast.trace import Limits

RAIL = rdma_messages.RailOffer(device="mlx5_0", port=1, link_layer="Ethernet", gid=bytes(16), version="v2", lid=0,
                               mtu=4096)


def offer(position: int, network: str, is_on_route: bool = False) -> rdma_messages.RailOffer:
    return msgspec.structs.replace(RAIL, position=position, network=network, is_on_route=is_on_route)


A, B, C = "10.1.0.0/24", "10.2.0.0/24", "10.3.0.0/24"
PAIRS = {
    "one network for all": ([(0, A), (1, A)], [(0, A), (1, A)], [(0, 0), (1, 1)]),
    "a network for each rail": ([(0, A), (1, B)], [(0, A), (1, B)], [(0, 0), (1, 1)]),
    "cabled crosswise": ([(0, A), (1, B)], [(0, B), (1, A)], [(0, 1), (1, 0)]),
    "the best port comes first": ([(1, B), (0, A)], [(0, A), (1, B)], [(1, 0), (0, 1)]),
    "a port is down": ([(1, A)], [(0, A), (1, A)], [(0, 1)]),
    "another port on each side": ([(1, A)], [(0, A)], [(0, 0)]),
    "one has a card for storage": ([(0, C), (1, A)], [(0, A)], [(1, 0)]),
    "each has another network": ([(0, C), (1, A)], [(0, A), (1, B)], [(1, 0)]),
    "one network for all, and routed links": ([(0, A), (1, B)], [(0, A), (1, C)], [(0, 0), (1, 1)]),
    "routed, and numbered the other way round": ([(0, A), (1, B, True)], [(0, C, True), (1, "")], [(1, 0)]),
    "routed, the first is on the route": ([(0, A, True), (1, B)], [(0, C, True), (1, "")], [(0, 0), (1, 1)]),
    "routed links": ([(0, A), (1, B)], [(0, C), (1, "10.4.0.0/24")], [(0, 0), (1, 1)]),
    "routed links, a port is down": ([(1, B)], [(0, C), (1, "10.4.0.0/24")], [(0, 1)]),
    "routed, with another port on each side": ([(0, A)], [(1, B)], [(0, 0)]),
    "nothing is known": ([(0, ""), (1, "")], [(0, ""), (1, "")], [(0, 0), (1, 1)]),
    "more on one side": ([(0, A), (1, A), (2, A)], [(0, A), (3, A)], [(0, 0), (1, 1)]),
    "no port": ([], [(0, A)], []),
}


@pytest.mark.parametrize("case", PAIRS)
def test_both_sides_find_the_same_rails(case):
    ours, theirs, pairs = PAIRS[case]
    left, right = ([offer(*each) for each in them] for them in (ours, theirs))
    assert handshake.pairs_of(left, right) == pairs
    assert handshake.pairs_of(right, left) == [(there, here) for here, there in pairs], "in the same order"


class Port:
    """What an offer is made of; there is no device behind it."""

    name = "mlx5_0/1"

    def __init__(self, rail: rdma_messages.RailOffer) -> None:
        self.offer = lambda: rail


def make_link(sock, find, timeout_s=20.0):
    """Meet node 1; return the error."""
    with pytest.raises(BpsError) as caught:
        handshake.make_link(sock, 1, find, n_pairs=1, n_nodes=2, epoch=1, n_slots=8, limits=Limits(),
                        deadline=time.monotonic() + timeout_s)
    assert sock.fileno() == -1
    return caught.value


def nothing():
    raise NoRdmaError("there is no RDMA device here")


def against(find, answer):
    """Meet a peer that answers our offer with *answer* (None: it closes)."""
    ours, theirs = socket.socketpair()
    with MessageSocket(theirs, rdma_messages.decode) as far:
        found = []
        thread = threading.Thread(target=lambda: found.append(make_link(ours, find)))
        thread.start()
        said, _ = far.recv(20)
        if answer is not None:
            far.send(answer)
        else:
            far.close()
        thread.join(20)
        assert not thread.is_alive()
    return said, found[0]


def test_both_sides_hear_of_an_objection(no_leaks):
    ours, theirs = socket.socketpair()
    found = {}
    threads = [threading.Thread(target=lambda: found.update(here=make_link(ours, nothing))),
               threading.Thread(target=lambda: found.update(there=make_link(theirs, lambda: [Port(RAIL)])))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert str(found["here"]) == "there is no RDMA device here"
    assert str(found["there"]) == "node 1 reports: there is no RDMA device here"


@pytest.mark.parametrize(("answer", "kind", "words"), [
    (rdma_messages.RdmaOffer(version=9, rails=(RAIL,)), NoRdmaError,
     "has version 9 of the RDMA handshake, this node 2"),
    (rdma_messages.RdmaOffer(version=2), NoRdmaError, "node 1 offers no port"),
    (rdma_messages.RdmaOffer(version=2, rails=(RAIL,), n_pairs=0), NoRdmaError, "node 1 offers no port"),
    (rdma_messages.RdmaOffer(version=2, rails=(
        rdma_messages.RailOffer(device="ib0", port=2, link_layer="InfiniBand", gid=b"", mtu=2048, version="IB",
                                lid=5),)), NoRdmaError,
     r"mlx5_0/1 \(Ethernet, GID v2\) cannot speak to node 1's ib0/2 \(InfiniBand, GID IB\)"),
    (rdma_messages.RdmaStep(step="proven"), ProtocolError, "answered RdmaOffer with RdmaStep"),
    (None, PeerLostError, "node 1 closed the connection for RDMA and did not answer RdmaOffer"),
])
def test_answers_that_lead_nowhere(answer, kind, words, no_leaks):
    said, error = against(lambda: [Port(RAIL)], answer)
    assert said.rails == (RAIL,)
    assert isinstance(error, kind)
    with pytest.raises(kind, match=words):
        raise error


def test_a_rail_that_cannot_be_used_is_named_though_another_one_can(caplog):
    rails = [Port(msgspec.structs.replace(RAIL, position=number)) for number in range(2)]
    theirs = rdma_messages.RdmaOffer(version=2, rails=(
        RAIL, msgspec.structs.replace(RAIL, device="mlx5_1", position=1, version="v1")))
    found = handshake._pair_up(rails, theirs, 1, 1, 1, None)
    assert [far.device for _, far in found] == ["mlx5_0"]
    assert "a rail to node 1 is not used: mlx5_0/1 (Ethernet, GID v2) cannot speak to node 1's mlx5_1/1 (" in (
        caplog.text)


def test_a_silent_peer_is_given_up(no_leaks):
    ours, theirs = socket.socketpair()
    with theirs:
        error = make_link(ours, lambda: [Port(RAIL)], timeout_s=0.3)
        assert isinstance(error, StallError) and "did not answer RdmaOffer in time" in str(error)
