"""How the processes of a job prove to each other that they have its key.

Control messages go over ZeroMQ with CURVE; a rank that joins its node, and nodes that connect for data, prove it by
HMAC.

Only holders of the key are in the job; nobody else can send or receive a byte. The handshake of a data connection:

    acceptor -> dialler   magic 8 | nonce 32
    dialler  -> acceptor  magic 8 | nonce 32 | length 2 | hello | proof 32    of "dialler", context, nonces, hello
    acceptor -> dialler   length 2 | hello | proof 32                         of "acceptor", context, nonces, hellos

Both nonces are in both proofs, so nothing can be replayed; the labels differ, so nothing can be reflected. From the
same texts both sides derive a secret that no other connection has. It encrypts what follows if encryption is on
(`bpsfast/node/transport`); else the data network is trusted, as it is for RDMA.
"""
from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from .errors import DECODE_ERRORS, ConfigError, MismatchError, PeerLostError, ProtocolError, StallError
from .host_lookup import format_address

#: Begins the first message of both sides of a data connection; the digit is the handshake's version.
MAGIC = b"BPSFAST1"

#: The longest hello, so that a client without the key cannot make us hold more.
HELLO_MAX_NBYTES = 256

_NONCE_NBYTES = 32
_PROOF_NBYTES = 32


class StreamHello(msgspec.Struct, frozen=True, kw_only=True):
    """What both ends of a data connection send of themselves: node index, number of the stream, epoch.

    `link`: which of the links that the pair has had one after another. `pid`: of the process, where the rest does not
    tell it from one of an earlier job. `encrypted`: whether everything after the handshake is encrypted.
    """

    peer: int
    stream: int
    epoch: int
    link: int = 0
    pid: int = 0
    encrypted: bool = False


class HandshakeResult(NamedTuple):
    """The peer's hello, and the connection's 32-byte `secret`, from which keys are derived (`direction_key`)."""

    hello: StreamHello
    secret: bytes


def job_key(text_hex: str | None, fallback_text: str) -> bytes:
    """Return the job's key from hexadecimal *text_hex*, else one derived from *fallback_text*, which others may guess.

    Raises `ConfigError` if the text is not hexadecimal, or has fewer than 16 bytes; the error does not repeat the text,
    which is secret.
    """
    if not text_hex:
        return hashlib.sha256(b"bpsfast job key|" + fallback_text.encode()).digest()
    try:
        key = bytes.fromhex(text_hex)
    except ValueError as exc:
        raise ConfigError(f"job_key must be hexadecimal digits, got {len(text_hex)} characters that are not") from exc
    if len(key) < 16:
        raise ConfigError(f"job_key must have at least 16 bytes (32 hexadecimal digits), got {len(key)} bytes")
    return key


def prove(key: bytes, *texts: str | bytes) -> bytes:
    """Return the HMAC-SHA256 of *texts*, each preceded by its length, so that different lists never look alike."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for text in texts:
        data = text.encode() if isinstance(text, str) else text
        mac.update(len(data).to_bytes(4, "little") + data)
    return mac.digest()


def verify(key: bytes, proof: bytes, *texts: str | bytes) -> bool:
    """Return, in constant time, whether *proof* is `prove` of *texts*."""
    return hmac.compare_digest(prove(key, *texts), proof)


def curve_pair(key: bytes, role: str) -> tuple[bytes, bytes]:
    """Return the (public, secret) CURVE keys, in Z85, of *role* ("scheduler" or "node"), derived from the job's key."""
    if role not in ("scheduler", "node"):
        raise ValueError(f"role must be 'scheduler' or 'node', got {role!r}")
    secret = z85.encode(prove(key, "curve", role))
    return zmq.curve_public(secret), secret


def direction_key(secret: bytes, sender: str) -> bytes:
    """Return the 32-byte key of what *sender* ("dialler" or "acceptor") sends on a connection with *secret*."""
    return prove(secret, "seal", sender)


def plain_handshake_dialer(sock: socket.socket, key: bytes, context: str, hello: StreamHello,
                           timeout_s: float) -> StreamHello:
    """Run `handshake_as_dialer` where nothing is encrypted; return the peer's hello."""
    return handshake_as_dialer(sock, key, context, hello, timeout_s).hello


def plain_handshake_acceptor(sock: socket.socket, key: bytes, context: str, *, peer: int, epoch: int,
                             timeout_s: float) -> StreamHello:
    """Run `handshake_as_acceptor` where nothing is encrypted; return the peer's hello."""
    return handshake_as_acceptor(sock, key, context, peer=peer, epoch=epoch, timeout_s=timeout_s).hello


