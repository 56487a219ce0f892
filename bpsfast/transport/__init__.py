"""How gradient bytes travel between two nodes: chosen per pair of nodes, once, with a reason that can be asked for.

    shm   same host: the peer maps our segments and bytes never move (`shm`)
    tcp   else: one-sided writes over authenticated streams (`tcp`)

shm is chosen iff exchanging a memfd over the peer's socket worked: a try, not a comparison of host names.
Of each pair the node with the higher index dials. Helpers have nothing to say to one another.
"""
from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from ..orchestration.errors import BpsError, ConfigError, StallError
from ..orchestration.messages import NodeInfo
from ..settings import Settings
from . import shm, tcp

log = logging.getLogger("bpsfast.node")

Link = shm.ShmLink | tcp.TcpLink

#: An aborted job does not wait for a peer that does not answer.
_JOIN_S = 1.0


def check(settings: Settings) -> None:
    """Raise `ConfigError` if the setting asks for what cannot be."""
    if settings.transport == "rdma":
        raise ConfigError(
            "transport='rdma' was asked for, but this version of bpsfast has no verbs transport: "
            "use transport=auto or tcp"
        )
    if settings.transport == "shm" and not settings.allow_shm:
        raise ConfigError("transport='shm' contradicts BYTEPS_ENABLE_IPC=0 (allow_shm=false): drop one of them")


def shm_objection(settings: Settings) -> str:
    """Return why shm is not even tried between nodes, "" if it is."""
    if settings.transport == "tcp":
        return "transport=tcp"
    return "" if settings.allow_shm else "allow_shm=false (BYTEPS_ENABLE_IPC=0)"


def peers_of(me: NodeInfo, nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    """Return the nodes that *me* exchanges gradients with, in node order: one of a pair has ranks."""
    return [node for node in nodes if node.index != me.index and (node.ranks or me.ranks)]


class Peering:
    """Connects one node to all its peers, in threads of its own, so that the control loop goes on beating.

    Parameters
    ----------
    me, nodes
        This node, and all of them in node order.
    listener
        The socket that `NodeInfo.address` names. Closed here when all peers are connected.
    notify
        Called (from any of the threads) whenever `done` or `error` may have changed.
    """

    def __init__(
        self, settings: Settings, key: bytes, epoch: int, me: NodeInfo, nodes: Sequence[NodeInfo],
        listener: socket.socket, doorstep: shm.Doorstep, notify: Callable[[], None],
    ) -> None:
        self.links: dict[int, Link] = {}
        self.reasons: dict[int, str] = {}
        self.error: BpsError | None = None
        self._settings = settings
        self._key = key
        self._epoch = epoch
        self._me = me
        self._peers = {node.index: node for node in peers_of(me, nodes)}
        self._listener = listener
        self._doorstep = doorstep
        self._notify = notify
        self._deadline = time.monotonic() + settings.start_timeout_s
        self._accepting: dict[int, tcp.TcpLink] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._taken = False
        self._threads = [threading.Thread(target=self._guard, args=(task,), name="bpsfast-peering", daemon=True)
                         for task in (self._dial_all, self._accept_all)]

    def start(self) -> None:
        """Begin. Ends by itself within start_timeout_s."""
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> bool:
        """Whether every peer is connected."""
        return len(self.links) == len(self._peers)

    def describe(self) -> dict[str, str]:
        """Return "node N" -> "transport: reason"."""
        return {f"node {index}": f"{self.links[index].kind}: {self.reasons[index]}" for index in sorted(self.links)}

    def take(self) -> dict[int, Link]:
        """Hand over the links: from now on they are the caller's to close."""
        with self._lock:
            self._taken = True
            return dict(self.links)

    def offer(self, link: Link, reason: str) -> None:
        """Take an established link (the control loop brings those that were dialled to the local socket)."""
        with self._lock:
            if self._closed or link.index not in self._peers or link.index in self.links:
                log.warning("node %d connected twice or too late: refused", link.index)
                link.close()
                return
            self.reasons[link.index] = reason
            self.links[link.index] = link
        self._notify()

    def close(self) -> None:
        """Stop connecting, and close what nobody took. A thread in the middle of a dial ends with the process."""
        with self._lock:
            self._closed = True
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_JOIN_S)
        self._listener.close()
        with self._lock:
            unused: list[Link] = [*self._accepting.values(), *(() if self._taken else self.links.values())]
            self._accepting.clear()
            self.links = {}
        for link in unused:
            link.close()

    # -- the two threads ----------------------------------------------------------------------------------

    def _guard(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BpsError as exc:
            self.error = self.error or exc
        except OSError as exc:
            self.error = self.error or BpsError(f"connecting to peers failed: {exc}")
        self._notify()

    def _dial_all(self) -> None:
        for index, peer in sorted(self._peers.items()):
            if index < self._me.index and not self._closed:
                self._dial(peer)

    def _dial(self, peer: NodeInfo) -> None:
        reason = shm_objection(self._settings)
        if not reason:
            try:
                name = b"\0" + peer.shm_name.encode()
                link = shm.connect(self._key, name, self._me.index, peer.index, self._epoch, self._doorstep,
                                   self._left())
                self.offer(link, "a memfd exchange over its local socket worked")
                return
            except (BpsError, OSError) as exc:
                if self._settings.transport == "shm":
                    raise ConfigError(f"transport='shm' was asked for, but node {peer.index} ({peer.host}) shares no "
                                      f"memory with this node: {exc}") from exc
                reason = f"no shared memory with it ({exc})"
        wire = tcp.dial(peer.address, self._key, mine=self._me.index, peer=peer.index,
                        n_streams=self._settings.tcp_streams, epoch=self._epoch, deadline=self._deadline)
        self.offer(wire, reason)

    def _accept_all(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        strangers: list[threading.Thread] = []
        while missing := [index for index in self._peers if index > self._me.index and index not in self.links]:
            if self._closed or self.error:
                break
            if self._left() <= 0.0:
                names = ", ".join(f"node {index} ({self._peers[index].address})" for index in missing)
                raise StallError(f"{names} did not connect to node {self._me.index} ({self._me.address}) within "
                                 f"{self._settings.start_timeout_s:g} s: is a firewall between the machines?")
            # Links over shared memory arrive elsewhere: look at `links` now and then.
            if poller.poll(50):
                sock, _ = self._listener.accept()
                thread = threading.Thread(target=self._accept, args=(sock,), name="bpsfast-accept", daemon=True)
                thread.start()
                strangers.append(thread)
        for thread in strangers:
            thread.join()

    def _accept(self, sock: socket.socket) -> None:
        """Let one connection prove itself. A stranger is logged and refused, and harms nobody."""
        try:
            hello = tcp.accept(sock, self._key, mine=self._me.index, epoch=self._epoch)
        except (BpsError, OSError) as exc:
            log.warning("refused a data connection: %s", exc)
            sock.close()
            return
        with self._lock:
            half = self._accepting.setdefault(hello.peer, tcp.TcpLink(hello.peer))
            if (self._closed or hello.peer not in self._peers or hello.stream in half.sockets
                    or hello.peer in self.links):
                log.warning("refused stream %d of node %d: not expected", hello.stream, hello.peer)
                sock.close()
                return
            half.sockets[hello.stream] = sock
            whole = len(half.sockets) == self._settings.tcp_streams
            if whole:
                del self._accepting[hello.peer]
        if whole:
            self.offer(half, shm_objection(self._settings) or "it found no shared memory with this node")

    def _left(self) -> float:
        return self._deadline - time.monotonic()
