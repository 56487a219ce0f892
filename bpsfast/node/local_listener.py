"""Accepts and authenticates connections to a node's local socket by ranks, server processes and nodes of its host.

Ranks, BytePS-style server processes and other nodes of this host connect to one abstract address. Nobody gets a
descriptor, or an answer other than a refusal, before user and job key are checked. Connections that are not
authenticated are limited in number, in time, and in the bytes that are held of them.
"""
from __future__ import annotations

import errno
import hmac
import logging
import os
import socket
import time
from collections.abc import Callable

from ..base import message_socket
from ..base.exit_codes import FAILED, OK, code_of_daemon
from ..base.logs import RateLimitedLog
from ..base.message_socket import MAX_NBYTES, MessageSocket
from ..base.resources import is_ready
from ..orchestration import messages
from ..orchestration.errors import BpsError, ConfigError, PeerLostError, ProtocolError, StallError, error_of
from ..orchestration.handshakes import RECHECK_S, HandshakeLimiter
from ..pyx.pages import Segment
from .event_loop import EventLoop
from .transport import Epochs, shm

log = logging.getLogger("bpsfast.node")

#: How long a connection may take to authenticate. Processes of the job do so at once.
AUTHENTICATION_TIMEOUT_S = 10.0
#: How many authenticated nodes of this host may wait until this node knows its own number.
_MAX_WAITING = 1024
#: After `accept` has failed, for example without free file descriptors, it is tried again after this time.
_ACCEPT_RETRY_S = 1.0
_SWEEP_S = 0.5


