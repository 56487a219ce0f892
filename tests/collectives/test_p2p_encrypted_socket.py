"""Messages between ranks of two machines, encrypted: whole whatever the pieces, never in the clear, never changed."""
from __future__ import annotations

import contextlib
import errno
import socket
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.base.encryption import Encryption, seals_of
from bpsfast.collectives.p2p.connector import Address
from bpsfast.collectives.p2p.encrypted_socket import EncryptedSocket
from bpsfast.collectives.p2p.frame_socket import FrameSocket
from bpsfast.collectives.p2p.protocol import DATA, Frame
from bpsfast.orchestration.errors import MismatchError, PeerLostError
from bpsfast.pyx.seal import RECORD_NBYTES, TAG_NBYTES
from tests.support.p2p_endpoints import Endpoints
from tests.support.rank_messages import pattern
from tests.support.streams import pair

pytestmark = pytest.mark.usefixtures("no_leaks")

SECRET = bytes(range(32))


@contextlib.contextmanager
def sealed():
    """Yield both ends of a connection, of small buffers, that seal."""
    with pair() as (left, right):
        for sock in (left, right):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
            sock.setblocking(False)
        with (EncryptedSocket(left, seals_of(SECRET, dialled=True)) as ours,
              EncryptedSocket(right, seals_of(SECRET, dialled=False)) as theirs):
            ours.setblocking(False)
            theirs.setblocking(False)
            yield ours, theirs


@contextlib.contextmanager
def tapped():
    """Yield an end that seals, and the other one as whoever listens on the way has it."""
    with pair() as (left, right), EncryptedSocket(left, seals_of(SECRET, dialled=True)) as ours:
        right.settimeout(20)
        yield ours, right


def whole(sock, nbytes):
    data = b""
    while len(data) < nbytes:
        data += sock.recv(nbytes - len(data))
    return data


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 100_000), min_size=1, max_size=4), min_size=1, max_size=4),
       st.integers(1, 70_000))
def test_all_bytes_arrive_in_order_however_they_are_cut(batches, most):
    with sealed() as (ours, theirs):
        expected, found, memory = b"", bytearray(), bytearray(most)
        for number, sizes in enumerate(batches):
            buffers = [memoryview(pattern(nbytes, number + i).tobytes()) for i, nbytes in enumerate(sizes)]
            expected += b"".join(buffers)
            while buffers:
                with contextlib.suppress(BlockingIOError):
                    n = ours.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
                    while buffers and n >= len(buffers[0]):
                        n -= len(buffers.pop(0))
                    if n:
                        buffers[0] = buffers[0][n:]
                with contextlib.suppress(BlockingIOError):
                    while n_read := theirs.recv_into(memory):
                        found += memory[:n_read]
        while len(found) < len(expected):
            with contextlib.suppress(BlockingIOError):
                found += memory[:theirs.recv_into(memory)]
        assert found == expected and not theirs.is_pending
        ours.shutdown(socket.SHUT_WR)
        theirs.setblocking(True)
        assert theirs.recv_into(memory) == 0


def test_a_record_is_its_length_and_what_the_seal_makes_of_it():
    with tapped() as (ours, wire):
        assert ours.sendmsg([b"ab", b"", b"cd"]) == 4 and ours.send(b"e") == 1
        seal = seals_of(SECRET, dialled=False).incoming
        for text in (b"abcd", b"e"):
            record = whole(wire, 4 + len(text) + TAG_NBYTES)
            assert record[:4] == len(text).to_bytes(4, "little") and seal.open(record[4:]) == text


def test_nothing_is_sent_of_nothing():
    with tapped() as (ours, wire):
        assert ours.sendmsg([b"", memoryview(b"")]) == 0 == ours.sendmsg([])
        ours.close()
        assert wire.recv(100) == b""


def test_what_was_not_asked_for_waits_and_is_known_to():
    with sealed() as (ours, theirs):
        ours.send(b"abc")
        theirs.settimeout(20)
        assert theirs.recv(2) == b"ab" and theirs.is_pending
        assert theirs.recv(2) == b"c" and not theirs.is_pending


@pytest.mark.parametrize("spoil", [
    lambda record: record[:-1] + bytes([record[-1] ^ 1]),
    lambda record: record[:4] + bytes([record[4] ^ 1]) + record[5:],
    lambda record: bytes(4) + record[4:], lambda record: b"\xff\xff\xff\xff" + record[4:],
    lambda record: (RECORD_NBYTES + 1).to_bytes(4, "little") + record[4:], lambda record: b"\3" + record[1:],
], ids=["tag", "text", "no length", "a long one", "a longer one", "a shorter one"])
def test_what_the_peer_has_not_sealed_is_an_error_now_and_later(spoil):
    with pair() as (left, right), EncryptedSocket(left, seals_of(SECRET, dialled=True)) as ours:
        ours.settimeout(20)
        good = seals_of(SECRET, dialled=False).out.close(b"text")
        right.sendall(spoil((4).to_bytes(4, "little") + good))
        for _ in range(2):
            with pytest.raises(OSError, match=r"has not sealed|a record of") as caught:
                ours.recv(10)
            assert caught.value.errno == errno.EBADMSG


def test_a_record_that_ends_early_is_the_end():
    with pair() as (left, right), EncryptedSocket(left, seals_of(SECRET, dialled=True)) as ours:
        right.sendall((4).to_bytes(4, "little") + seals_of(SECRET, dialled=False).out.close(b"text")[:-1])
        right.close()
        ours.settimeout(20)
        assert ours.recv(10) == b""


