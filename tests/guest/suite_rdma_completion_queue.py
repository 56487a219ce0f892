"""The completion queue of a rail holds all that can be outstanding: for late streams, when full, and for 256 peers.

Runs in the guest: two rails in one process, rxe0 and rxe1.
"""
from __future__ import annotations

import ctypes
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bpsfast.base.settings import Settings
from bpsfast.base.trace_records import Limits
from bpsfast.node.transport.rdma import Rails, RdmaLink, rails as module
from bpsfast.node.transport.rdma.handshake import make_link
from bpsfast.orchestration.errors import CapacityError
from bpsfast.pyx.pages import Segment
from tests.guest.verbs_end import until

SEND, RECEIVE, NBYTES = 21, 64, 64
#: Three of them fill a queue of Soft-RoCE, whose lengths are powers of two less one.
EACH = SEND + RECEIVE
_ARRIVED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_uint32] * 4)
_NOTIFY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_uint32] * 5, ctypes.c_uint64)


class Node:
    """The rail of one device, registered memory, and what its streams report; `may_go_on` holds the rail's thread."""

    def __init__(self, name: str, n_peers: int) -> None:
        self.rails = Rails(Settings(rdma_devices=f"={name}", rdma_queue_depth=SEND), 0)
        [self.route] = self.rails.towards(None, n_peers)
        self.rail = self.route.rail
        self.memory = Segment(1 << 20, huge=False)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.rails.register("slot", self.memory)
        self.base = self.rail.registered[0].address
        self.arrivals: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._arrived, self._notify = _ARRIVED(self._on_arrival), _NOTIFY(self._on_event)

    def _on_arrival(self, _engine: int, source: int, part: int, _round: int, _flags: int) -> None:
        self.arrivals.put((source, part))
        self.may_go_on.wait()

    def _on_event(self, _engine: int, kind: int, *_: int) -> None:
        self.events.put(kind)

    def start(self, link: RdmaLink, n_slots: int, first: int = 0) -> None:
        """Start the streams of *link*, which report as sources from *first* on, and bind slots of each."""
        hooks = [ctypes.cast(each, ctypes.c_void_p).value for each in (self._arrived, self._notify)]
        for i, stream in enumerate(link.streams):
            stream.start(peer=first + i, engine=self.base, arrived=hooks[0], notify=hooks[1], keep=self)
            for slot in range(n_slots):
                stream.bind(slot, self.base + NBYTES * slot, self.base + NBYTES * slot, NBYTES)

    def aim(self, link: RdmaLink, other: Node, n_slots: int) -> None:
        rkey = other.rail.rkey(other.base, 1 << 20)
        for stream in link.streams:
            for slot in range(n_slots):
                stream.aim(slot, other.base + NBYTES * slot, other.base + NBYTES * slot, NBYTES, rkey)

    def close(self) -> None:
        self.may_go_on.set()
        del self.bytes
        self.rails.close()
        self.memory.close()


@pytest.fixture
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Node]]:
    monkeypatch.setattr(module, "RECEIVES", RECEIVE)
    made = [Node(name, getattr(request, "param", 1)) for name in ("rxe0", "rxe1")]
    yield made
    for node in made:
        node.close()


def connected(nodes: list[Node], n_pairs: int, n_slots: int = 100) -> list[RdmaLink]:
    """Return the links of both nodes, with *n_pairs* streams, which prove that they carry something."""
    def make(node: Node, sock: socket.socket) -> RdmaLink:
        return make_link(sock, 1, lambda: [node.route], n_pairs=n_pairs, n_nodes=2, epoch=1, n_slots=n_slots,
                         limits=Limits(), deadline=time.monotonic() + 60)

    with ThreadPoolExecutor(2) as executor:
        return list(executor.map(make, nodes, socket.socketpair()))


def take(source: queue.SimpleQueue[Any], n: int) -> list[Any]:
    return [source.get(timeout=30) for _ in range(n)]


def rnr_naks(device: str) -> int:
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/rcvd_rnr_err").read_text())


