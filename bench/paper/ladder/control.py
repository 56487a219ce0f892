"""The control connection between the two hosts of `bench ladder`, which sends lines of JSON.

    Hello <-> Hello                     versions, machines
    Open  -> Opened                     memory for one model
    Make  -> Made                       one variant's queue pairs or sockets, connected at both ends
    Run   -> Ready, Ran                 some steps, and the service's results
    Failed                              instead of any answer

Both ends first prove that they have the same key (`perf.control.secret_for`). The service accepts the first peer with
that key, serves one run, and ends.
"""
from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from threading import Event
from typing import Any, TypeVar

import msgspec

from bpsfast.base import settings
from bpsfast.orchestration import security
from bpsfast.orchestration.errors import BpsError, PeerLostError, ProtocolError, StallError
from bpsfast.orchestration.host_lookup import format_address
from bpsfast.tools.perf.control import Secret, secret_for

FORMAT = 1
PORT = 7810
CONNECT_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 300.0
_MAX_LINE_NBYTES = 1 << 20
_GREETING_S = 10.0
_CONTEXT = "bpsfast bench ladder"
_HELLO = security.StreamHello(peer=0, stream=0, epoch=0)


class Message(msgspec.Struct, tag=True, frozen=True):
    """A line of the control connection."""


class Hello(Message, frozen=True):
    """Greeting. `boot` identifies the running kernel, so that CPU time of a shared machine counts once."""

    format: int
    boot: str
    device: str
    machine: dict[str, Any]
    memcpy_bytes_per_s: float


class Open(Message, frozen=True):
    """Worker: allocate memory for a model; the memory of the previous model is freed."""

    model: str
    divisor: int
    partition_nbytes: int


class Opened(Message, frozen=True):
    """Service: the memory is allocated."""


class Offer(msgspec.Struct, frozen=True):
    """Description of one end of a queue pair, and the address for its writes."""

    number: int
    psn: int
    gid: str
    lid: int
    mtu: int
    arrival: int
    rkey: int


class Make(Message, frozen=True):
    """Worker: make a variant; `offer` is the worker's, None for tcp. `polls`: neither end ever sleeps."""

    variant: str
    offer: Offer | None = None
    polls: bool = False


class Made(Message, frozen=True):
    """Service: its `offer`, or the `port` at which it listens for `n_streams` connections."""

    offer: Offer | None = None
    port: int = 0
    n_streams: int = 0


class Run(Message, frozen=True):
    """Worker: do `n_steps` steps of a variant."""

    variant: str
    n_steps: int


class Ready(Message, frozen=True):
    """Service: it waits for the push."""


class Ran(Message, frozen=True):
    """Service: CPU seconds of its process, busy seconds of all processors, and wrong 32-bit words of the steps."""

    cpu_s: float
    busy_s: float
    n_wrong: int


class Failed(Message, frozen=True):
    """Service: it gives up because of an error."""

    text: str


_LINE = Hello | Open | Opened | Make | Made | Run | Ready | Ran | Failed
_M = TypeVar("_M", bound=Message)


class Control:
    """One end of the connection. Owner thread only."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address: str = sock.getsockname()[0]
        self.peer: str = sock.getpeername()[0]
        self._socket = sock
        self._file = sock.makefile("rb")
        self._decoder = msgspec.json.Decoder(_LINE)

    def send(self, message: Message) -> None:
        """Send one line."""
        try:
            self._socket.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as exc:
            raise PeerLostError(f"the ladder's other end at {self.peer} is gone: {exc}") from exc

    def receive(self, timeout_s: float | None = ANSWER_TIMEOUT_S) -> Message | None:
        """Return the next line, or None at the end; raises `PeerLostError`, `StallError` or `ProtocolError`."""
        self._socket.settimeout(timeout_s)
        try:
            line = self._file.readline(_MAX_LINE_NBYTES)
        except TimeoutError:
            raise StallError(f"the ladder's other end at {self.peer} said nothing for {timeout_s:g} s") from None
        except OSError as exc:
            raise PeerLostError(f"the ladder's other end at {self.peer} is gone: {exc}") from exc
        if not line:
            return None
        try:
            return self._decoder.decode(line)
        except msgspec.DecodeError as exc:
            raise ProtocolError(f"{self.peer} sent {line[:80]!r}, which is no line of a ladder: {exc}; is it another "
                                "version of bpsfast, or another program?") from exc

    def expect(self, kind: type[_M], timeout_s: float | None = ANSWER_TIMEOUT_S) -> _M:
        """Return the next line, which must be a *kind*; raises `PeerLostError` with the peer's message if it failed."""
        found = self.receive(timeout_s)
        if isinstance(found, kind):
            return found
        if isinstance(found, Failed):
            raise PeerLostError(f"the ladder's other end at {self.peer} failed: {found.text}")
        if found is None:
            raise PeerLostError(f"the ladder's other end at {self.peer} ended before its {kind.__name__}")
        raise ProtocolError(f"{self.peer} sent {type(found).__name__}, not {kind.__name__}")

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()


def connect(host: str, port: int, is_gone: Callable[[], bool] = lambda: False) -> Control:
    """Connect to the service at *host*; wait until it listens, unless it *is_gone*.

    Raises `PeerLostError` if none listens within `CONNECT_TIMEOUT_S` or it has another key, `ConfigError` if *host* is
    another machine and there is no job key.
    """
    secret = secret_for(settings.load({}), [host])
    deadline, wait = time.monotonic() + CONNECT_TIMEOUT_S, Event()
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
            break
        except OSError as exc:
            if not isinstance(exc, ConnectionRefusedError) or is_gone() or time.monotonic() >= deadline:
                raise PeerLostError(f"no ladder listens at {format_address(host, port)} ({exc}): start "
                                    f"`bpsfast bench ladder --listen` there") from exc
            wait.wait(0.05)
    try:
        security.plain_handshake_dialer(sock, secret.key, _CONTEXT, _HELLO, CONNECT_TIMEOUT_S)
    except BaseException:
        sock.close()
        raise
    return Control(sock)


def accept(server: socket.socket, secret: Secret) -> Control:
    """Return the first connection to *server* that proves *secret*; close others."""
    while True:
        sock = server.accept()[0]
        try:
            security.plain_handshake_acceptor(sock, secret.key, _CONTEXT, peer=0, epoch=0, timeout_s=_GREETING_S)
        except BpsError as exc:
            print(f"ladder: refused a connection: {exc}", file=sys.stderr, flush=True)
            sock.close()
            continue
        return Control(sock)
