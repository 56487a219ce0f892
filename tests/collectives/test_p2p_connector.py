"""Connections between endpoints: one a pair, whoever dials; nobody gets in without the key."""
from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from bpsfast.collectives.p2p import protocol
from bpsfast.collectives.p2p.connector import JOINED, Address
from bpsfast.collectives.p2p.protocol import N_ANNOUNCED, ROOM_NBYTES, Frame
from bpsfast.orchestration import security
from bpsfast.orchestration.errors import ClosedError, PeerLostError, ProtocolError, StallError
from bpsfast.orchestration.handshakes import MAX_PENDING_HANDSHAKES
from tests.support.p2p_endpoints import KEY, Endpoints

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def endpoints():
    with contextlib.ExitStack() as stack:
        def make(*arguments, **values):
            made = Endpoints(*arguments, **values)
            stack.callback(made.close)
            return made
        yield make


def send(endpoint, to, x, tag=0):
    return endpoint.send(1, to, tag, x.ctypes.data, x.nbytes, x)


def receive(endpoint, source, nbytes, tag=None):
    x = np.zeros(nbytes, np.uint8)
    return x, endpoint.receive(1, source, tag, x.ctypes.data, x.nbytes, x)


def talk_to_all(endpoint, start):
    others = [rank for rank in range(endpoint.size) if rank != endpoint.rank]
    incoming = [receive(endpoint, source, 3) for source in others]
    start.wait(10)
    for to in others:
        send(endpoint, to, np.full(3, endpoint.rank, np.uint8)).wait()
    for _, transfer in incoming:
        transfer.wait()
    return endpoint.rank, [x.tolist() for x, _ in incoming]


@pytest.mark.parametrize("by_network", [False, True])
def test_connects_of_both_leave_one_connection(endpoints, by_network):
    for _ in range(15):
        made = endpoints(3, by_network)
        start = threading.Barrier(3)
        with ThreadPoolExecutor(3) as pool:
            found = dict(pool.map(talk_to_all, made.endpoints, [start] * 3))
        assert found == {me: [[each] * 3 for each in range(3) if each != me] for me in range(3)}
        ends = [(peer.link.sock.getsockname(), peer.link.sock.getpeername())
                for endpoint in made.endpoints for peer in endpoint._peers.values()]
        assert len(ends) == 6
        if by_network:
            assert {(b, a) for a, b in ends} == set(ends), "both ends of a pair use the same connection"
        made.close()


@contextlib.contextmanager
def dialling_each_other(made):
    """Let ranks 0 and 1 dial each other, and only rank 1 get through; yields what lets rank 0 find an address."""
    come, has_come = made.endpoints[0].connector._come, threading.Event()

    def note(*arguments):
        taken = come(*arguments)
        has_come.set()
        return taken

    made.endpoints[0].connector._come = note
    address = msgspec.msgpack.decode(made.board.pop("post:1:"), type=Address)
    transfers = [(endpoint, receive(endpoint, 1 - endpoint.rank, 4),
                  send(endpoint, 1 - endpoint.rank, np.full(4, endpoint.rank, np.uint8)))
                 for endpoint in made.endpoints[:2]]
    assert has_come.wait(10)
    yield transfers, lambda port: made._publish("post:1:", msgspec.msgpack.encode(
        msgspec.structs.replace(address, port=port or address.port)))


@pytest.mark.parametrize("reachable", [False, True])
def test_of_two_connections_the_one_that_comes_about_counts(endpoints, reachable):
    made = endpoints(by_network=True)
    with dialling_each_other(made) as (transfers, publish), socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        publish(0 if reachable else nobody.getsockname()[1])
        for endpoint, (x, received), sent in transfers:
            sent.wait()
            received.wait()
            assert x.tolist() == [1 - endpoint.rank] * 4
    ends = [peer.link.sock.getpeername() for endpoint in made.endpoints for peer in endpoint._peers.values()]
    listener = made.endpoints[1 if reachable else 0].connector.listeners[1].getsockname()
    assert listener in ends


def test_who_ends_while_two_dial_each_other_lets_the_other_go(endpoints):
    made = endpoints(by_network=True)
    with dialling_each_other(made) as ([_, (_, (_, received), _)], _):
        made.endpoints[0].close()
        with pytest.raises(PeerLostError, match="rank 0 has refused a connection of rank 1, which it takes for lost"):
            received.wait()


def test_others_are_told_the_advertised_address_and_a_port_of_the_range(endpoints):
    made = endpoints(by_network=True, advertise="192.0.2.9", ports="28740-28779")
    for rank in range(2):
        address = msgspec.msgpack.decode(made.board[f"post:{rank}:"], type=Address)
        assert address.host == "192.0.2.9" and 28740 <= address.port < 28780


