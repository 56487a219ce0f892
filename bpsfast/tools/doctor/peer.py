"""The protocol of two doctors: ``bpsfast doctor --listen`` answers ``bpsfast doctor --peer`` of another machine.

Both ends prove a key (`perf.control.secret_for`) in the handshake of data connections. The asker sends `Ask` and gets
`Told`. For each pair of ports that would be used it sends the address of a queue pair, gets the other address, writes
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
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from ..._version import __version__
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


class QueuePairTest:
    """A queue pair on *rail* with `NBYTES` of registered memory. Owner thread only; a context manager.

    Raises
    ------
    OSError
        A verb failed; the text says which one, with which arguments.
    """

    def __init__(self, verbs: Any, rail: Rail) -> None:
        self._rail = rail
        self._closing: list[Any] = []
        try:
            self._memory = self._keep(mmap.mmap(-1, NBYTES))
            device = self._keep(verbs.Device(rail.device))
            domain = self._keep(verbs.ProtectionDomain(device))
            self._region = self._keep(verbs.MemoryRegion(domain, self._memory))
            self._queue = self._keep(verbs.CompletionQueue(device, 16, events=True))
            self._pair = self._keep(verbs.QueuePair(domain, self._queue, self._queue, max_send=4, max_recv=4))
            self._pair.to_init(rail.port)
            port = device.port(rail.port)
        except BaseException:
            self.close()
            raise
        self.end = QueuePairAddress(
            port=rail.name, number=self._pair.number, psn=self._pair.psn, link_layer=port["link_layer"],
            gid=rail.gid.value if rail.gid else b"", lid=port["lid"], mtu=port["active_mtu"],
            address=self._region.address, rkey=self._region.rkey)

    def connect(self, other: QueuePairAddress) -> None:
        """Connect to the other end's queue pair."""
        self._pair.to_rtr(other.number, other.psn, mtu=min(self.end.mtu, other.mtu), port=self._rail.port,
                          **self._rail.path(self.end.link_layer, other.lid, other.gid))
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

    def _keep(self, each: Any) -> Any:
        self._closing.append(each)
        return each

    def close(self) -> None:
        """Close everything in reverse order. Idempotent."""
        while self._closing:
            self._closing.pop().close()

    def __enter__(self) -> QueuePairTest:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

