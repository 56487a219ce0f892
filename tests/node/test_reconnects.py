"""Pairs whose link has ended: whoever notices first, both get one link, or one reason why there is none."""
from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable

import msgspec
import pytest

from bpsfast.base.addresses import listening_socket
from bpsfast.base.encryption import Encryption, Seals, seals_of
from bpsfast.node.transport import Epochs, reconnector, tcp
from bpsfast.node.transport.reconnector import RECONNECT_STREAM, Reconnector
from bpsfast.node.transport.tcp import DataPort
from bpsfast.orchestration.errors import BpsError, MismatchError
from bpsfast.orchestration.messages import NodeInfo
from bpsfast.orchestration.security import StreamHello
from tests.support.streams import greet

KEY = bytes(range(16))
N_STREAMS = 2
WAIT_S = 20.0


class Side:
    """One of two nodes: its data port, its reconnector, and what came of them. Node 1 dials."""

    def __init__(self, index: int, lease_s: float = 10.0, encrypted: bool = False) -> None:
        self.index = index
        self.lease_s = lease_s
        self.encryption = Encryption.ALL if encrypted else Encryption.NONE
        self.epochs = Epochs(1)
        self.links: queue.Queue[tcp.TcpLink] = queue.Queue()
        self.news: queue.Queue[None] = queue.Queue()
        self.dropped: list[int] = []
        self.listener = listening_socket("127.0.0.1")
        self.address = "{}:{}".format(*self.listener.getsockname())
        self.made: list[tcp.TcpLink] = []

    def begin(self, other: Side) -> None:
        infos = {side.index: NodeInfo(index=side.index, host="here", pid=1, address=side.address, shm_name="",
                                      ranks=(side.index,), nic_rate_bytes=0.0) for side in (self, other)}
        self.reconnector = Reconnector(
            infos[self.index], {other.index: infos[other.index]}, KEY, self.epochs, N_STREAMS, self.lease_s, WAIT_S,
            self.links.put, self.dropped.append, lambda: self.news.put(None), self.encryption)
        self.listen(self.listener)

    def listen(self, listener: socket.socket) -> None:
        self.port = DataPort(listener, KEY, self.index, self.epochs, self.reconnector.accept, 8, self.encryption)
        self.port.start()

    def seek(self, awaited: Callable[[], dict[int, int]] = dict) -> None:
        self.reconnector.seek(1 - self.index, awaited)

    def link(self) -> tcp.TcpLink:
        self.made.append(self.links.get(timeout=WAIT_S))
        return self.made[-1]

    def until(self, happened: Callable[[], object]) -> None:
        while not happened():
            self.news.get(timeout=WAIT_S)

    def until_dialled(self, number: int) -> None:
        reconnector = self.reconnector
        with reconnector._changed:
            assert reconnector._changed.wait_for(lambda: reconnector._pairs[1 - self.index].newest == number, WAIT_S)

    def close(self) -> None:
        self.reconnector.close()
        self.port.close()
        for link in [*self.made, *self.links.queue]:
            link.close()


@pytest.fixture
def sides(request, no_leaks):
    made = [Side(index, **getattr(request, "param", {})) for index in (0, 1)]
    for side in made:
        side.begin(made[1 - side.index])
    yield made
    for side in made:
        side.close()


def dialled(side: Side, stream: int, link: int) -> socket.socket:
    """Connect to *side* as its peer does."""
    hello = StreamHello(peer=1 - side.index, stream=stream, epoch=1, link=link)
    host, _, port = side.address.rpartition(":")
    return greet(socket.create_connection((host, int(port)), WAIT_S), KEY, hello, side.index, WAIT_S)


either_way = pytest.mark.parametrize("sides", [{}, {"encrypted": True}], indirect=True,
                                     ids=["in the clear", "encrypted"])
encrypted = pytest.mark.parametrize("sides", [{"encrypted": True}], indirect=True, ids=["encrypted"])


def proven(side: Side, stream: int, link: int) -> tuple[socket.socket, Seals]:
    """Connect to *side*, which encrypts, as its peer does."""
    hello = StreamHello(peer=1 - side.index, stream=stream, epoch=1, link=link, encrypted=True)
    host, _, port = side.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), WAIT_S)
    return sock, seals_of(tcp.prove_to(sock, KEY, hello, side.index, WAIT_S, 1), dialled=True)


def are_one(*links: tcp.TcpLink) -> bool:
    """Whether both are ends of the same connections, in the same order."""
    left, right = ([link.sockets[number] for number in range(N_STREAMS)] for link in links)
    return [sock.getsockname() for sock in left] == [sock.getpeername() for sock in right]