def handshake_as_dialer(sock: socket.socket, key: bytes, context: str, hello: StreamHello,
                        timeout_s: float) -> HandshakeResult:
    """Prove to the acceptor of *sock* that we hold *key*, make it prove the same, exchange hellos.

    Reads exactly the handshake's bytes and restores the socket's time-out. Blocks up to *timeout_s*. Raises
    `StallError` if the deadline passed; `PeerLostError` if the peer closed; `ProtocolError` if it is no bpsfast of this
    version; `MismatchError` if it has another key, or another setting of encryption.
    """
    with _Handshake(sock, timeout_s) as handshake:
        theirs = handshake.nonce()
        nonce = os.urandom(_NONCE_NBYTES)
        said = msgspec.msgpack.encode(hello)
        proof = prove(key, "dialler", context, theirs, nonce, said)
        handshake.send(MAGIC + nonce + _counted(said) + proof)
        answer = handshake.receive_counted()
        if not verify(key, handshake.receive(_PROOF_NBYTES), "acceptor", context, theirs, nonce, said, answer):
            raise MismatchError(f"{handshake.peer} answered the data connection, but does not have this job's key")
        answered = _hello(answer, handshake.peer)
        _check_encrypted(handshake.peer, theirs=answered, ours=hello)
        return HandshakeResult(answered, prove(key, "secret", context, theirs, nonce, said, answer))


def handshake_as_acceptor(sock: socket.socket, key: bytes, context: str, *, peer: int, epoch: int, timeout_s: float,
                          encrypted: bool = False) -> HandshakeResult:
    """Do the acceptor's part of `handshake_as_dialer`: answer as node *peer* in *epoch*, *encrypted* or not.

    A client without the key learns nothing but a nonce. Same errors; also `MismatchError` if the dialler has another
    setting of encryption, which it hears, too. On any error close *sock*; the job is not harmed.
    """
    with _Handshake(sock, timeout_s) as handshake:
        nonce = os.urandom(_NONCE_NBYTES)
        handshake.send(MAGIC + nonce)
        theirs = handshake.nonce()
        said = handshake.receive_counted()
        if not verify(key, handshake.receive(_PROOF_NBYTES), "dialler", context, nonce, theirs, said):
            raise MismatchError(f"{handshake.peer} asked for a data connection, but does not have this job's key")
        hello = _hello(said, handshake.peer)
        own = StreamHello(peer=peer, stream=hello.stream, epoch=epoch, link=hello.link, encrypted=encrypted)
        answer = msgspec.msgpack.encode(own)
        handshake.send(_counted(answer) + prove(key, "acceptor", context, nonce, theirs, said, answer))
        _check_encrypted(handshake.peer, theirs=hello, ours=own)
        return HandshakeResult(hello, prove(key, "secret", context, nonce, theirs, said, answer))


def _check_encrypted(peer: str, *, theirs: StreamHello, ours: StreamHello) -> None:
    if theirs.encrypted != ours.encrypted:
        words = {True: "encrypted", False: "in the clear"}
        raise MismatchError(f"{peer} (number {theirs.peer}) wants a data connection {words[theirs.encrypted]}, this "
                            f"side (number {ours.peer}) {words[ours.encrypted]}: set BPSFAST_ENCRYPTION to the same on "
                            "all machines (to on or off if a proxy or tunnel is between, whose loopback one side sees)")


def _counted(data: bytes) -> bytes:
    return len(data).to_bytes(2, "little") + data


def _hello(data: bytes, peer: str) -> StreamHello:
    try:
        return msgspec.msgpack.decode(data, type=StreamHello)
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"the hello of {peer} cannot be read: {exc}") from exc


class _Handshake:
    """A socket with one deadline for the whole handshake."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._before = sock.gettimeout()
        self.peer = _address(sock)

    def __enter__(self) -> _Handshake:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.settimeout(self._before)

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Let the socket's call in the block take the time that is left, and raise what its errors mean."""
        try:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            yield
        except TimeoutError as exc:
            raise StallError(f"{self.peer} did not finish the handshake of a data connection within "
                             f"{self._timeout_s:g} s") from exc
        except OSError as exc:
            raise PeerLostError(f"{self.peer} went away in the handshake of a data connection: {exc}") from exc

    def send(self, data: bytes) -> None:
        with self._in_time():
            self._sock.sendall(data)

    def receive(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            with self._in_time():
                piece = self._sock.recv(nbytes - len(data))
            if not piece:
                raise PeerLostError(f"{self.peer} closed the data connection in the handshake: wrong job key?")
            data += piece
        return bytes(data)

    def nonce(self) -> bytes:
        magic = self.receive(len(MAGIC))
        if magic != MAGIC:
            raise ProtocolError(f"{self.peer} began a data connection with {magic!r}, expected {MAGIC!r}: not a node "
                                "of this version")
        return self.receive(_NONCE_NBYTES)

    def receive_counted(self) -> bytes:
        nbytes = int.from_bytes(self.receive(2), "little")
        if nbytes > HELLO_MAX_NBYTES:
            raise ProtocolError(f"{self.peer} sent a hello of {nbytes} bytes, at most {HELLO_MAX_NBYTES} are allowed")
        return self.receive(nbytes)


def _address(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError:
        return "a peer that is gone"
    if not isinstance(name, tuple):
        return "a local peer"
    return format_address(name[0], name[1])