def dial(made, rank, timeout_s=10):
    """Return a connection to the local socket of *rank*'s endpoint."""
    address = msgspec.msgpack.decode(made.board[f"post:{rank}:"], type=Address)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(timeout_s)
    sock.connect("\0" + address.local)
    return sock


def still_works(made):
    x, transfer = receive(made.endpoints[1], 0, 4)
    send(made.endpoints[0], 1, np.full(4, 9, np.uint8)).wait()
    transfer.wait()
    return x.tolist() == [9] * 4


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(500),
                                  security.MAGIC + bytes(32) + b"\xff\xff"])
def test_strangers_are_refused(endpoints, said, caplog):
    made = endpoints()
    with dial(made, 0) as sock:
        assert len(sock.recv(100)) == 40, "a nonce, and nothing else"
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    assert still_works(made)
    assert "refused a connection for messages" in caplog.text


def test_another_key_is_refused(endpoints):
    made = endpoints()
    with dial(made, 0) as sock, pytest.raises(PeerLostError, match="wrong job key"):
        hello = security.StreamHello(peer=1, stream=0, epoch=1)
        security.plain_handshake_dialer(sock, bytes(32), "bpsfast post", hello, 10)
    assert still_works(made)


@pytest.mark.parametrize(("peer", "stream"), [(1, 1), (0, 0), (7, 0), (-1, 0)])
def test_who_means_another_rank_is_refused(endpoints, peer, stream):
    made = endpoints()
    with dial(made, 0) as sock:
        hello = security.StreamHello(peer=peer, stream=stream, epoch=1)
        security.plain_handshake_dialer(sock, KEY, "bpsfast post", hello, 10)
        assert sock.recv(1) == b""
    assert still_works(made)


def test_a_replayed_handshake_is_refused(endpoints):
    made = endpoints()
    said = msgspec.msgpack.encode(security.StreamHello(peer=1, stream=0, epoch=1))
    nonce = os.urandom(32)
    with dial(made, 0) as sock:
        theirs = sock.recv(40)[8:]
        proof = security.prove(KEY, "dialler", "bpsfast post", theirs, nonce, said)
        words = security.MAGIC + nonce + len(said).to_bytes(2, "little") + said + proof
        sock.sendall(words)
        assert sock.recv(1) != b"", "this one is good"
        with dial(made, 0) as again:
            again.recv(40)
            again.sendall(words)
            assert again.recv(1) == b""


def joined(made, me=1, to=0):
    """Return a connection to endpoint *to*, which takes it for rank *me*'s."""
    sock = dial(made, to)
    security.plain_handshake_dialer(sock, KEY, "bpsfast post", security.StreamHello(peer=me, stream=to, epoch=1), 10)
    assert sock.recv(1) == JOINED
    return sock