def test_a_node_that_is_no_peer_can_be_given_up():
    """Helpers exchange nothing with helpers, and hear of their losses."""
    me = NodeInfo(index=1, host="h", address="127.0.0.1:1", shm_name="", ranks=(), pid=1,
                  nic_rate_bytes=0.0)
    reconnector = Reconnector(me, {}, KEY, Epochs(1), 1, 1.0, 1.0, lambda link: None, lambda index: None, lambda: None)
    reconnector.give_up(2, "lost")
    assert not reconnector.failed() and not reconnector.requested()
    reconnector.close()


@either_way
@pytest.mark.parametrize("first", [0, 1])
def test_whoever_notices_first_both_get_one_link_and_hear_what_is_awaited(sides, first):
    said = []

    def awaited(index):
        said.append(index)
        return {7: index + 5, 1 << 20: 1}

    sides[first].seek(lambda: awaited(first))
    other = sides[1 - first]
    other.until(lambda: other.reconnector.requested() == [first])
    assert not said, "the other one has not parted, and may still write"
    other.seek(lambda: awaited(1 - first))
    links = [side.link() for side in sides]
    assert are_one(*links) and [link.number for link in links] == [links[0].number] * 2
    assert [link.awaited_there for link in links] == [{7: 6, 1 << 20: 1}, {7: 5, 1 << 20: 1}]
    assert [side.reconnector.requested() for side in sides] == [[], []]
    assert [list(side.reconnector.failed()) for side in sides] == [[], []]


@either_way
def test_both_notice_at_once_again_and_again(sides):
    numbers = []
    for _ in range(5):
        for side in sides:
            side.seek()
        links = [side.link() for side in sides]
        assert are_one(*links)
        numbers.append(links[0].number)
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("sides", [{"lease_s": 2.0}], indirect=True)
@pytest.mark.parametrize("index", [1, 0], ids=["who dials", "who waits to be dialled"])
def test_nobody_who_listens_is_told_soon_and_is_the_end_after_the_lease(sides, index):
    there, here = sides[1 - index], sides[index]
    there.reconnector.close()
    there.port.close()
    begin = time.monotonic()
    here.seek()
    here.until(lambda: here.reconnector.refused() == {1 - index})
    assert reconnector._REFUSED_S <= time.monotonic() - begin < here.lease_s / 2 and not here.reconnector.failed()
    here.until(here.reconnector.failed)
    assert time.monotonic() - begin >= here.lease_s
    assert f"was not reached at {there.address} within lease_s = 2 s" in here.reconnector.failed()[1 - index]
    assert "Connection refused" in here.reconnector.failed()[1 - index]


@pytest.mark.parametrize("index", [1, 0], ids=["who dials", "who waits to be dialled"])
def test_who_is_refused_again_and_again_tries_until_somebody_listens(sides, index):
    """As by a firewall whose rules are changing: the process that listens there lives."""
    there, here = sides[1 - index], sides[index]
    there.port.close()
    here.seek()
    for _ in range(3):
        here.until(here.reconnector.refused)
    host, _, port = there.address.rpartition(":")
    there.listen(socket.create_server((host, int(port))))
    there.seek()
    assert are_one(*(side.link() for side in sides)) and not here.reconnector.failed()


@pytest.mark.parametrize("sides", [{"lease_s": 0.5}], indirect=True)
@pytest.mark.parametrize("index", [0, 1])
def test_a_peer_that_stands_still_is_given_up_after_the_lease(sides, index):
    with listening_socket("127.0.0.1") as mute:  # the kernel completes the connection, no process accepts it
        address = "{}:{}".format(*mute.getsockname())
        peers = sides[index].reconnector._peers
        peers[1 - index] = msgspec.structs.replace(peers[1 - index], address=address)
        sides[index].seek()
        sides[index].until(sides[index].reconnector.failed)
    assert f"was not reached at {address} within lease_s = 0.5 s" in str(sides[index].reconnector.failed())


def test_a_dial_that_breaks_off_is_forgotten_with_the_next(sides):
    socks = [dialled(sides[0], stream, 1) for stream in range(N_STREAMS)]
    sides[0].until(sides[0].reconnector.requested)
    sides[0].seek()
    assert socks[0].recv(5) == b"\1\0\0\0\x80"  # it awaits nothing, and waits for our answer
    for sock in socks:
        sock.close()
    half = dialled(sides[0], 0, 2)
    sides[0].until_dialled(2)
    sides[1].reconnector._pairs[0].newest = 2  # these dials were its own: it never gives two of them one number
    sides[1].seek()
    assert are_one(*(side.link() for side in sides))
    half.close()


def test_a_link_that_came_about_on_one_side_only_is_asked_for_again(sides):
    socks = [dialled(sides[0], stream, 1) for stream in range(N_STREAMS)]
    sides[0].seek()
    assert socks[0].recv(5)
    socks[0].close()
    sides[1].reconnector._pairs[0].made = 1  # as if the answer had been sent, and never came
    sides[1].until(sides[1].reconnector.requested)
    sides[1].reconnector._pairs[0].newest = 1
    sides[1].seek()
    assert are_one(*(side.link() for side in sides))
    socks[1].close()


