"""The job key: proofs, CURVE pairs and the handshake of data connections."""
from __future__ import annotations

import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.errors import ConfigError, MismatchError, PeerLostError, ProtocolError, StallError
from bpsfast.orchestration.security import (
    HELLO_MAX_NBYTES,
    MAGIC,
    StreamHello,
    curve_pair,
    direction_key,
    handshake_as_acceptor,
    handshake_as_dialer,
    job_key,
    plain_handshake_acceptor,
    plain_handshake_dialer,
    prove,
    verify,
)

KEY = bytes(range(32))
OTHER = bytes(32)
HELLO = StreamHello(peer=3, stream=1, epoch=7)


class Side(threading.Thread):
    """Runs one side of a conversation; `end` returns its result or raises its error."""

    def __init__(self, function, *args, **kwargs):
        super().__init__(daemon=True)
        self._call = (function, args, kwargs)
        self._result = self._error = None
        self.start()

    def run(self):
        function, args, kwargs = self._call
        try:
            self._result = function(*args, **kwargs)
        except Exception as exc:
            self._error = exc

    def end(self):
        self.join(20)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


@pytest.fixture
def pair():
    a, b = socket.socketpair()
    with a, b:
        yield a, b


# -- keys and proofs --------------------------------------------------------------------------------------

def test_job_key_from_hexadecimal():
    assert job_key("00" * 16 + "ff", "ignored") == bytes(16) + b"\xff"


def test_job_key_is_derived_from_text():
    assert job_key("", "a:1") == job_key(None, "a:1") != job_key(None, "a:2")
    assert len(job_key(None, "a:1")) == 32


@pytest.mark.parametrize(("text", "words"), [("zz" * 16, "32 characters that are not"), ("00" * 15, "15 bytes")])
def test_bad_job_keys_are_refused_without_being_shown(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        job_key(text, "")
    assert text not in str(caught.value)


def test_proof_golden_value():
    assert prove(KEY, "attach|1|0").hex() == "33d5d8ac83300a1fc948c59a97809b61e805d7ae6a1a47a111ac04bd1249c576"


@settings(deadline=None)
@given(st.lists(st.binary(max_size=5), max_size=4), st.lists(st.binary(max_size=5), max_size=4))
def test_a_proof_is_of_these_texts_only(texts, others):
    proof = prove(KEY, *texts)
    assert verify(KEY, proof, *texts)
    assert verify(KEY, proof, *others) == (texts == others)
    assert not verify(OTHER, proof, *texts)


def test_text_is_its_utf8():
    assert prove(KEY, "ä") == prove(KEY, "ä".encode())


def test_curve_pairs_are_fixed_by_key_and_role():
    pairs = {curve_pair(key, role) for key in (KEY, OTHER) for role in ("scheduler", "node")}
    assert len(pairs) == 4
    assert curve_pair(KEY, "node") in pairs
    assert all(len(public) == len(secret) == 40 for public, secret in pairs)
    with pytest.raises(ValueError, match="'rank'"):
        curve_pair(KEY, "rank")


# -- handshake --------------------------------------------------------------------------------------------

def test_both_sides_learn_the_others_hello(pair):
    dialler, acceptor = pair
    acceptor.settimeout(33.0)
    accepting = Side(plain_handshake_acceptor, acceptor, KEY, "data", peer=0, epoch=7, timeout_s=10)
    assert plain_handshake_dialer(dialler, KEY, "data", HELLO, 10) == StreamHello(peer=0, stream=1, epoch=7)
    assert accepting.end() == HELLO
    assert dialler.gettimeout() is None and acceptor.gettimeout() == 33.0


def test_nothing_but_the_handshake_is_read(pair):
    dialler, acceptor = pair
    accepting = Side(plain_handshake_acceptor, acceptor, KEY, "data", peer=0, epoch=7, timeout_s=10)
    plain_handshake_dialer(dialler, KEY, "data", HELLO, 10)
    dialler.sendall(b"payload")
    accepting.end()
    assert acceptor.recv(100) == b"payload"


@pytest.mark.parametrize(("key", "context"), [(OTHER, "data"), (KEY, "control")])
def test_another_key_or_context_is_refused_by_the_acceptor(pair, key, context):
    dialler, acceptor = pair
    dialling = Side(plain_handshake_dialer, dialler, key, context, HELLO, 10)
    with pytest.raises(MismatchError, match="asked for a data connection, but does not have this job's key"):
        plain_handshake_acceptor(acceptor, KEY, "data", peer=0, epoch=7, timeout_s=10)
    acceptor.close()
    with pytest.raises(PeerLostError, match="wrong job key"):
        dialling.end()


def test_both_sides_have_one_secret_that_no_other_connection_has(pair):
    secrets = set()
    for _ in range(3):
        accepting = Side(handshake_as_acceptor, pair[1], KEY, "data", peer=0, epoch=7, timeout_s=10)
        found = handshake_as_dialer(pair[0], KEY, "data", HELLO, 10)
        assert found.secret == accepting.end().secret and len(found.secret) == 32
        secrets |= {found.secret, direction_key(found.secret, "dialler"), direction_key(found.secret, "acceptor")}
    assert len(secrets) == 3 * 3


@pytest.mark.parametrize("encrypted", [True, False])
def test_who_encrypts_and_who_does_not_both_hear_of_it(pair, encrypted):
    dialler, acceptor = pair
    accepting = Side(handshake_as_acceptor, acceptor, KEY, "data", peer=0, epoch=7, timeout_s=10,
                     encrypted=not encrypted)
    hello = msgspec.structs.replace(HELLO, encrypted=encrypted)
    words = {True: "encrypted", False: "in the clear"}
    for side, ours in ((lambda: handshake_as_dialer(dialler, KEY, "data", hello, 10), encrypted),
                       (accepting.end, not encrypted)):
        with pytest.raises(MismatchError, match=rf"connection {words[not ours]}, this side .* {words[ours]}: set"):
            side()


def test_nobody_on_the_way_can_talk_both_out_of_encrypting(pair):
    """The man in the middle says that neither wants it: that is in neither's proof."""
    dialler, middle = pair
    dialler_end, acceptor = socket.socketpair()
    with dialler_end, acceptor:
        accepting = Side(handshake_as_acceptor, acceptor, KEY, "data", peer=0, epoch=7, timeout_s=10)
        dialling = Side(handshake_as_dialer, dialler, KEY, "data", msgspec.structs.replace(HELLO, encrypted=True), 10)
        middle.sendall(read(dialler_end, 40))
        nonce = read(middle, 40)
        hello = read(middle, struct.unpack("<H", read(middle, 2))[0])
        stripped = msgspec.msgpack.encode(msgspec.structs.replace(HELLO, encrypted=False))
        assert hello != stripped
        dialler_end.sendall(nonce + struct.pack("<H", len(stripped)) + stripped + read(middle, 32))
        with pytest.raises(MismatchError, match="does not have this job's key"):
            accepting.end()
        middle.close()
        with pytest.raises(PeerLostError):
            dialling.end()


def read(sock, nbytes):
    data = sock.recv(nbytes, socket.MSG_WAITALL)
    assert len(data) == nbytes
    return data


def test_an_acceptor_without_the_key_is_refused_by_the_dialler(pair):
    dialler, impostor = pair
    dialling = Side(plain_handshake_dialer, dialler, KEY, "data", HELLO, 10)
    impostor.sendall(MAGIC + bytes(32))
    read(impostor, 40)
    hello = read(impostor, struct.unpack("<H", read(impostor, 2))[0])
    proof = read(impostor, 32)
    # All that it has is what the dialler said: send that back.
    impostor.sendall(struct.pack("<H", len(hello)) + hello + proof)
    with pytest.raises(MismatchError, match="does not have this job's key"):
        dialling.end()


def test_a_recorded_handshake_cannot_be_replayed(pair):
    dialler, middle = pair
    dialler_end, acceptor = socket.socketpair()
    with dialler_end, acceptor:
        accepting = Side(plain_handshake_acceptor, acceptor, KEY, "data", peer=0, epoch=7, timeout_s=10)
        dialling = Side(plain_handshake_dialer, dialler, KEY, "data", HELLO, 10)
        middle.sendall(read(dialler_end, 40))
        record = read(middle, 42)
        record += read(middle, struct.unpack("<H", record[-2:])[0] + 32)
        dialler_end.sendall(record)
        accepting.end()
        again, second = socket.socketpair()
        with again, second:
            accepting = Side(plain_handshake_acceptor, second, KEY, "data", peer=0, epoch=7, timeout_s=10)
            again.sendall(record)
            with pytest.raises(MismatchError):
                accepting.end()
        middle.close()
        with pytest.raises(PeerLostError):
            dialling.end()


@pytest.mark.parametrize("side", ["accept", "connect"])
@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b" " * 40, b"BPSFAST0" + bytes(32)])
def test_strangers_are_recognised(pair, side, words):
    ours, stranger = pair
    stranger.sendall(words)
    with pytest.raises(ProtocolError, match=r"expected b'BPSFAST1'"):
        if side == "accept":
            plain_handshake_acceptor(ours, KEY, "data", peer=0, epoch=7, timeout_s=10)
        else:
            plain_handshake_dialer(ours, KEY, "data", HELLO, 10)