@pytest.mark.parametrize(("said", "words"), [
    (b"\xff" * 40, "a frame of kind 255"),
    (Frame(protocol.DATA, number=3, nbytes=8).pack(), "DATA of 8 bytes for message 3, of which 0 are wanted"),
    (Frame(protocol.TAKEN, number=3).pack(), "TAKEN of message 3, which is not announced"),
    (Frame(protocol.WANT, number=3).pack(), "WANT of message 3, which is not announced"),
    (Frame(protocol.CREDIT, nbytes=1).pack(), "CREDIT of 1 bytes"),
    (Frame(protocol.EAGER, nbytes=protocol.EAGER_NBYTES + 1).pack(), "EAGER with 65537 bytes, at most 65536"),
    (Frame(protocol.ANNOUNCE, number=2, nbytes=9).pack(), "ANNOUNCE 2, expected 1"),
    (Frame(protocol.ANNOUNCE, number=1, nbytes=1 << 60).pack(), "at most"),
    (b"".join(Frame(protocol.ANNOUNCE, number=1 + n, nbytes=9).pack() for n in range(N_ANNOUNCED + 1)),
     f"{N_ANNOUNCED + 1} announced messages, {N_ANNOUNCED} were allowed"),
    (Frame(protocol.EAGER).pack() * (ROOM_NBYTES // 40 + 1), "were allowed"),
])
def test_who_makes_no_sense_is_given_up_and_nobody_else(endpoints, said, words):
    made = endpoints(3)
    with joined(made) as sock:
        waits = made.endpoints[0].receive(1, 1, 5, 0, 0, None)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(said)
        with pytest.raises(ProtocolError, match="rank 1 sent rank 0 an invalid frame") as caught:
            waits.wait()
        assert words in str(caught.value)
        with pytest.raises(ProtocolError):
            send(made.endpoints[0], 1, np.zeros(3, np.uint8)).wait()
    x, transfer = receive(made.endpoints[2], 0, 4)
    send(made.endpoints[0], 2, np.full(4, 9, np.uint8)).wait()
    transfer.wait()
    assert x.tolist() == [9] * 4


def test_an_address_that_is_none(endpoints):
    made = endpoints()
    made.board["post:1:"] = b"nonsense"
    with pytest.raises(PeerLostError, match="cannot exchange messages with rank 1: the address"):
        send(made.endpoints[0], 1, np.zeros(3, np.uint8)).wait()


def test_nobody_listens_there(endpoints):
    made = endpoints()
    made.endpoints[1].close()
    with pytest.raises(PeerLostError, match="rank 1 does not listen on its local socket any more"):
        send(made.endpoints[0], 1, np.zeros(3, np.uint8)).wait()


def test_another_job_is_another_key(endpoints):
    made, other = endpoints(), endpoints()
    other.board["post:1:"] = made.board["post:1:"]
    made.endpoints[1].connector._key = bytes(32)
    with pytest.raises(PeerLostError, match="wrong job key"):
        send(other.endpoints[0], 1, np.zeros(3, np.uint8)).wait()


def test_of_more_strangers_than_there_is_room_for_the_oldest_go_and_a_rank_comes_in(endpoints):
    """All of them are of one process, and say nothing: a rank must not wait until their handshakes are over."""
    made = endpoints()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(dial(made, 1)) for _ in range(MAX_PENDING_HANDSHAKES)]
        assert [len(sock.recv(100)) for sock in strangers] == [40] * MAX_PENDING_HANDSHAKES, "a nonce each"
        begin = time.monotonic()
        assert still_works(made)
        assert time.monotonic() - begin < 4.0, "less than a stranger has for its handshake"
        assert strangers[0].recv(1) == b""
        assert not select.select([strangers[-1]], [], [], 0)[0], "it is not worse than it has to be"


@pytest.fixture
def no_descriptors():
    """Returns what lets no more descriptors be opened in this process until the context ends."""
    @contextlib.contextmanager
    def none_left():
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return none_left


def test_without_descriptors_nobody_is_let_in_for_a_while_and_then_again(endpoints, no_descriptors, caplog):
    made = endpoints()
    meeting = made.endpoints[0].connector
    accept, tried, again = meeting.accept, [], threading.Event()

    def counted(listener):
        tried.append(time.monotonic())
        accept(listener)
        if len(tried) > 1:
            again.set()

    meeting.accept = counted
    address = msgspec.msgpack.decode(made.board["post:0:"], type=Address)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        with no_descriptors():
            sock.connect("\0" + address.local)
            assert again.wait(10)
            assert not meeting.listens
        assert tried[1] - tried[0] > 0.9, "no core is kept busy by trying"
        assert len(sock.recv(100)) == 40, "a nonce: it was let in after all"
    assert still_works(made)
    assert caplog.text.count("cannot accept connections for messages") == 1


def test_the_end_of_the_job_is_told_though_nobody_waits(endpoints):
    made = endpoints()
    looked, over = threading.Event(), threading.Event()
    made.endpoints[0].progress._check = lambda: (looked.set(), made._check())
    assert still_works(made)
    looked.clear()
    assert looked.wait(10), "the thread sleeps, and looks up now and then"
    _, transfer = receive(made.endpoints[0], 1, 4)
    transfer.on_done(lambda _: over.set())
    made.aborted = PeerLostError("node 3 is gone")
    assert over.wait(10)
    with pytest.raises(PeerLostError, match="node 3 is gone"):
        transfer.wait()


def test_what_is_under_way_when_a_post_is_closed_is_closed_and_its_peer_not_blamed(endpoints):
    made = endpoints()
    assert still_works(made)
    _, mine = receive(made.endpoints[0], 1, 4)
    _, theirs = receive(made.endpoints[1], 0, 4)
    made.endpoints[0].close()
    with pytest.raises(ClosedError, match="the message endpoint of rank 0 was closed"):
        mine.wait()
    with pytest.raises(PeerLostError, match="rank 0 has left"):
        theirs.wait()


def test_a_callback_of_a_connection_that_fails_may_close_the_post(endpoints):
    made = endpoints()
    made.endpoints[1].close()
    over: Future[None] = Future()

    def close(_):
        try:
            over.set_result(made.endpoints[0].close())
        except Exception as exc:
            over.set_exception(exc)

    send(made.endpoints[0], 1, np.zeros(3, np.uint8)).on_done(close)
    over.result(20)


@pytest.mark.parametrize("source", [1, None])
def test_a_payload_that_does_not_come_is_said_to_be_on_the_way(endpoints, source):
    made = endpoints()
    with joined(made) as sock:
        _, waits = receive(made.endpoints[0], source, 9000)
        sock.sendall(Frame(protocol.ANNOUNCE, 1, 5, 1, 9000).pack())
        with pytest.raises(StallError) as caught:
            waits.wait(0.5)
        assert "tag 5" in str(caught.value) and "rank 1 has announced it (9000 bytes)" in str(caught.value)