def test_a_connection_of_an_earlier_link_is_refused(sides):
    for side in sides:
        side.seek()
    number = min(side.link().number for side in sides)
    with dialled(sides[0], 0, number) as late, dialled(sides[0], 0, number + 1) as next_one:
        assert late.recv(1) == b""
        next_one.settimeout(0.2)
        with pytest.raises(TimeoutError):
            next_one.recv(1)


def test_a_knock_for_a_link_that_was_replaced_meanwhile_is_of_no_account(sides):
    for side in sides:
        side.seek()
    number = min(side.link().number for side in sides)
    dialled(sides[1], RECONNECT_STREAM, number - 1).close()
    dialled(sides[1], RECONNECT_STREAM, number).close()
    sides[1].until(sides[1].reconnector.requested)
    knocks = sides[1].reconnector
    sides[1].seek()
    assert not knocks.requested()


def test_what_nobody_has_taken_is_dropped_when_another_one_is_sought(sides):
    for side in sides:
        side.seek()
    for side in sides:
        side.link()
    assert [side.dropped for side in sides] == [[1], [0]]
    sides[0].seek()
    assert sides[0].dropped == [1, 1]


def test_rubbish_in_place_of_what_is_awaited_ends_the_attempt(sides, caplog):
    caplog.set_level("DEBUG", logger="bpsfast.node")
    socks = [dialled(sides[0], stream, 1) for stream in range(N_STREAMS)]
    sides[0].seek()
    assert socks[0].recv(5)
    socks[0].sendall((3).to_bytes(4, "little") + b"\xc1\xc1\xc1")
    assert socks[0].recv(1) == b"" == socks[1].recv(1)
    assert "the awaited rounds of node 1 cannot be read" in caplog.text
    for sock in socks:
        sock.close()


@encrypted
def test_each_encrypted_link_has_keys_of_its_own_for_each_stream_and_goes_on_where_it_began(sides):
    records = []
    for _ in range(2):
        for side in sides:
            side.seek(lambda: {3: 7})
        left, right = (side.link() for side in sides)
        assert left.awaited_there == right.awaited_there == {3: 7}
        for stream in range(N_STREAMS):
            for ours, theirs in ((left, right), (right, left)):
                records.append(ours.seals[stream].out.close(b"text"))
                assert theirs.seals[stream].incoming.open(records[-1]) == b"text"
    assert len(set(records)) == 2 * 2 * N_STREAMS


@encrypted
def test_what_is_awaited_is_not_believed_if_somebody_else_says_it(sides, caplog):
    caplog.set_level("DEBUG", logger="bpsfast.node")
    sides[0].seek(lambda: {1234: 5})
    (sock, seals), (other, _) = (proven(sides[0], stream, 1) for stream in range(N_STREAMS))
    length = sock.recv(4 + 16, socket.MSG_WAITALL)
    nbytes = int.from_bytes(seals.incoming.open(length), "little")
    said = seals.incoming.open(sock.recv(nbytes + 16, socket.MSG_WAITALL))
    assert msgspec.msgpack.decode(said) == {1234: 5}
    record = bytearray(seals.out.close((1).to_bytes(4, "little")))
    record[0] ^= 3  # of a stream cipher: two bytes more
    sock.sendall(record)
    assert sock.recv(1) == b"" == other.recv(1)
    assert "a record that the peer has not sealed" in caplog.text
    for each in (sock, other):
        each.close()


@encrypted
def test_who_does_not_encrypt_gets_no_link(sides):
    with pytest.raises(MismatchError, match=r"wants a data connection encrypted.*BPSFAST_ENCRYPTION"):
        dialled(sides[0], 0, 1)


def test_a_stranger_to_the_job_gets_no_link(sides):
    hello = StreamHello(peer=5, stream=0, epoch=1, link=1)
    host, _, port = sides[0].address.rpartition(":")
    with greet(socket.create_connection((host, int(port)), WAIT_S), KEY, hello, 0, WAIT_S) as sock:
        assert sock.recv(1) == b""


def test_who_was_given_up_is_refused_when_it_comes_again(sides):
    sides[0].seek()
    sides[0].reconnector.give_up(1, "it is lost")
    sides[1].seek()
    assert sides[0].reconnector.failed() == {1: "it is lost"}
    with dialled(sides[0], 0, 1 << 20) as sock:
        assert sock.recv(1) == b""
    assert sides[0].links.empty() and sides[1].links.empty()


def test_the_end_of_the_job_ends_all_attempts(sides):
    sides[0].seek()  # node 1 is called, and does not part
    sides[1].until(sides[1].reconnector.requested)
    sides[1].reconnector.close()
    sides[0].reconnector.close()
    with pytest.raises(BpsError):
        greet(dialled(sides[0], 0, 9), KEY, StreamHello(peer=1, stream=0, epoch=1), 0, 1.0)