DEFAULT_PORT = 18619
_CONTEXT = "bpsfast doctor"
_MAX_NBYTES = 1 << 20
#: Most refusals that wait to be reported.
_MOST_UNTOLD = 64
_HELLO = security.StreamHello(peer=0, stream=0, epoch=0)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of an asker: its version, and the TCP port on which it waits for a connection back."""

    version: str
    back_port: int


class Told(msgspec.Struct, frozen=True, kw_only=True):
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


Message = TypeVar("Message", Ask, Told, Offer, Answer, Done)


def ask(facts: Facts, address: Address, port: int, secret: bytes, timeout_s: float, verbs: Any = None) -> None:
    """Ask the doctor at *address* and store its report in *facts*, or why it does not answer.

    *verbs* is the provider for a test queue pair; None: do not test one.
    """
    where = f"{facts.peer_name or address} port {port}"
    try:
        with socket.create_connection((str(address), port), timeout_s) as sock, _callback_listener(sock) as back_port:
            security.plain_handshake_dialer(sock, secret, _CONTEXT, _HELLO, timeout_s)
            sock.settimeout(timeout_s)
            talk = _Conversation(sock)
            talk.send(Ask(version=__version__, back_port=back_port))
            facts.peer_report = talk.receive(Told).report
            _try(facts, talk, verbs, timeout_s)
    except (OSError, BpsError) as exc:
        reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        if facts.peer_report is None:
            facts.peer_silence = f"no doctor answers at {where}: {reason}; run `bpsfast doctor --listen` there"
        else:
            facts.trial_error = f"the connection to {where} ended early: {reason}"


class Listener:
    """Answers other doctors. Owner thread only; a context manager.

    Parameters
    ----------
    secret
        If it is public, the listener does not connect back to an asker.
    examine
        Returns new facts for the address of an asker.
    verbs
        The provider for queue pairs; None: refuse them.
    """

    def __init__(self, host: str, port: int, secret: Secret, examine: Callable[[Address], Facts], verbs: Any = None,
                 timeout_s: float = 10.0) -> None:
        try:
            listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except (OSError, UnicodeError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise ConfigError(f"cannot listen on port {port} of {host!r}: {why}; --listen PORT chooses another port, "
                              "--host another address of this machine") from exc
        self.port = listener.getsockname()[1]
        self._secret, self._examine, self._verbs, self._timeout_s = secret, examine, verbs, timeout_s
        self._visits: queue.Queue[socket.socket | str] = queue.Queue()  # connections, or texts about refused ones
        self._door = HandshakeAcceptor(listener, self._greet, self._came, lambda exc: None,
                          self._visits.put, name="bpsfast-doctor")
        self._door.start()

    def _came(self, sock: socket.socket, hello: security.StreamHello) -> None:
        if self._visits.qsize() >= _MOST_UNTOLD:  # anybody may connect with a public key
            sock.close()
            return
        self._visits.put(sock)

    def _greet(self, sock: socket.socket) -> security.StreamHello:
        host = "unknown"
        try:
            host = sock.getpeername()[0]
            return security.plain_handshake_acceptor(sock, self._secret.key, _CONTEXT, peer=0, epoch=0,
                                             timeout_s=self._timeout_s)
        except (OSError, BpsError) as exc:
            if self._visits.qsize() < _MOST_UNTOLD:
                self._visits.put(f"{host}: not answered: {exc}")
            raise

    def serve(self, timeout_s: float | None = None) -> str:
        """Answer one asker; return its address and the result as text.

        Raises
        ------
        TimeoutError
            Nobody asked within *timeout_s* (None: no limit).
        """
        try:
            visit = self._visits.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no doctor asked within {timeout_s:g} s") from None
        if isinstance(visit, str):
            return visit
        with visit as sock:
            asker = "unknown"
            try:
                asker = sock.getpeername()[0]
                return f"{asker}: {self._answer(_Conversation(sock), ipaddress.ip_address(asker.partition('%')[0]))}"
            except (OSError, BpsError) as exc:
                return f"{asker}: not answered: {exc}"

    def _answer(self, talk: _Conversation, asker: Address) -> str:
        talk.sock.settimeout(self._timeout_s)
        wanted = talk.receive(Ask)
        facts = self._examine(asker)
        reached = "" if self._secret.is_public else Kernel().connect(asker, wanted.back_port, self._timeout_s)
        used, spare = describe_ports(facts.host, facts.choice, facts.path_mtus)
        talk.send(Told(report=PeerReport(
            version=__version__, hostname=facts.hostname, transport=facts.settings.transport, used=used, spare=spare,
            rejected=dict(facts.choice.rejected), reached=reached)))
        told = ["sent the report"]
        talk.sock.settimeout(2 * self._timeout_s)  # longer than the asker's own limits
        while (offer := talk.receive(Offer)).end is not None:
            told.append(self._meet(talk, facts, offer.end, offer.place))
        return "; ".join(told)

    def _meet(self, talk: _Conversation, facts: Facts, offered: QueuePairAddress, place: int) -> str:
        """Open the other end of a queue pair, and keep it until the asker is done."""
        if self._verbs is None or not 0 <= place < len(facts.choice.rails):
            talk.send(Answer(objection="there is no such usable port"))
            return f"no port for a queue pair from {offered.port}"
        try:
            trial = QueuePairTest(self._verbs, facts.choice.rails[place])
        except OSError as exc:
            talk.send(Answer(objection=str(exc)))
            return f"no queue pair: {exc}"
        with trial:
            try:
                trial.connect(offered)
            except OSError as exc:
                talk.send(Answer(objection=str(exc)))
                return f"the queue pair did not connect: {exc}"
            talk.send(Answer(end=trial.end))
            talk.receive(Done)
        return f"queue pair from {offered.port} to {trial.end.port} was tried"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._door.close()
        while not self._visits.empty():
            visit = self._visits.get()
            if isinstance(visit, socket.socket):
                visit.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _try(facts: Facts, talk: _Conversation, verbs: Any, timeout_s: float) -> None:
    """Test a queue pair for each pair of ports that would be used; store the result in *facts*."""
    theirs = facts.peer_report.used if facts.peer_report else []
    if verbs is not None and facts.choice.rails and theirs:
        errors = [_try_one(rail, place, talk, verbs, timeout_s)
                  for place, rail in enumerate(facts.choice.rails[:len(theirs)])]
        facts.trial_error = "; ".join(filter(None, errors))
    talk.send(Offer())


def _try_one(rail: Rail, place: int, talk: _Conversation, verbs: Any, timeout_s: float) -> str:
    """Test a queue pair from *rail* to the peer's port with index *place*; return "" or the error."""
    try:
        trial = QueuePairTest(verbs, rail)
    except OSError as exc:
        return str(exc)
    with trial:
        talk.send(Offer(end=trial.end, place=place))
        answer = talk.receive(Answer)
        if answer.end is None:
            return f"at the peer: {answer.objection}"
        try:
            trial.connect(answer.end)
            error = trial.write(answer.end, timeout_s)
        except OSError as exc:
            error = str(exc)
        talk.send(Done())
        return f"{rail.name} to {answer.end.port}: {error}" if error else ""


@contextlib.contextmanager
def _callback_listener(sock: socket.socket) -> Iterator[int]:
    """Listen on the local address of *sock*; yield the port."""
    with socket.create_server((sock.getsockname()[0], 0), family=sock.family) as door:
        yield door.getsockname()[1]


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