def bind(job_key: bytes, node_id: str) -> socket.socket | None:
    """Return the machine's listening local socket, or None if another process already is this machine's node."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(message_socket.address(job_key, node_id))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        if exc.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


class LocalListener:
    """Accepts on *listener* and hands each authenticated connection to its owner. Used by *loop*'s thread only.

    `on_rank(channel, Attach, pidfd)` and `on_server(channel, AttachServer)` take the channel over, or raise
    `BpsError` to refuse it; `on_peer(ShmLink)` gets established links to other nodes.
    """

    def __init__(
        self, loop: EventLoop, listener: socket.socket, job_key: bytes,
        on_rank: Callable[[MessageSocket, messages.Attach, int], None],
        on_server: Callable[[MessageSocket, messages.AttachServer], None],
        on_peer: Callable[[shm.ShmLink], None], timeout_s: float = AUTHENTICATION_TIMEOUT_S,
    ) -> None:
        self.name = listener.getsockname()
        self._loop = loop
        self._listener = listener
        self._job_key = job_key
        self._on_rank = on_rank
        self._on_server = on_server
        self._on_peer = on_peer
        self._timeout_s = timeout_s
        self._refusals = RateLimitedLog(log)
        self._unauthenticated: HandshakeLimiter[MessageSocket] = HandshakeLimiter()
        self._waiting: list[tuple[MessageSocket, shm.PeerHello]] = []
        self._proofs: set[bytes] = set()
        self._half: dict[MessageSocket, tuple[int, Segment]] = {}
        self._me: tuple[int, Epochs, shm.ShmEndpoint] | None = None
        self._closed = self._is_watched = self._is_paused = self._has_warned = self._sweeps = self._makes_room = False
        self._listen()

    def set_node(self, index: int, epochs: Epochs, shm_endpoint: shm.ShmEndpoint) -> None:
        """Set which node this is: from now on other nodes of this host are answered."""
        self._me = index, epochs, shm_endpoint
        waiting, self._waiting = self._waiting, []
        for link, hello in waiting:
            self._guard(link, self._welcome, link, hello)

    def close(self) -> None:
        """Close the socket and all connections that were not handed over. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for link in self._unauthenticated:
            self._drop(link)
        for link, _ in self._waiting:
            link.close()
        self._waiting.clear()

    # -- connections that are not authenticated -----------------------------------------------------------

    def _listen(self) -> None:
        """Watch the listener while there is room for another connection."""
        is_wanted = not self._closed and not self._is_paused and self._unauthenticated.has_room
        if is_wanted and not self._is_watched:
            self._loop.watch(self._listener.fileno(), self._accept)
        elif self._is_watched and not is_wanted and not self._closed:
            self._loop.forget(self._listener.fileno())
        self._is_watched = is_wanted

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has ended already
            return
        except OSError as exc:
            self._pause(exc)
            return
        link = MessageSocket(sock, shm.decode, shm.PENDING_MAX_NBYTES)
        self._guard(link, self._admit, link)

    def _admit(self, link: MessageSocket) -> None:
        shm.check_user(link)  # first: other users must not use up the room of this user's processes
        self._unauthenticated.add(link, f"process {link.peer[0]}", time.monotonic())
        self._loop.watch(link.fileno(), lambda: self._guard(link, self._read, link))
        self._listen()
        self._sweep_later()
        if not self._unauthenticated.has_room and not self._makes_room:
            self._makes_room = True
            self._make_room()

    def _make_room(self) -> None:
        """While there is no room, cut off one connection for each one that waits in the backlog."""
        if self._closed or self._unauthenticated.has_room:
            self._makes_room = False
            return
        if is_ready(self._listener, 0.0):
            going = self._unauthenticated.one_to_go(time.monotonic())
            if going is not None:
                self._guard(going, self._give_up, going, "while others waited to connect")
        self._loop.call_at(time.monotonic() + RECHECK_S, self._make_room)

    def _pause(self, error: OSError) -> None:
        """Accept nothing for a while: the connection is still in the backlog and would wake the loop at once."""
        self._is_paused = True
        self._listen()
        self._loop.call_at(time.monotonic() + _ACCEPT_RETRY_S, self._resume)
        if not self._has_warned:
            log.warning("the local socket cannot accept connections: %s; retrying every %g s (too many open files: see "
                        "ulimit -n)", error, _ACCEPT_RETRY_S)
        self._has_warned = True

    def _resume(self) -> None:
        self._is_paused = False
        self._listen()

    def _sweep_later(self) -> None:
        if not self._sweeps and self._unauthenticated:
            self._sweeps = True
            self._loop.call_at(time.monotonic() + _SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Refuse connections that have not authenticated in time."""
        self._sweeps = False
        for link in self._unauthenticated.overdue(time.monotonic(), self._timeout_s):
            self._guard(link, self._give_up, link, f"within {self._timeout_s:g} s")
        self._sweep_later()

    def _give_up(self, link: MessageSocket, when: str) -> None:
        raise StallError(f"process {link.peer[0]} did not authenticate {when}")

    def _once(self, proof: bytes, who: str) -> None:
        """Raise `ProtocolError` if *proof*, which is valid, was used before: it may have been recorded and replayed."""
        if proof in self._proofs:
            raise ProtocolError(f"{who} has connected before: a proof of the job's key counts once")
        self._proofs.add(proof)

    def _read(self, link: MessageSocket) -> None:
        received = [(message, list(fds)) for message, fds in link.recv_nowait()]
        try:
            if len(received) > 1:
                raise ProtocolError(f"process {link.peer[0]} sent {len(received)} messages before it was answered")
            for message, fds in received:
                self._authenticate(link, message, fds)
        finally:
            for _, fds in received:
                for fd in fds:
                    os.close(fd)

    def _authenticate(self, link: MessageSocket, message: messages.Message, fds: list[int]) -> None:
        """Handle the first message of a connection; descriptors that are kept are taken out of *fds*."""
        if isinstance(message, messages.Attach):
            shm.check_user(link)
            check_proof(self._job_key, message.pid, message.local_rank, message.proof)
            if len(fds) != 1:
                raise ProtocolError(f"process {message.pid} attached with {len(fds)} descriptors, expected its pidfd")
            self._hand_over(link)
            self._on_rank(link, message, fds[0])
            fds.clear()
        elif isinstance(message, messages.AttachServer):
            shm.check_user(link)
            check_proof(self._job_key, message.pid, -1, message.proof)
            self._once(message.proof, f"server process {message.pid}")
            self._hand_over(link)
            self._on_server(link, message)
        elif isinstance(message, shm.PeerHello):
            shm.check(self._job_key, message, link)
            self._once(message.proof, f"node {message.source}")
            if self._me is None:
                if len(self._waiting) >= _MAX_WAITING:
                    raise ProtocolError(f"{len(self._waiting)} nodes of this host wait for this one already")
                self._hand_over(link)
                self._waiting.append((link, message))
            else:
                self._welcome(link, message)
        elif isinstance(message, shm.PeerLane) and link in self._half:
            index, lane = self._half[link]
            established = shm.complete(index, link, lane, fds)
            del self._half[link]  # the link owns the lane from here on
            self._hand_over(link)
            self._on_peer(established)
        else:
            raise ProtocolError(f"a process that has not attached sent {type(message).__name__}")

    def _welcome(self, link: MessageSocket, hello: shm.PeerHello) -> None:
        assert self._me is not None
        index, epochs, shm_endpoint = self._me
        lane = shm.welcome(self._job_key, hello, link, index, epochs, shm_endpoint)
        self._half[link] = hello.source, lane
        if link not in self._unauthenticated:
            self._admit(link)

    def _guard(self, link: MessageSocket, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except PeerLostError:
            self._drop(link)
        except BpsError as exc:
            # A process with a wrong key is told no more than that; a rank of this job gets the field and both values.
            level = logging.INFO if isinstance(exc, ProtocolError) else logging.WARNING
            self._refusals.note(level, "refused process %d on the local socket: %s", link.peer[0], exc)
            refuse(link, exc)
            self._drop(link)

    def _hand_over(self, link: MessageSocket) -> None:
        """Stop reading *link*: another object owns it from here on, and trusts it."""
        link.frame_max_nbytes = MAX_NBYTES
        if self._unauthenticated.remove(link):
            self._loop.forget(link.fileno())
            self._listen()

    def _drop(self, link: MessageSocket) -> None:
        self._hand_over(link)
        _, lane = self._half.pop(link, (0, None))
        if lane is not None:
            lane.close()
        link.close()


def check_proof(job_key: bytes, pid: int, local_rank: int, proof: bytes) -> None:
    """Raise `ConfigError` unless *proof* shows that process *pid* has the job's key."""
    if not hmac.compare_digest(proof, message_socket.attach_proof(job_key, pid, local_rank)):
        raise ConfigError(f"process {pid} has another job key than this node: give all roles the same BPSFAST_JOB_KEY")


def refuse(link: MessageSocket, error: BpsError) -> None:
    """Tell the other end of *link* why it is refused, if it is still connected."""
    try:
        link.post(messages.Refuse(error=type(error).__name__, reason=str(error)))
    except PeerLostError:
        pass  # it has ended meanwhile


def attach_server(job_key: bytes, node_id: str, pid: int, timeout_s: float) -> int:
    """Run a BytePS-style server process beside a machine's node: wait for the job's end and return its exit code."""
    proof = message_socket.attach_proof(job_key, pid, -1)
    with message_socket.connect(message_socket.address(job_key, node_id), timeout_s) as link:
        link.send(messages.AttachServer(version=messages.VERSION, pid=pid, proof=proof))
        while True:
            try:
                message, _ = link.recv(3600.0)
            except StallError:
                continue  # hours without a message are normal: the node sends one, at the end
            except PeerLostError:
                log.error("the node of this machine ended before the job did")
                return FAILED
            if isinstance(message, messages.Detached):
                return OK
            if isinstance(message, messages.Refuse):
                log.error("%s: %s", message.error, message.reason)
                return code_of_daemon(error_of(message.error, message.reason))