def test_a_queue_that_has_grown_holds_every_completion_while_its_thread_is_late(nodes):
    late, other = nodes
    assert late.rail.queue.depth < 3 * EACH
    links = connected(nodes, 3)
    assert late.rail.queue.depth == other.rail.queue.depth == 3 * EACH
    for node, link, peer in ((late, links[0], other), (other, links[1], late)):
        node.start(link, RECEIVE + 2)
        node.aim(link, peer, RECEIVE + 2)
    before = late.rail.native.counters()["completions"]
    late.may_go_on.clear()
    links[1].streams[0].post(RECEIVE + 1, 1, 0, other.base, NBYTES)
    assert late.arrivals.get(timeout=30) == (0, RECEIVE + 1)  # its request was posted again; from here on no poll
    late.bytes[:] = other.bytes[:] = 0
    for stream in links[1].streams:
        for slot in range(RECEIVE):
            stream.post(slot, 1, 0, other.base, NBYTES)
    take(other.events, 3 * RECEIVE + 1)
    for stream in links[0].streams:
        for slot in range(SEND):
            stream.post(slot, 1, 0, late.base, NBYTES)
    take(other.arrivals, 3 * SEND)
    naks = rnr_naks("rxe1")
    for stream in links[1].streams:  # there is no receive request for these, and no place for their completions
        stream.post(RECEIVE, 1, 0, other.base, NBYTES)
    until(lambda: rnr_naks("rxe1") > naks + 10)
    assert late.rail.native.counters()["completions"] == before  # it counts a batch once it is handled
    late.may_go_on.set()
    found = sorted(take(late.arrivals, 3 * (RECEIVE + 1)))
    assert found == [(source, slot) for source in range(3) for slot in range(RECEIVE + 1)]
    take(late.events, 3 * SEND)
    until(lambda: late.rail.native.counters()["completions"] == before + 1 + 3 * (EACH + 1))
    for link in links:
        assert [stream.failure() for stream in link.streams] == [None] * 3
        link.close()


def test_streams_that_end_with_requests_outstanding_give_their_room_back(nodes):
    for _ in range(12):
        links = connected(nodes, 3)
        for node, link in zip(nodes, links):
            node.start(link, RECEIVE)
            for path in link._paths:
                path.pair.to_error()  # all requests are flushed into the queue
        for link in links:
            link.close()
        assert [node.rail.queue.depth for node in nodes] == [3 * EACH] * 2
    assert [node.rail.users for node in nodes] == [0, 0]


def test_a_stream_for_which_the_queue_cannot_grow_is_refused_with_both_numbers(nodes):
    rail = nodes[0].rail
    most = rail.attributes["max_cqe"] // EACH
    with ThreadPoolExecutor(8) as executor:
        list(executor.map(lambda _: rail.join(), range(most)))
    assert most * EACH <= rail.queue.depth <= rail.attributes["max_cqe"]
    words = (f"rxe0/1 has no room for one more queue pair: with it, 21 sends and 64 receives each of {most + 1} queue "
             rf"pairs need a completion queue of {(most + 1) * EACH}; .* max_cqe={rail.attributes['max_cqe']} \(EINVAL")
    with pytest.raises(CapacityError, match=words):
        rail.join()
    rail.leave()
    rail.join()
    with pytest.raises(CapacityError):
        rail.join()
    for _ in range(most):
        rail.leave()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", [256], indirect=True)
def test_queue_pairs_to_256_peers_share_the_queue(nodes):
    depth = nodes[0].rail.queue.depth
    n_links, n_pairs = 4, 64
    with ThreadPoolExecutor(n_links) as executor:
        links = list(executor.map(lambda _: connected(nodes, n_pairs, 2), range(n_links)))
    for i, both in enumerate(links):
        for node, link, peer in zip(nodes, both, reversed(nodes)):
            node.start(link, 2, i * n_pairs)
            node.aim(link, peer, 2)
    for node, side in zip(nodes, (0, 1)):
        post: list[Callable[..., None]] = [stream.post for both in links for stream in both[side].streams]
        for each in post:
            each(0, 1, 0, node.base, NBYTES)
            each(1, 1, 0, node.base, NBYTES)
    for node in nodes:
        assert sorted(take(node.arrivals, 512)) == [(source, slot) for source in range(256) for slot in (0, 1)]
        assert take(node.events, 512) and node.rail.queue.depth == depth
    for both in links:
        for link in both:
            link.close()