def test_a_stranger_cannot_make_us_read_much(pair):
    ours, stranger = pair
    stranger.sendall(MAGIC + bytes(32) + struct.pack("<H", HELLO_MAX_NBYTES + 1))
    with pytest.raises(ProtocolError, match="257 bytes, at most 256"):
        plain_handshake_acceptor(ours, KEY, "data", peer=0, epoch=7, timeout_s=10)


def test_an_authenticated_hello_that_is_none(pair):
    ours, peer = pair
    accepting = Side(plain_handshake_acceptor, ours, KEY, "data", peer=0, epoch=7, timeout_s=10)
    nonce = read(peer, 40)[8:]
    proof = prove(KEY, "dialler", "data", nonce, bytes(32), b"\xc1")
    peer.sendall(MAGIC + bytes(32) + struct.pack("<H", 1) + b"\xc1" + proof)
    with pytest.raises(ProtocolError, match=r"hello .* cannot be read"):
        accepting.end()


@pytest.mark.parametrize("said", [b"", MAGIC, MAGIC + bytes(31)])
def test_silence_ends_at_the_deadline(pair, said):
    ours, stranger = pair
    stranger.sendall(said)
    with pytest.raises(StallError, match=r"within 0\.05 s"):
        plain_handshake_acceptor(ours, KEY, "data", peer=0, epoch=7, timeout_s=0.05)
    assert ours.gettimeout() is None


def test_a_closed_connection_is_named(pair):
    ours, stranger = pair
    stranger.close()
    with pytest.raises(PeerLostError, match=r"a peer that is gone|a local peer"):
        plain_handshake_dialer(ours, KEY, "data", HELLO, 10)


def test_the_peers_address_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with (socket.create_connection(("127.0.0.1", port)) as ours,
              pytest.raises(StallError, match=f"127.0.0.1:{port}")):
            plain_handshake_dialer(ours, KEY, "data", HELLO, 0.05)
