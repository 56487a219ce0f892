"""One node on its way to all its peers: dialling those before it, letting in those after it, choosing a transport each.

A pair whose RDMA fails later goes the same way once more, by tcp (`detour`).
"""
from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from ..orchestration.errors import BpsError, ConfigError, StallError
from ..orchestration.messages import NodeInfo
from ..pyx.ring import MAX_PARTS
from ..settings import Settings
from ..trace.records import limits
from . import pace, rdma, shm, tcp
from .links import Link
from .rdma import rendezvous

log = logging.getLogger("bpsfast.node")

#: An aborted job does not wait for a peer that does not answer.
_JOIN_S = 1.0


def check(settings: Settings) -> None:
    """Raise `ConfigError` if the setting asks for what cannot be."""
    if settings.transport == "rdma":
        rails = rdma.Rails(settings, 0)
        try:
            rails.towards(None, 1)
        except rdma.NoRdmaError as exc:
            raise ConfigError(f"transport='rdma' was asked for, but {exc}; or use transport=auto or tcp") from exc
        finally:
            rails.close()
    if settings.transport == "shm" and not settings.allow_shm:
        raise ConfigError("transport='shm' contradicts BYTEPS_ENABLE_IPC=0 (allow_shm=false): drop one of them")


def shm_objection(settings: Settings) -> str:
    """Return why shm is not even tried between nodes, "" if it is."""
    if settings.transport in ("tcp", "rdma"):
        return f"transport={settings.transport}"
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
        The socket that `NodeInfo.address` names. Closed here, in the end.
    doorstep, rails
        What this node offers to peers that share memory with it, and to those that it reaches by RDMA.
    notify
        Called (from any of the threads) whenever `done` or `error` may have changed.
    """

    def __init__(
        self, settings: Settings, key: bytes, epoch: int, me: NodeInfo, nodes: Sequence[NodeInfo],
        listener: socket.socket, doorstep: shm.Doorstep, rails: rdma.Rails, notify: Callable[[], None],
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
        self._rails = rails
        self._paces = pace.of(settings, len(self._peers))
        self._n_nodes = len(nodes)
        self._notify = notify
        self._deadline = time.monotonic() + settings.start_timeout_s
        self._accepting: dict[int, tcp.TcpLink] = {}
        self._objections: dict[int, str] = {}
        self._meetings: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._taken: set[int] = set()
        self._accepts = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin. Ends by itself within start_timeout_s."""
        self._begin(self._dial_all)
        self._begin_to_accept()

    @property
    def done(self) -> bool:
        """Whether every peer is connected."""
        return len(self.links) == len(self._peers)

    def describe(self) -> dict[str, str]:
        """Return "node N" -> "transport: reason"."""
        return {f"node {index}": f"{self.links[index].kind}: {self.reasons[index]}" for index in sorted(self.links)}

    def take(self, *only: int) -> dict[int, Link]:
        """Hand over the links to the nodes *only* (default: to all): from now on they are the caller's to close."""
        with self._lock:
            taken = {index: link for index, link in self.links.items() if not only or index in only}
            self._taken |= taken.keys()
            return taken

    def give_up(self, index: int, reason: str) -> None:
        """Forget the link to node *index*, which was taken, because of *reason*: it may come again by tcp."""
        with self._lock:
            self._taken.discard(index)
            self.links.pop(index, None)
            self._objections[index] = reason

    def detour(self, index: int) -> None:
        """Connect by tcp to node *index*, which both sides have given up.

        As before, `notify` is called when `links` has it, or `error` says why not; `take` hands it over.
        """
        with self._lock:
            self._deadline = time.monotonic() + self._settings.start_timeout_s
        if index < self._me.index:
            self._begin(partial(self._dial_tcp, self._peers[index], self._objections[index]))
        else:
            self._begin_to_accept()

    def offer(self, link: Link, reason: str) -> None:
        """Take an established link (the control loop brings those that were dialled to the local socket)."""
        with self._lock:
            if self._closed or link.index not in self._peers or link.index in self.links:
                # a job may end while its nodes still connect: then it is nobody's fault
                log.log(logging.DEBUG if self._closed else logging.WARNING, "node %d connected %s: refused", link.index,
                        "too late" if self._closed else "twice, or is no peer")
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
            unused: list[Link] = [*self._accepting.values(),
                                  *(link for index, link in self.links.items() if index not in self._taken)]
            self._accepting.clear()
            self.links = {}
        for link in unused:
            link.close()

    # -- the two threads ----------------------------------------------------------------------------------

    def _begin(self, task: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guard, args=(task,), name="bpsfast-peering", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _begin_to_accept(self) -> None:
        with self._lock:
            if self._accepts:
                return  # it looks for whoever is missing, again and again
            self._accepts = True
        self._begin(self._accept_all)

    def _guard(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BpsError as exc:
            self.error = self.error or exc
        except OSError as exc:
            self.error = self.error or BpsError(f"connecting to peers failed: {exc}")
        self._notify()

    def _dial_all(self) -> None:
        """Dial all at once: a path that swallows RDMA packets costs seconds for each peer, until tcp is taken."""
        threads = [threading.Thread(target=self._guard, args=(partial(self._dial, peer),), name="bpsfast-dial",
                                    daemon=True) for index, peer in self._peers.items() if index < self._me.index]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

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
        if self._settings.transport in ("auto", "rdma"):
            try:
                self._dial_rdma(peer, reason)
                return
            except (BpsError, OSError) as exc:
                reason = self._without_rdma(peer, reason, exc)
        self._dial_tcp(peer, reason)

    def _dial_tcp(self, peer: NodeInfo, reason: str) -> None:
        link = tcp.dial(peer.address, self._key, mine=self._me.index, peer=peer.index,
                        n_streams=self._settings.n_connections, epoch=self._epoch, deadline=self._deadline)
        self.offer(self._equip(link), reason)

    def _dial_rdma(self, peer: NodeInfo, reason: str) -> None:
        self._rails.towards(peer.address, len(self._peers))  # without a device here nobody is bothered
        sock = tcp.connect(peer.address, self._key, mine=self._me.index, peer=peer.index, number=rendezvous.STREAM,
                           epoch=self._epoch, deadline=self._deadline)
        self.offer(self._meet(sock, peer), f"a first write passed both ways; {reason}")

    def _meet(self, sock: socket.socket, peer: NodeInfo) -> rdma.RdmaLink:
        settings = self._settings
        return rendezvous.meet(
            sock, peer.index, lambda: self._rails.towards(peer.address, len(self._peers)), n_pairs=self._rails.n_pairs,
            n_nodes=self._n_nodes, epoch=self._epoch, n_slots=MAX_PARTS,
            limits=limits(settings), deadline=self._deadline)

    def _without_rdma(self, peer: NodeInfo, reason: str, why: Exception) -> str:
        """Return why *peer* is reached by tcp and not by rdma; raise if only rdma will do."""
        if self._settings.transport == "rdma":
            raise ConfigError(f"transport='rdma' was asked for, but node {peer.index} ({peer.host}) cannot be reached "
                              f"by it: {why}") from why
        if not isinstance(why, rdma.NoDeviceError):
            log.warning("node %d (%s) is reached by tcp, not by rdma: %s", peer.index, peer.host, why)
        return f"{reason}; no rdma: {why}"

    def _equip(self, link: tcp.TcpLink) -> tcp.TcpLink:
        settings = self._settings
        link.n_nodes, link.epoch, link.send_buffer_nbytes = self._n_nodes, self._epoch, settings.tcp_sndbuf_bytes
        link.n_streams = settings.tcp_streams
        link.limits = limits(settings)
        link.paces = self._paces
        return link

    def _accept_all(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        strangers: list[threading.Thread] = []
        while missing := self._still_to_come():
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

    def _still_to_come(self) -> list[int]:
        """Return whom to let in; with the last one the thread that asks has ended."""
        with self._lock:
            missing = [index for index in self._peers if index > self._me.index and index not in self.links]
            self._accepts = bool(missing)
        return missing

    def _accept(self, sock: socket.socket) -> None:
        """Let one connection prove itself. A stranger is logged and refused, and harms nobody."""
        try:
            hello = tcp.accept(sock, self._key, mine=self._me.index, epoch=self._epoch)
        except (BpsError, OSError) as exc:
            log.warning("refused a data connection: %s", exc)
            sock.close()
            return
        if hello.stream == rendezvous.STREAM:
            self._accept_rdma(sock, hello.peer)
            return
        with self._lock:
            half = self._accepting.setdefault(hello.peer, tcp.TcpLink(hello.peer))
            if (self._closed or hello.peer not in self._peers or hello.stream in half.sockets
                    or hello.peer in self.links):
                log.warning("refused stream %d of node %d: not expected", hello.stream, hello.peer)
                sock.close()
                return
            half.sockets[hello.stream] = sock
            whole = len(half.sockets) == self._settings.n_connections
            if whole:
                del self._accepting[hello.peer]
        if whole:
            meeting = self._meetings.get(hello.peer)
            if meeting is not None:
                meeting.join(_JOIN_S)  # it knows why the peer comes by tcp now, and is about to say so
            reason = shm_objection(self._settings) or "it found no shared memory with this node"
            self.offer(self._equip(half), self._objections.get(hello.peer) or reason)

    def _accept_rdma(self, sock: socket.socket, index: int) -> None:
        """Meet a node that wants RDMA. If that cannot be, it comes again by tcp."""
        peer = self._peers.get(index)
        if self._closed or peer is None or index in self.links:
            log.warning("refused a connection for RDMA of node %d: not expected", index)
            sock.close()
            return
        self._meetings[index] = threading.current_thread()
        reason = shm_objection(self._settings) or "it found no shared memory with this node"
        try:
            self.offer(self._meet(sock, peer), f"a first write passed both ways; {reason}")
        except (BpsError, OSError) as exc:
            try:
                self._objections[index] = self._without_rdma(peer, reason, exc)
            except ConfigError as error:
                self.error = self.error or error
                self._notify()

    def _left(self) -> float:
        return self._deadline - time.monotonic()
