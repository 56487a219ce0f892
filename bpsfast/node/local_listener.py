"""The node's local socket: who comes in, and whether to let them.

Ranks, BytePS-style server processes and other nodes of this host connect to one abstract address. Nobody gets a
descriptor or an answer beyond a refusal before the user and the job's key are checked. Until then he is a stranger:
there are only so many at a time, each has only so long, and only so much of what he says is held.
"""
from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable

from ..base import message_socket
from ..base.exit_codes import FAILED, OK, code_of_daemon
from ..base.logs import RateLimitedLog
from ..base.message_socket import MAX_NBYTES, MessageSocket
from ..orchestration import messages
from ..orchestration.errors import BpsError, PeerLostError, ProtocolError, StallError, error_of
from ..orchestration.handshakes import RECHECK_S, HandshakeLimiter
from ..pyx.pages import Segment
from .event_loop import EventLoop
from .local_rank import check_proof, check_user
from .transport import Epochs, shm

log = logging.getLogger("bpsfast.node")

#: How long a stranger has to say who he is. Whoever belongs here does so at once.
PATIENCE_S = 10.0
#: Nodes of this host that have come, with the job's key, before this node knows who it is itself.
_MOST_WAITING = 1024
#: How long nobody is let in after that has failed, for want of file descriptors for example.
_DEAF_S = 1.0
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
    """Accepts on *listener* and finds out who each newcomer is.

    `on_rank(channel, Attach, pidfd)` and `on_server(channel, AttachServer)` take the channel over or raise
    `BpsError` to refuse it; `on_peer(ShmLink)` gets established links to other nodes. Used by *loop*'s thread only.
    """

    def __init__(
        self, loop: EventLoop, listener: socket.socket, job_key: bytes,
        on_rank: Callable[[MessageSocket, messages.Attach, int], None],
        on_server: Callable[[MessageSocket, messages.AttachServer], None],
        on_peer: Callable[[shm.ShmLink], None], patience_s: float = PATIENCE_S,
    ) -> None:
        self.name = listener.getsockname()
        self._loop = loop
        self._listener = listener
        self._job_key = job_key
        self._on_rank = on_rank
        self._on_server = on_server
        self._on_peer = on_peer
        self._patience_s = patience_s
        self._refusals = RateLimitedLog(log)
        self._strangers: HandshakeLimiter[MessageSocket] = HandshakeLimiter()
        self._waiting: list[tuple[MessageSocket, shm.PeerHello]] = []
        self._proofs: set[bytes] = set()
        self._half: dict[MessageSocket, tuple[int, Segment]] = {}
        self._me: tuple[int, Epochs, shm.ShmEndpoint] | None = None
        self._closed = self._hears = self._is_deaf = self._was_deaf = self._sweeps = self._makes_room = False
        self._listen()

    def know(self, index: int, epochs: Epochs, shm_endpoint: shm.ShmEndpoint) -> None:
        """Say which node this is: from now on other nodes of this host are answered."""
        self._me = index, epochs, shm_endpoint
        waiting, self._waiting = self._waiting, []
        for link, hello in waiting:
            self._guard(link, self._welcome, link, hello)

    def close(self) -> None:
        """Close the socket and everybody who has not been taken over; once, or again for nothing."""
        if self._closed:
            return
        self._closed = True
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for link in self._strangers:
            self._drop(link)
        for link, _ in self._waiting:
            link.close()
        self._waiting.clear()

    # -- strangers ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Watch the listener as long as another stranger may come in."""
        hears = not self._closed and not self._is_deaf and self._strangers.has_room
        if hears and not self._hears:
            self._loop.watch(self._listener.fileno(), self._accept)
        elif self._hears and not hears and not self._closed:
            self._loop.forget(self._listener.fileno())
        self._hears = hears

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # he has gone again
            return
        except OSError as exc:
            self._pause_accepting(exc)
            return
        link = MessageSocket(sock, shm.decode, shm.PENDING_MAX_NBYTES)
        self._guard(link, self._let_in, link)

    def _let_in(self, link: MessageSocket) -> None:
        check_user(link)  # first: other users must not take the places of this one's processes
        self._strangers.add(link, f"process {link.peer[0]}", time.monotonic())
        self._loop.watch(link.fileno(), lambda: self._guard(link, self._read, link))
        self._listen()
        self._sweep_later()
        if not self._strangers.has_room and not self._makes_room:
            self._makes_room = True
            self._make_room()

    def _make_room(self) -> None:
        """While there is none, show a stranger the door for everybody who waits outside."""
        if self._closed or self._strangers.has_room:
            self._makes_room = False
            return
        if select.select([self._listener], [], [], 0)[0]:
            going = self._strangers.one_to_go(time.monotonic())
            if going is not None:
                self._guard(going, self._give_up, going, "while others waited to come in")
        self._loop.call_at(time.monotonic() + RECHECK_S, self._make_room)

    def _pause_accepting(self, error: OSError) -> None:
        """Let nobody in for a while: who has come still stands there, and would be announced again at once."""
        self._is_deaf = True
        self._listen()
        self._loop.call_at(time.monotonic() + _DEAF_S, self._hear_again)
        if not self._was_deaf:
            log.warning("nobody can be let in on the local socket: %s; it is tried again every %g s (too many open "
                        "files: see ulimit -n)", error, _DEAF_S)
        self._was_deaf = True

    def _hear_again(self) -> None:
        self._is_deaf = False
        self._listen()

    def _sweep_later(self) -> None:
        if not self._sweeps and self._strangers:
            self._sweeps = True
            self._loop.call_at(time.monotonic() + _SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Show those the door who have not said in time who they are."""
        self._sweeps = False
        for link in self._strangers.overdue(time.monotonic(), self._patience_s):
            self._guard(link, self._give_up, link, f"within {self._patience_s:g} s")
        self._sweep_later()

    def _give_up(self, link: MessageSocket, when: str) -> None:
        raise StallError(f"process {link.peer[0]} did not say {when} who it is")

    def _once(self, proof: bytes, who: str) -> None:
        """Raise `ProtocolError` if *proof*, which is right, was shown before: then somebody repeats what he has heard.
        """
        if proof in self._proofs:
            raise ProtocolError(f"{who} has come before: a proof of the job's key counts once")
        self._proofs.add(proof)

    # -- innards ------------------------------------------------------------------------------------------

    def _read(self, link: MessageSocket) -> None:
        received = [(message, list(fds)) for message, fds in link.recv_nowait()]
        try:
            if len(received) > 1:
                raise ProtocolError(f"process {link.peer[0]} sent {len(received)} messages before it was answered")
            for message, fds in received:
                self._meet(link, message, fds)
        finally:
            for _, fds in received:
                for fd in fds:
                    os.close(fd)

    def _meet(self, link: MessageSocket, message: messages.Message, fds: list[int]) -> None:
        """Act on a newcomer's message; what is kept of its descriptors is taken out of *fds*."""
        if isinstance(message, messages.Attach):
            check_user(link)
            check_proof(self._job_key, message.pid, message.local_rank, message.proof)
            if len(fds) != 1:
                raise ProtocolError(f"process {message.pid} attached with {len(fds)} descriptors, expected its pidfd")
            self._hand_over(link)
            self._on_rank(link, message, fds[0])
            fds.clear()
        elif isinstance(message, messages.AttachServer):
            check_user(link)
            check_proof(self._job_key, message.pid, -1, message.proof)
            self._once(message.proof, f"server process {message.pid}")
            self._hand_over(link)
            self._on_server(link, message)
        elif isinstance(message, shm.PeerHello):
            shm.check(self._job_key, message, link)
            self._once(message.proof, f"node {message.source}")
            if self._me is None:
                if len(self._waiting) >= _MOST_WAITING:
                    raise ProtocolError(f"{len(self._waiting)} nodes of this host wait for this one already")
                self._hand_over(link)
                self._waiting.append((link, message))
            else:
                self._welcome(link, message)
        elif isinstance(message, shm.PeerLane) and link in self._half:
            index, lane = self._half[link]
            established = shm.complete(index, link, lane, fds)
            del self._half[link]  # the lane is the link's from here on
            self._hand_over(link)
            self._on_peer(established)
        else:
            raise ProtocolError(f"a process that has not attached sent {type(message).__name__}")

    def _welcome(self, link: MessageSocket, hello: shm.PeerHello) -> None:
        assert self._me is not None
        index, epochs, shm_endpoint = self._me
        lane = shm.welcome(self._job_key, hello, link, index, epochs, shm_endpoint)
        self._half[link] = hello.source, lane
        if link not in self._strangers:
            self._let_in(link)

    def _guard(self, link: MessageSocket, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except PeerLostError:
            self._drop(link)
        except BpsError as exc:
            # A wrong key is told no more than that; a rank of this job gets the field and both values.
            level = logging.INFO if isinstance(exc, ProtocolError) else logging.WARNING
            self._refusals.note(level, "refused process %d on the local socket: %s", link.peer[0], exc)
            refuse(link, exc)
            self._drop(link)

    def _hand_over(self, link: MessageSocket) -> None:
        """Stop reading *link*: somebody else does from here on, and believes it."""
        link.frame_max_nbytes = MAX_NBYTES
        if self._strangers.remove(link):
            self._loop.forget(link.fileno())
            self._listen()

    def _drop(self, link: MessageSocket) -> None:
        self._hand_over(link)
        _, lane = self._half.pop(link, (0, None))
        if lane is not None:
            lane.close()
        link.close()


def refuse(link: MessageSocket, error: BpsError) -> None:
    """Tell the other end of *link* why it is refused, if it still listens."""
    try:
        link.post(messages.Refuse(error=type(error).__name__, reason=str(error)))
    except PeerLostError:
        pass  # it has not waited for that


def attach_server(job_key: bytes, node_id: str, pid: int, timeout_s: float) -> int:
    """Be a BytePS-style server process beside a machine's node: wait for the job's end and return its exit code."""
    proof = message_socket.attach_proof(job_key, pid, -1)
    with message_socket.connect(message_socket.address(job_key, node_id), timeout_s) as link:
        link.send(messages.AttachServer(version=messages.VERSION, pid=pid, proof=proof))
        while True:
            try:
                message, _ = link.recv(3600.0)
            except StallError:
                continue  # hours without a word are normal: the node speaks once, at the end
            except PeerLostError:
                log.error("the node of this machine went away before the job ended")
                return FAILED
            if isinstance(message, messages.Detached):
                return OK
            if isinstance(message, messages.Refuse):
                log.error("%s: %s", message.error, message.reason)
                return code_of_daemon(error_of(message.error, message.reason))

