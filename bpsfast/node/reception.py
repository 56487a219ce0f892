"""The node's local socket: who comes in, and whether to let them.

Ranks, BytePS-style server processes and other nodes of this host connect to one abstract address. Nobody gets a
descriptor or an answer beyond a refusal before the user and the job's key are checked.
"""
from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable

from .. import channel
from ..channel import Channel
from ..orchestration import messages
from ..orchestration.errors import BpsError, PeerLostError, ProtocolError, StallError
from ..pyx.pages import Segment
from ..transport import shm
from .event_loop import EventLoop
from .local_rank import check_proof, check_user

log = logging.getLogger("bpsfast.node")


def bind(job_key: bytes, node_id: str) -> socket.socket | None:
    """Return the machine's listening local socket, or None if another process already is this machine's node."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(channel.address(job_key, node_id))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        if exc.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


class Reception:
    """Accepts on *listener* and finds out who each newcomer is.

    `on_rank(channel, Attach, pidfd)` and `on_server(channel, AttachServer)` take the channel over or raise
    `BpsError` to refuse it; `on_peer(ShmLink)` gets established links to other nodes.
    """

    def __init__(
        self, loop: EventLoop, listener: socket.socket, job_key: bytes,
        on_rank: Callable[[Channel, messages.Attach, int], None],
        on_server: Callable[[Channel, messages.AttachServer], None],
        on_peer: Callable[[shm.ShmLink], None],
    ) -> None:
        self.name = listener.getsockname()
        self._loop = loop
        self._listener = listener
        self._job_key = job_key
        self._on_rank = on_rank
        self._on_server = on_server
        self._on_peer = on_peer
        self._strangers: dict[int, Channel] = {}
        self._waiting: list[tuple[Channel, shm.PeerHello]] = []
        self._half: dict[Channel, tuple[int, Segment]] = {}
        self._me: tuple[int, int, shm.Doorstep] | None = None
        loop.watch(listener.fileno(), self._accept)

    def know(self, index: int, epoch: int, doorstep: shm.Doorstep) -> None:
        """Say which node this is: from now on other nodes of this host are answered."""
        self._me = index, epoch, doorstep
        waiting, self._waiting = self._waiting, []
        for link, hello in waiting:
            self._guard(link, self._welcome, link, hello)

    def close(self) -> None:
        """Close the socket and everybody who has not been taken over."""
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for link in list(self._strangers.values()):
            self._drop(link)
        for link, _ in self._waiting:
            link.close()
        self._waiting.clear()

    # -- innards ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        link = Channel(sock, shm.decode)
        self._strangers[link.fileno()] = link
        self._loop.watch(link.fileno(), lambda: self._guard(link, self._read, link))

    def _read(self, link: Channel) -> None:
        received = [(message, list(fds)) for message, fds in link.recv_nowait()]
        try:
            for message, fds in received:
                self._meet(link, message, fds)
        finally:
            for _, fds in received:
                for fd in fds:
                    os.close(fd)

    def _meet(self, link: Channel, message: messages.Message, fds: list[int]) -> None:
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
            self._hand_over(link)
            self._on_server(link, message)
        elif isinstance(message, shm.PeerHello):
            if self._me is None:
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

    def _welcome(self, link: Channel, hello: shm.PeerHello) -> None:
        assert self._me is not None
        index, epoch, doorstep = self._me
        lane = shm.welcome(self._job_key, hello, link, index, epoch, doorstep)
        self._half[link] = hello.source, lane
        if link.fileno() not in self._strangers:
            self._strangers[link.fileno()] = link
            self._loop.watch(link.fileno(), lambda: self._guard(link, self._read, link))

    def _guard(self, link: Channel, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except PeerLostError:
            self._drop(link)
        except BpsError as exc:
            # A wrong key is told no more than that; a rank of this job gets the field and both values.
            level = logging.INFO if isinstance(exc, ProtocolError) else logging.WARNING
            log.log(level, "refused process %d on the local socket: %s", link.peer[0], exc)
            refuse(link, exc)
            self._drop(link)

    def _hand_over(self, link: Channel) -> None:
        """Stop reading *link*: somebody else does from here on."""
        if self._strangers.pop(link.fileno(), None) is not None:
            self._loop.forget(link.fileno())

    def _drop(self, link: Channel) -> None:
        self._hand_over(link)
        _, lane = self._half.pop(link, (0, None))
        if lane is not None:
            lane.close()
        link.close()


def refuse(link: Channel, error: BpsError) -> None:
    """Tell the other end of *link* why it is refused, if it still listens."""
    try:
        link.post(messages.Refuse(error=type(error).__name__, reason=str(error)))
    except PeerLostError:
        log.debug("process behind a local channel left before it could be refused: %s", error)


def attach_server(job_key: bytes, node_id: str, pid: int, timeout_s: float) -> int:
    """Be a BytePS-style server process beside a machine's node: wait for the job's end and return its exit code."""
    proof = channel.attach_proof(job_key, pid, -1)
    with channel.connect(channel.address(job_key, node_id), timeout_s) as link:
        link.send(messages.AttachServer(version=messages.VERSION, pid=pid, proof=proof))
        while True:
            try:
                message, _ = link.recv(3600.0)
            except StallError:
                continue  # hours without a word are normal: the node speaks once, at the end
            except PeerLostError:
                log.error("the node of this machine went away before the job ended")
                return 1
            if isinstance(message, messages.Detached):
                return 0
            if isinstance(message, messages.Refuse):
                log.error("%s: %s", message.error, message.reason)
                return 1

