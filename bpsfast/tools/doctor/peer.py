"""The protocol of two doctors: ``bpsfast doctor --listen`` answers ``bpsfast doctor --peer`` of another machine.

Both ends prove a key (`perf.control.secret_for`) in the handshake of data connections. The asker sends `Ask` and gets a
`Report`. For each pair of ports that would be used it sends the address of a queue pair, gets the other address, writes
over the queue pair, and sends `Done`. A message is its length (4 bytes) and MessagePack.
"""
from __future__ import annotations

import contextlib
import ipaddress
import mmap
import os
import queue
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ..._version import __version__
from ...base.addresses import family_of
from ...base.framing import Frames
from ...hardware.kernel import Address, Kernel
from ...hardware.rdma_route import Rail
from ...hardware.verbs import completions
from ...orchestration import security
from ...orchestration.errors import DECODE_ERRORS, BpsError, ConfigError, PeerLostError, ProtocolError
from ...orchestration.handshakes import HandshakeAcceptor
from ..perf.control import Secret
from .facts import Facts, PeerReport, describe_ports

#: Several packets of any path MTU.
NBYTES = 64 * 1024
_WR_ID = 1
#: 4.096 us * 2^16 = 0.27 s without an acknowledgement, and three retries
_TIMEOUT, _RETRIES = 16, 3


class QueuePairAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of one end's queue pair, and where to write."""

    port: str
    number: int
    psn: int
    link_layer: str
    gid: bytes
    lid: int
    mtu: int
    address: int
    rkey: int
    pkey: int = 0


class QueuePairTest:
    """A queue pair on *rail* with `NBYTES` of registered memory; `OSError` names a failed verb. Owner thread only."""

    def __init__(self, verbs: Any, rail: Rail) -> None:
        self._rail = rail
        with contextlib.ExitStack() as opened:
            self._memory = opened.enter_context(mmap.mmap(-1, NBYTES))
            device = opened.enter_context(verbs.Device(rail.device))
            domain = opened.enter_context(verbs.ProtectionDomain(device))
            self._region = opened.enter_context(verbs.MemoryRegion(domain, self._memory))
            self._queue = opened.enter_context(verbs.CompletionQueue(device, 16, events=True))
            self._pair = opened.enter_context(
                verbs.QueuePair(domain, self._queue, self._queue, max_send=4, max_recv=4))
            self._pair.to_init(rail.port, pkey_index=rail.pkey_index)
            port = device.port(rail.port)
            self.end = QueuePairAddress(
                port=rail.name, number=self._pair.number, psn=self._pair.psn, link_layer=port["link_layer"],
                gid=rail.gid.value if rail.gid else b"", lid=port["lid"], mtu=port["active_mtu"],
                address=self._region.address, rkey=self._region.rkey, pkey=rail.pkey)
            self._opened = opened.pop_all()

    def connect(self, other: QueuePairAddress) -> None:
        """Connect to the other end's queue pair. Raises `UnsupportedError` if `Rail.path` finds no path."""
        self._pair.to_rtr(other.number, other.psn, mtu=min(self.end.mtu, other.mtu), port=self._rail.port,
                          **self._rail.path(self.end.link_layer, other.lid, other.gid, other.pkey))
        self._pair.to_rts(timeout=_TIMEOUT, retry_count=_RETRIES)

    def write(self, other: QueuePairAddress, timeout_s: float) -> str:
        """Write all bytes to the other end; return "" once they are acknowledged, else the reason of the failure."""
        self._memory[:16] = os.urandom(16)
        self._pair.post_write(_WR_ID, self._region.address, NBYTES, self._region.lkey, other.address, other.rkey)
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            for _, status, *_ in self._queue.poll():
                failure = getattr(self._pair, "failure", None) or {}
                return "" if status == completions.SUCCESS else str(completions.explain(
                    status, failure.get("vendor_error", 0)))
            self._queue.wait(left)
        return (f"a write of {NBYTES} bytes from {self.end.port} to {other.port} was neither acknowledged nor failed "
                f"within {timeout_s:g} s")

    def __enter__(self) -> QueuePairTest:
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.close()