class Reader:
    """Takes pieces."""

    def __init__(self):
        self.heard = []
        self.memory = bytearray(300_000)

    def handle_frame(self, frame, payload):
        self.heard.append((frame.number, bytes(self.memory[:frame.nbytes])))

    def sink(self, frame):
        return memoryview(self.memory)[:frame.nbytes]


def test_a_link_reads_all_that_was_opened_though_its_turn_is_over(monkeypatch):
    """The kernel would not tell of it again."""
    monkeypatch.setattr("bpsfast.collectives.p2p.frame_socket._TURN_NBYTES", 1000)
    frames = [(number, pattern(3000, number).tobytes()) for number in range(5)]
    stream = b"".join(Frame(DATA, number=number, nbytes=len(text)).pack() + text for number, text in frames)
    with (pair() as (left, right), EncryptedSocket(left, seals_of(SECRET, dialled=True)) as ours,
          EncryptedSocket(right, seals_of(SECRET, dialled=False)) as theirs):
        reader = Reader()
        link = FrameSocket(theirs, reader)
        for record in (stream[:1000], stream[1000:]):  # the first frame takes a turn, and more is there
            ours.sendmsg([record])
        while len(reader.heard) < len(frames):
            link.read()
            assert not theirs.is_pending
        assert reader.heard == frames


# -- endpoints --------------------------------------------------------------------------------------------------------

@pytest.fixture
def endpoints():
    with contextlib.ExitStack() as stack:
        def make(**values):
            made = Endpoints(by_network=True, **values)
            stack.callback(made.close)
            return made
        yield make


def exchange(made, nbytes, tag=0):
    """Send from rank 0 to rank 1 and back; whether both arrive whole."""
    transfers = []
    for me, endpoint in enumerate(made.endpoints):
        x, y = np.zeros(nbytes, np.uint8), pattern(nbytes, me)
        transfers.append((x, pattern(nbytes, 1 - me), endpoint.receive(1, 1 - me, tag, x.ctypes.data, nbytes, x),
                          endpoint.send(1, 1 - me, tag, y.ctypes.data, nbytes, y)))
    for _, _, incoming, outgoing in transfers:
        incoming.wait()
        outgoing.wait()
    return all(np.array_equal(x, expected) for x, expected, _, _ in transfers)


@pytest.mark.parametrize("nbytes", [0, 1, 8192, 8193, 65536, 1 << 20, (20 << 20) + 3])
def test_messages_of_any_size(endpoints, nbytes):
    made = endpoints(encryption="on")
    assert exchange(made, nbytes) and exchange(made, nbytes, 7)
    peers = [peer for endpoint in made.endpoints for peer in endpoint._peers.values()]
    assert {type(peer.link.sock) for peer in peers} == {EncryptedSocket}


class Middle:
    """Passes one connection on to an endpoint that is published at its port instead, and may change a byte."""

    def __init__(self, made, rank, change=-1):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.heard = bytearray()
        self._change = change
        address = msgspec.msgpack.decode(made.board[f"post:{rank}:"], type=Address)
        self._target = address.host, address.port
        made._publish(f"post:{rank}:", msgspec.msgpack.encode(
            msgspec.structs.replace(address, port=self._server.getsockname()[1])))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        near, _ = self._server.accept()
        with near, socket.create_connection(self._target, 20) as remote:
            threads = [threading.Thread(target=self._pump, args=ends) for ends in ((near, remote), (remote, near))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _pump(self, source, sink):
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                begin = len(self.heard)
                self.heard += piece
                if begin <= self._change < begin + len(piece):
                    piece = bytearray(piece)
                    piece[self._change - begin] ^= 1
                sink.sendall(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self):
        self._thread.join(20)
        self._server.close()


def to_rank_1(made, x):
    """Send *x* from rank 0, which dials, to rank 1; return what arrives."""
    y = np.zeros(x.nbytes, np.uint8)
    incoming = made.endpoints[1].receive(1, 0, 0, y.ctypes.data, y.nbytes, y)
    made.endpoints[0].send(1, 1, 0, x.ctypes.data, x.nbytes, x).wait()
    incoming.wait()
    return y


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_whoever_is_between_reads_messages_unless_they_are_encrypted(encryption):
    made = Endpoints(by_network=True, encryption=encryption)
    made.board.pop("post:0:")  # or rank 1, which waits for a message, would dial, too
    middle = Middle(made, 1)
    x = np.full(100_000, 7, np.uint8)
    assert np.array_equal(to_rank_1(made, x), x)
    made.close()
    middle.close()
    assert len(middle.heard) > x.nbytes
    assert (bytes([7] * 16) in middle.heard) == (encryption == "off")


def test_whoever_is_between_changes_nothing_unnoticed():
    made = Endpoints(by_network=True, encryption="on", timeout_s=20)
    made.board.pop("post:0:")
    middle = Middle(made, 1, change=50_000)
    with pytest.raises(PeerLostError, match="its connection broke"):
        to_rank_1(made, np.full(100_000, 7, np.uint8))
    made.close()
    middle.close()


@pytest.mark.parametrize("encrypts", [0, 1])
def test_who_encrypts_and_who_does_not_do_not_talk(endpoints, encrypts):
    made = endpoints(encryption="on")
    made.endpoints[1 - encrypts].connector._encryption = Encryption.NONE
    made.board.pop("post:0:")
    x = np.zeros(3, np.uint8)
    with pytest.raises((MismatchError, PeerLostError), match="BPSFAST_ENCRYPTION"):
        made.endpoints[0].send(1, 1, 0, x.ctypes.data, x.nbytes, x).wait()