DEFAULT_PORT = 18619
_CONTEXT = "bpsfast doctor"
_MAX_NBYTES = 1 << 20
#: Most askers, and refusals to be reported, that wait.
_MOST_ASKERS = 64
_HELLO = security.StreamHello(peer=0, stream=0, epoch=0)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of an asker: its version, and the TCP port on which it waits for a connection back."""

    version: str
    back_port: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Ask`."""

    report: PeerReport


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The asker's queue pair for the answerer's port with index `place`; no `end`: the conversation is over."""

    end: QueuePairAddress | None = None
    place: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answerer's queue pair, connected, or why there is none."""

    end: QueuePairAddress | None = None
    objection: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The asker has finished writing; both ends may close the queue pair."""


Message = TypeVar("Message", Ask, Report, Offer, Answer, Done)


def ask(facts: Facts, address: Address, port: int, secret: bytes, timeout_s: float, verbs: Any = None) -> None:
    """Ask the doctor at *address*; store its report or silence in *facts*; with *verbs* also test queue pairs."""
    where = f"{facts.peer_name or address} port {port}"
    try:
        with (socket.create_connection((str(address), port), timeout_s) as sock,
              socket.create_server((sock.getsockname()[0], 0), family=sock.family) as back):
            security.plain_handshake_dialer(sock, secret, _CONTEXT, _HELLO, timeout_s)
            sock.settimeout(timeout_s)
            talk = _Conversation(sock)
            talk.send(Ask(version=__version__, back_port=back.getsockname()[1]))
            facts.peer_report = talk.receive(Report).report
            theirs = facts.peer_report.used
            if verbs is not None and facts.choice.rails and theirs:
                errors = [_test_queue_pair(rail, place, talk, verbs, timeout_s)
                          for place, rail in enumerate(facts.choice.rails[:len(theirs)])]
                facts.trial_error = "; ".join(filter(None, errors))
            talk.send(Offer())
    except (OSError, BpsError) as exc:
        reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        if facts.peer_report is None:
            facts.peer_silence = f"no doctor answers at {where}: {reason}; run `bpsfast doctor --listen` there"
        else:
            facts.trial_error = f"the connection to {where} ended early: {reason}"


class Listener:
    """Answers other doctors. Owner thread only; a context manager.

    With a public *secret* it does not connect back to an asker. *examine* returns new facts for the address of an
    asker. *verbs* is the provider for queue pairs; None: refuse them.
    """

    def __init__(self, host: str, port: int, secret: Secret, examine: Callable[[Address], Facts], verbs: Any = None,
                 timeout_s: float = 10.0) -> None:
        try:
            listener = socket.create_server((host, port), family=family_of(host), dualstack_ipv6=host == "::")
        except (OSError, UnicodeError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise ConfigError(f"cannot listen on port {port} of {host!r}: {why}; --listen PORT chooses another port, "
                              "--host another address of this machine") from exc
        self.port = listener.getsockname()[1]
        self._secret, self._examine, self._verbs, self._timeout_s = secret, examine, verbs, timeout_s
        self._askers: queue.Queue[socket.socket | str] = queue.Queue()  # connections, or texts about refused ones
        self._acceptor = HandshakeAcceptor(listener, self._shake_hands, self._accepted, lambda exc: None,
                                           self._askers.put, name="bpsfast-doctor")
        self._acceptor.start()

    def _accepted(self, sock: socket.socket, hello: security.StreamHello) -> None:
        if self._askers.qsize() >= _MOST_ASKERS:  # anybody may connect with a public key
            return sock.close()
        self._askers.put(sock)

    def _shake_hands(self, sock: socket.socket) -> security.StreamHello:
        host = "unknown"
        try:
            host = sock.getpeername()[0]
            return security.plain_handshake_acceptor(sock, self._secret.key, _CONTEXT, peer=0, epoch=0,
                                                     timeout_s=self._timeout_s)
        except (OSError, BpsError) as exc:
            if self._askers.qsize() < _MOST_ASKERS:
                self._askers.put(f"{host}: not answered: {exc}")
            raise

    def serve(self, timeout_s: float | None = None) -> str:
        """Answer one asker; return its address and the result; raise `TimeoutError` after *timeout_s* (None: never)."""
        try:
            asker = self._askers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no doctor asked within {timeout_s:g} s") from None
        if isinstance(asker, str):
            return asker
        with asker as sock:
            host = "unknown"
            try:
                host = sock.getpeername()[0]
                return f"{host}: {self._answer(_Conversation(sock), ipaddress.ip_address(host.partition('%')[0]))}"
            except (OSError, BpsError) as exc:
                return f"{host}: not answered: {exc}"

    def _answer(self, talk: _Conversation, asker: Address) -> str:
        talk.sock.settimeout(self._timeout_s)
        wanted = talk.receive(Ask)
        facts = self._examine(asker)
        reached = "" if self._secret.is_public else Kernel().connect(asker, wanted.back_port, self._timeout_s)
        used, spare = describe_ports(facts.host, facts.choice, facts.path_mtus)
        talk.send(Report(report=PeerReport(
            version=__version__, hostname=facts.hostname, transport=facts.settings.transport, used=used, spare=spare,
            rejected=dict(facts.choice.rejected), reached=reached)))
        done = ["sent the report"]
        talk.sock.settimeout(2 * self._timeout_s)  # longer than the asker's own limits
        while (offer := talk.receive(Offer)).end is not None:
            done.append(self._answer_queue_pair(talk, facts, offer.end, offer.place))
        return "; ".join(done)

    def _answer_queue_pair(self, talk: _Conversation, facts: Facts, offered: QueuePairAddress, place: int) -> str:
        """Open the other end of a queue pair, and keep it until the asker is done."""
        if self._verbs is None or not 0 <= place < len(facts.choice.rails):
            talk.send(Answer(objection="there is no such usable port"))
            return f"no port for a queue pair from {offered.port}"
        with contextlib.ExitStack() as stack:
            failure = "no queue pair"
            try:
                test = stack.enter_context(QueuePairTest(self._verbs, facts.choice.rails[place]))
                failure = "the queue pair did not connect"
                test.connect(offered)
            except (BpsError, OSError) as exc:
                talk.send(Answer(objection=str(exc)))
                return f"{failure}: {exc}"
            talk.send(Answer(end=test.end))
            talk.receive(Done)
        return f"queue pair from {offered.port} to {test.end.port} was tried"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._acceptor.close()
        while not self._askers.empty():
            asker = self._askers.get()
            if isinstance(asker, socket.socket):
                asker.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _test_queue_pair(rail: Rail, place: int, talk: _Conversation, verbs: Any, timeout_s: float) -> str:
    """Test a queue pair from *rail* to the peer's port with index *place*; return "" or the error."""
    try:
        test = QueuePairTest(verbs, rail)
    except OSError as exc:
        return str(exc)
    with test:
        talk.send(Offer(end=test.end, place=place))
        answer = talk.receive(Answer)
        if answer.end is None:
            return f"at the peer: {answer.objection}"
        try:
            test.connect(answer.end)
            error = test.write(answer.end, timeout_s)
        except (BpsError, OSError) as exc:
            error = str(exc)
        talk.send(Done())
        return f"{rail.name} to {answer.end.port}: {error}" if error else ""


class _Conversation:
    """Sends and receives messages over *sock*, whose timeout holds for each whole message."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._frames: Frames[bytes] = Frames(bytes, "a message of the other doctor", max_nbytes=_MAX_NBYTES)

    def send(self, message: Any) -> None:
        self.sock.sendall(self._frames.pack(message))

    def receive(self, kind: type[Message]) -> Message:
        deadline = time.monotonic() + (self.sock.gettimeout() or 10.0)
        while (data := self._frames.next()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("the other doctor stopped in the middle of a message")
            piece = self.sock.recv(1 << 16)
            if not piece:
                raise PeerLostError("the other doctor closed the connection")
            self._frames.feed(piece)
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except DECODE_ERRORS as exc:
            raise ProtocolError(f"the other doctor's {kind.__name__} cannot be read: {exc}; another version?") from exc
