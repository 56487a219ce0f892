"""Connects a node to all its peers: dials those of lower index, accepts those of higher, chooses each transport.

A link that ends later is replaced by tcp (`seek`, `reconnector`), and where it was RDMA, by that again once it works
(`rdma_returns`). A node that joins the running job dials all others,
which `expect` it.
"""
from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from ...base.addresses import is_loopback
from ...base.encryption import Encryption, check as check_encryption, seals_of
from ...base.settings import Settings, parse_addresses
from ...base.trace_records import limits
from ...orchestration.errors import BpsError, ConfigError, StallError
from ...orchestration.messages import NodeInfo, Outcome
from ...orchestration.security import HandshakeResult, StreamHello
from ...pyx.ring import MAX_PARTS
from ...pyx.tcp import IoThreads
from . import rdma, shm, tcp
from .links import WireLink
from .rdma import handshake
from .rdma.rails import PeerRail
from .rdma.returns import RdmaReturns
from .reconnector import PROBE_STREAM, RECONNECT_STREAM, SHUTDOWN_STREAM, Reconnector
from .tcp import DataPort, Epochs

log = logging.getLogger("bpsfast.node")

Link = shm.ShmLink | tcp.TcpLink | rdma.RdmaLink
#: Links with a channel for messages of the control loops.
TalkingLink = shm.ShmLink | rdma.RdmaLink

#: How long `close` waits for each thread: an aborted job does not wait for a peer that does not answer.
_JOIN_S = 1.0
#: How long a peer may take to accept a connection for RDMA while the pair uses tcp; and both, to make the link.
_RETURN_CONNECT_S = 2.0
_RETURN_S = 60.0
#: Number of threads that dial at the start of a job, and the interval in seconds at which one more starts while peers
#: are left to dial.
_DIAL_THREADS, _DIAL_PATIENCE_S = 2, 0.05
#: After this share of `start_timeout_s` a helper that has not connected is lost, while the job can begin without it.
_HELPERS_WAIT = 0.5


def wire(link: Link | None) -> WireLink | None:
    """Return *link* if bytes are written over it, None if memory is shared or there is none."""
    return link if isinstance(link, WireLink) else None


def talking(link: Link) -> TalkingLink | None:
    """Return *link* if it has a channel."""
    return link if not isinstance(link, tcp.TcpLink) else None


def check(settings: Settings) -> None:
    """Raise `ConfigError` if *settings* ask for a transport or encryption that is impossible here."""
    schedulers = parse_addresses(settings.scheduler) if settings.scheduler else []
    is_local = all(is_loopback(host) for host, _ in schedulers)
    if settings.encryption == "on" or not is_local:
        check_encryption(settings)
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
    """Return why shm is not tried between nodes; "": it is."""
    if settings.transport in ("tcp", "rdma"):
        return f"transport={settings.transport}"
    return "" if settings.allow_shm else "allow_shm=false (BYTEPS_ENABLE_IPC=0)"


def peers_of(me: NodeInfo, nodes: Sequence[NodeInfo], lost: Collection[int] = ()) -> list[NodeInfo]:
    """Return the nodes, in node order, that *me* connects to: one of each pair has ranks, and none is *lost*."""
    return [node for node in nodes
            if node.index != me.index and node.index not in lost and (node.ranks or me.ranks)]


class PeerShutdowns:
    """Which nodes have announced that all their ranks have left; without a scheduler peers tell each other. Any thread.

    *me*, *peers*: this node, and its peers, which may change. *lease_s*: how long a peer may take to hear ours.
    *begin*: runs what it is given in a thread of its own. *notify*: called when `announced` or `are_announced` may have
    changed.
    """

    def __init__(self, me: NodeInfo, peers: Mapping[int, NodeInfo], key: bytes, epochs: Epochs, lease_s: float,
                 encryption: Encryption, begin: Callable[[Callable[[], None]], None],
                 notify: Callable[[], None]) -> None:
        self._me = me
        self._peers = peers
        self._key = key
        self._epochs = epochs
        self._lease_s = lease_s
        self._encryption = encryption
        self._begin = begin
        self._notify = notify
        self._lock = threading.Lock()
        self._announced: set[int] = set()
        self._to_reach: set[int] = set()
        self._reached: set[int] = set()  # or not to be reached

    def announce_shutdown(self) -> None:
        """Tell all peers that all ranks of this node have left. Once."""
        self._to_reach = set(self._peers)
        for peer in list(self._peers.values()):
            self._begin(partial(self._tell_peer, peer))

    @property
    def are_announced(self) -> bool:
        """Whether all peers that can be reached have been told."""
        return self._reached >= self._to_reach

    @property
    def announced(self) -> set[int]:
        """The peers that have announced that all their ranks have left."""
        with self._lock:
            return set(self._announced)

    def receive(self, hello: StreamHello) -> None:
        """Handle the announcement of an authenticated connection; ignore it unless it comes from the node it names."""
        with self._lock:
            peer = self._peers.get(hello.peer)
            is_its_own = peer is not None and bool(peer.ranks) and peer.pid == hello.pid
            if is_its_own:
                self._announced.add(hello.peer)
        if is_its_own:
            self._notify()
        else:
            log.warning("process %d announces that all ranks of node %d have left, but it is not that node with ranks",
                        hello.pid, hello.peer)

    def _tell_peer(self, peer: NodeInfo) -> None:
        try:
            tcp.connect(peer.address, self._key, mine=self._me.index, peer=peer.index, number=SHUTDOWN_STREAM,
                        epochs=self._epochs, deadline=time.monotonic() + self._lease_s, pid=self._me.pid,
                        encryption=self._encryption)[0].close()
        except (BpsError, OSError) as exc:
            log.debug("node %d could not be told that all ranks here have left: %s", peer.index, exc)
        with self._lock:
            self._reached.add(peer.index)


class Peering:
    """Connects one node to all its peers in threads of its own, so that the control loop is not blocked.

    Parameters
    ----------
    epochs
        The epochs that this node knows; they keep changing.
    me, nodes, lost
        This node, all nodes in node order, and the indices of those that are not there.
    listener
        The socket that `NodeInfo.address` names. Accepts until `close`, which closes it.
    shm_endpoint, rails
        What this node offers to peers that share memory with it, and to those that it reaches by RDMA.
    notify
        Called (from any of the threads) whenever `done`, `error` or `unreached` may have changed.
    """

    def __init__(
        self, settings: Settings, key: bytes, epochs: Epochs, me: NodeInfo, nodes: Sequence[NodeInfo],
        listener: socket.socket, shm_endpoint: shm.ShmEndpoint, rails: rdma.Rails, notify: Callable[[], None],
        lost: Collection[int] = (), is_late: bool = False,
    ) -> None:
        self.links: dict[int, Link] = {}
        self.reasons: dict[int, str] = {}
        self.error: BpsError | None = None
        self._settings = settings
        self._encryption = Encryption.of(settings)
        self._key = key
        self._checks = settings.checksum == "on"
        self._epochs = epochs
        self._me = me
        self._peers = {node.index: node for node in peers_of(me, nodes, lost)}
        self._first = frozenset(self._peers)  # peers of the start
        self._shm_endpoint = shm_endpoint
        self._rails = rails
        self._paces = tcp.pacing_of(settings, len(self._peers))
        self._io_threads: IoThreads | None = None  # once there are peers
        self._n_nodes = 0 if is_late else len(nodes)  # at the start of the job
        self._notify = notify
        self._deadline = time.monotonic() + settings.start_timeout_s
        self._accepting: dict[int, tcp.TcpLink] = {}
        self._objections: dict[int, str] = {}
        self._unreached: dict[int, str] = {}
        self._rdma_handshakes: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()
        self._gathered = threading.Condition(self._lock)
        self._closed = False
        self._taken: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._port = DataPort(listener, key, me.index, epochs, self._accept, len(self._peers) * settings.n_connections,
                              self._encryption)
        #: Replaces links that end; `seek` is the way to ask for that.
        self.reconnector = Reconnector(me, self._peers, key, epochs, settings.n_connections, settings.lease_s,
                                       settings.start_timeout_s, self._offer_again, self._drop, notify,
                                       self._encryption, self._checks)
        #: Makes RDMA links again where one has failed.
        self.rdma_returns = RdmaReturns(self._dial_rdma_again, notify)
        #: The nodes that have announced that all their ranks have left.
        self.peer_shutdowns = PeerShutdowns(me, self._peers, key, epochs, settings.lease_s, self._encryption,
                                            self._begin, notify)

    def start(self) -> None:
        """Start to connect; this ends within start_timeout_s. Raises `ConfigError` if I/O threads cannot be made."""
        if self._peers:
            self._io_threads = tcp.io_threads_of(self._settings)
        self._port.start()
        self._begin(self._dial_all)
        self._begin(self._await_all)

    @property
    def index(self) -> int:
        """This node's index."""
        return self._me.index

    @property
    def done(self) -> bool:
        """Whether every peer of the start is connected."""
        return self._first <= self.links.keys()

    def describe(self) -> dict[str, str]:
        """Return the transport of each peer: "node N" -> "transport: reason"."""
        return {f"node {index}": f"{link.kind}: {self.reasons[index]}{self._guard_of(link)}"
                for index, link in sorted(self.links.items())}

    def _guard_of(self, link: Link) -> str:
        """Return how the bytes of *link* are protected, as text; "" if they are not."""
        if link.is_encrypted:
            return "; encrypted"
        return "; with checksums" if link.kind == "tcp" and self._checks else ""

    def expect(self, peer: NodeInfo) -> None:
        """Accept *peer*, which joins the running job, from now on; `links` contains it once it is connected.

        Raises `ConfigError` as `start`.
        """
        if self._io_threads is None:
            self._io_threads = tcp.io_threads_of(self._settings)
        with self._lock:
            self._deadline = time.monotonic() + self._settings.start_timeout_s
            self._peers[peer.index] = peer
        self.reconnector.expect(peer.index)

    def unreached(self) -> dict[int, str]:
        """Return the helpers of the start that cannot be connected, and why: the job may go on without them."""
        with self._lock:
            return {index: why for index, why in self._unreached.items() if index in self._first}

    def drop_peer(self, index: int) -> None:
        """Stop connecting to node *index*, which was lost before all peers of the start were connected."""
        with self._lock:
            self._first -= {index}
        self.forget(index)
        self.reconnector.give_up(index, "the job goes on without it")
        self._tell_all()

    def forget(self, index: int) -> None:
        """Refuse node *index* from now on: it was to join, or is lost."""
        with self._lock:
            self._peers.pop(index, None)
            half = self._accepting.pop(index, None)
        if half is not None:
            half.close()
        self._drop(index)

    def take(self, *only: int) -> dict[int, Link]:
        """Hand over the links to the nodes *only* (default: of the start); the caller closes them from now on."""
        with self._lock:
            taken = {index: link for index, link in self.links.items() if index in (only or self._first)}
            self._taken |= taken.keys()
            return taken

    def seek(self, index: int, awaited: Callable[[], Mapping[int, int]], reason: str = "") -> None:
        """Seek another link to node *index*, by tcp, in place of one that was taken and is closed now.

        *awaited* (called from any thread) returns what has not arrived over it, by part; *reason*: why tcp is used, if
        it was not before. When there is one, `notify` is called and `links` has it, to be taken. `Reconnector.failed`
        tells if there will be none; `Reconnector.requested`, which peers have closed their side of a link that is open.
        """
        with self._lock:
            self.reasons[index] = reason or self.reasons[index]
        self.reconnector.seek(index, awaited)

    def seek_rdma(self, index: int, rails: Mapping[str, str], least_rails: int, *, pause_s: float = 0.0,
                  is_urgent: bool = False) -> None:
        """Seek an RDMA link to node *index*; see `RdmaReturns.seek`. `notify` is called when there is one."""
        self.rdma_returns.seek(index, rails, least_rails, dials=index < self._me.index, pause_s=pause_s,
                               is_urgent=is_urgent)

    def replaced(self, link: rdma.RdmaLink, reason: str) -> None:
        """Record *link*, which the caller has from `rdma_returns` and closes, in place of the one before."""
        self.reconnector.cancel(link.index)
        with self._lock:
            self.links[link.index] = link
            self._taken.add(link.index)
            self.reasons[link.index] = reason

    def probe(self, index: int, tell: Callable[[int, Outcome], None]) -> None:
        """Test whether node *index* answers at its data port; a thread calls *tell* with the outcome."""
        peer = self._peers.get(index)
        if peer is not None:
            self._begin(lambda: tell(index, self._probe(peer)))

    def _probe(self, peer: NodeInfo) -> Outcome:
        patience_s = self._settings.lease_s / 4
        try:
            sock = tcp.reach_once(peer.address, patience_s)
            hello = StreamHello(peer=self._me.index, stream=PROBE_STREAM, epoch=self._epochs.known,
                                encrypted=self._encryption.covers(sock))
            with sock:
                tcp.prove_to(sock, self._key, hello, peer.index, patience_s, 0)  # alive in whatever epoch
        except ConnectionRefusedError:
            return "refused"
        except (BpsError, OSError) as exc:
            log.debug("node %d was probed and did not answer: %s", peer.index, exc)
            return "silent"
        return "answers"

    def offer(self, link: Link, reason: str) -> None:
        """Take an established link (the control loop passes on those of the local socket)."""
        with self._lock:
            if self._closed or link.index not in self._peers or link.index in self.links:
                # A job may end while its nodes still connect: then this is no error.
                log.log(logging.DEBUG if self._closed else logging.WARNING, "node %d connected %s: refused", link.index,
                        "too late" if self._closed else "twice, or is no peer")
                link.close()
                return
            self.reasons[link.index] = reason
            self.links[link.index] = link
            if not self.done and link.index in self._first:
                return  # the waiting threads act once all peers of the start are connected
            self._gathered.notify_all()
        self._notify()

    def close(self) -> None:
        """Stop connecting, and close links that were not taken. A thread that is dialling ends with the process."""
        with self._lock:
            self._closed = True
            self._gathered.notify_all()
        self.reconnector.close()
        self.rdma_returns.close()
        self._port.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_JOIN_S)
        with self._lock:
            unused: list[Link] = [*self._accepting.values(),
                                  *(link for index, link in self.links.items() if index not in self._taken)]
            self._accepting.clear()
            self.links = {}
        for link in unused:
            link.close()
        if self._io_threads is not None:
            self._io_threads.close()

    # -- its threads --------------------------------------------------------------------------------------

    def _begin(self, task: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guard, args=(task,), name="bpsfast-peering", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def _guard(self, task: Callable[[], None]) -> None:
        self._attempt(task)
        self._tell_all()

    def _attempt(self, task: Callable[[], None]) -> None:
        """Call *task*. If it fails, keep the first error and wake all waiting threads."""
        try:
            task()
        except BpsError as exc:
            self.error = self.error or exc
        except OSError as exc:
            self.error = self.error or BpsError(f"connecting to peers failed: {exc}")
        else:
            return
        self._tell_all()

    def _tell_all(self) -> None:
        with self._gathered:
            self._gathered.notify_all()
        self._notify()

    def _dial_all(self) -> None:
        """Dial all peers of lower index, at first in few threads.

        Hundreds of threads that compete for the interpreter lock spend more CPU time on that than on dialling. But a
        path that drops RDMA packets blocks its thread for seconds, so more threads start while peers are left to dial.
        """
        waiting = deque(peer for index, peer in list(self._peers.items()) if index < self._me.index)

        def dial_some() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    self._attempt(partial(self._dial, waiting.popleft()))

        threads: list[threading.Thread] = []
        while waiting:
            thread = threading.Thread(target=dial_some, name="bpsfast-dial", daemon=True)
            threads.append(thread)
            thread.start()
            if len(threads) >= _DIAL_THREADS:
                with self._gathered:
                    self._gathered.wait_for(lambda: not waiting, _DIAL_PATIENCE_S)
        for thread in threads:
            thread.join()

    def _dial(self, peer: NodeInfo) -> None:
        reason = shm_objection(self._settings)
        if not reason:
            try:
                name = b"\0" + peer.shm_name.encode()
                link = shm.connect(self._key, name, self._me.index, peer.index, self._epochs.known, self._shm_endpoint,
                                   self._left())
                self.offer(link, "a memfd exchange over its local socket worked")
                return
            except (BpsError, OSError) as exc:
                if self._settings.transport == "shm":
                    raise ConfigError(f"transport='shm' was asked for, but node {peer.index} ({peer.host}) shares no "
                                      f"memory with this node: {exc}") from exc
                reason = f"no shared memory with it ({exc})"
        if self._encryption is Encryption.ALL:
            reason += "; no rdma: encryption=on" if self._settings.transport == "auto" else ""
        elif self._settings.transport in ("auto", "rdma"):
            try:
                self._dial_rdma(peer, reason)
                return
            except (BpsError, OSError) as exc:
                reason = self._without_rdma(peer, reason, exc)
        self._dial_tcp(peer, reason)

    def _dial_tcp(self, peer: NodeInfo, reason: str) -> None:
        link = tcp.dial(peer.address, self._key, mine=self._me.index, peer=peer.index,
                        n_streams=self._settings.n_connections, epochs=self._epochs, deadline=self._deadline,
                        encryption=self._encryption)
        self.offer(self._equip(link), reason)

    def _dial_rdma(self, peer: NodeInfo, reason: str) -> None:
        rails = partial(self._rails.towards, peer.address, len(self._peers), opens=peer.index in self._first)
        rails()  # without a device here the peer need not be asked
        sock, epoch = tcp.connect(peer.address, self._key, mine=self._me.index, peer=peer.index,
                                  number=handshake.STREAM, epochs=self._epochs, deadline=self._deadline,
                                  encryption=self._encryption)
        self.offer(self._make_rdma_link(sock, peer, epoch, rails, self._deadline),
                   f"a first write passed both ways; {reason}")

    def _dial_rdma_again(self, index: int, rails: Mapping[str, str], least_rails: int) -> rdma.RdmaLink:
        peer = self._peers.get(index)
        if peer is None:
            raise StallError(f"node {index} is no peer any more")
        n_rails = len(self._rails.towards_again(peer.address, rails))
        if n_rails < least_rails:
            raise rdma.NoRdmaError(f"{n_rails} ports can be used here, {least_rails} are needed")
        now = time.monotonic()
        sock, epoch = tcp.connect(peer.address, self._key, mine=self._me.index, peer=index, number=handshake.STREAM,
                                  epochs=self._epochs, deadline=now + _RETURN_CONNECT_S, link=1,
                                  encryption=self._encryption)
        return self._make_rdma_link(sock, peer, epoch, partial(self._rails.towards_again, peer.address, rails),
                                    now + _RETURN_S, least_rails, rails)

    def _make_rdma_link(self, sock: socket.socket, peer: NodeInfo, epoch: int, rails: Callable[[], list[PeerRail]],
                        deadline: float, least_rails: int = 1,
                        known: Mapping[str, str] | None = None) -> rdma.RdmaLink:
        settings = self._settings
        tcp.end_when_silent(sock, settings.lease_s)
        return handshake.make_link(
            sock, peer.index, rails, n_pairs=self._rails.n_pairs, n_nodes=self._n_nodes_with(peer.index), epoch=epoch,
            n_slots=MAX_PARTS, limits=limits(settings), deadline=deadline, least_rails=least_rails, known=known)

    def _without_rdma(self, peer: NodeInfo, reason: str, why: Exception) -> str:
        """Return why *peer* is reached by tcp and not by rdma; raise if the setting requires rdma."""
        if self._settings.transport == "rdma":
            raise ConfigError(f"transport='rdma' was asked for, but node {peer.index} ({peer.host}) cannot be reached "
                              f"by it: {why}") from why
        if not isinstance(why, rdma.NoDeviceError):
            log.warning("node %d (%s) is reached by tcp, not by rdma: %s", peer.index, peer.host, why)
        return f"{reason}; no rdma: {why}"

    def _equip(self, link: tcp.TcpLink) -> tcp.TcpLink:
        settings = self._settings
        link.n_nodes, link.checks = self._n_nodes_with(link.index), self._checks
        link.send_buffer_nbytes = settings.tcp_sndbuf_bytes
        link.n_streams = settings.tcp_streams
        link.limits = limits(settings)
        link.paces, link.io_threads = self._paces, self._io_threads
        for sock in link.sockets.values():
            tcp.end_when_silent(sock, settings.lease_s)
        return link

    def _n_nodes_with(self, index: int) -> int:
        """Return the number of nodes by which partitions are assigned to queue pairs: the same on both sides."""
        return max(self._n_nodes, self._me.index + 1, index + 1)

    def _offer_again(self, link: tcp.TcpLink) -> None:
        self.offer(self._equip(link), self.reasons[link.index])

    def _drop(self, index: int) -> None:
        """Forget the link to node *index*; close it if it was not taken."""
        with self._lock:
            link = self.links.pop(index, None)
            taken = index in self._taken
            self._taken.discard(index)
        if link is not None and not taken:
            link.close()

    def _await_all(self) -> None:
        """Wait for peers that dial this node; for helpers not as long as for nodes with ranks."""
        for is_last in (False, True):
            timeout_s = self._settings.start_timeout_s
            left_s = self._left() - (0.0 if is_last else _HELPERS_WAIT * timeout_s)
            with self._gathered:
                self._gathered.wait_for(lambda: self._closed or self.error or not self._missing(), max(0.0, left_s))
                missing = [self._peers[index] for index in self._missing()]
                if not missing or self._closed or self.error:
                    return
                late = {peer.index: f"it did not connect to node {self._me.index} ({self._me.address}) within "
                                    f"{_HELPERS_WAIT * timeout_s:g} s (half of start_timeout_s)"
                        for peer in missing if not peer.ranks and self._me.ranks}
                if not is_last:
                    self._unreached |= late
            self._notify()
        names = ", ".join(f"node {peer.index} ({peer.address})" for peer in missing)
        raise StallError(f"{names} did not connect to node {self._me.index} ({self._me.address}) within "
                         f"{timeout_s:g} s: is a firewall between the machines?")

    def _missing(self) -> list[int]:
        return sorted(index for index in self._first if index > self._me.index and index not in self.links)

    def _accept(self, sock: socket.socket, greeted: HandshakeResult) -> None:
        """Take an authenticated connection, and act as its stream number tells."""
        hello = greeted.hello
        if hello.stream == SHUTDOWN_STREAM:
            self.peer_shutdowns.receive(hello)
        if hello.stream in (SHUTDOWN_STREAM, PROBE_STREAM):
            sock.close()
            return
        if hello.stream == handshake.STREAM:
            accept_rdma = self._accept_rdma_again if hello.link else self._accept_rdma
            accept_rdma(sock, hello.peer, hello.epoch)
            return
        if hello.link > 0 or hello.stream == RECONNECT_STREAM:
            self.reconnector.accept(sock, greeted)
            return
        with self._lock:
            half = self._accepting.setdefault(hello.peer, tcp.TcpLink(hello.peer, epoch=hello.epoch))
            if (self._closed or hello.peer not in self._peers or hello.stream in half.sockets
                    or hello.epoch != half.epoch or hello.peer in self.links):
                log.log(self._refusal_level, "refused stream %d of node %d: not expected", hello.stream, hello.peer)
                sock.close()
                return
            half.take(hello.stream, sock, seals_of(greeted.secret, dialled=False) if hello.encrypted else None)
            whole = len(half.sockets) == self._settings.n_connections
            if whole:
                del self._accepting[hello.peer]
        if whole:
            handshaking = self._rdma_handshakes.get(hello.peer)
            if handshaking is not None:
                handshaking.join(_JOIN_S)  # it is about to set the reason why the peer uses tcp
            reason = shm_objection(self._settings) or "it found no shared memory with this node"
            self.offer(self._equip(half), self._objections.get(hello.peer) or reason)

    @property
    def _refusal_level(self) -> int:
        """The level of log lines about refused connections; others may dial a node that is ending."""
        return logging.INFO if self._closed else logging.WARNING

    def _accept_rdma(self, sock: socket.socket, index: int, epoch: int) -> None:
        """Set up RDMA with a node that dialled for it in *epoch*; if that fails, it dials again for tcp."""
        peer = self._peers.get(index)
        if self._closed or peer is None or index in self.links:
            log.log(self._refusal_level, "refused a connection for RDMA of node %d: not expected", index)
            sock.close()
            return
        self._rdma_handshakes[index] = threading.current_thread()
        reason = shm_objection(self._settings) or "it found no shared memory with this node"
        try:
            rails = partial(self._rails.towards, peer.address, len(self._peers), opens=index in self._first)
            link = self._make_rdma_link(sock, peer, epoch, rails, self._deadline)
            self.offer(link, f"a first write passed both ways; {reason}")
        except (BpsError, OSError) as exc:
            try:
                self._objections[index] = self._without_rdma(peer, reason, exc)
            except ConfigError as error:
                if index not in self._first:  # the job can do without a joining node
                    log.warning("%s", error)
                    return
                self.error = self.error or error
                self._tell_all()

    def _accept_rdma_again(self, sock: socket.socket, index: int, epoch: int) -> None:
        """Make an RDMA link with a node that the job reaches already; the peer tries again if that fails."""
        peer, wanted = self._peers.get(index), self.rdma_returns.wanted(index)
        if self._closed or peer is None or wanted is None:
            log.debug("refused a connection for RDMA of node %d: no link is wanted now", index)
            sock.close()
            return
        try:
            rails = partial(self._rails.towards_again, peer.address, wanted[0])
            link = self._make_rdma_link(sock, peer, epoch, rails, time.monotonic() + _RETURN_S, wanted[1], wanted[0])
        except (BpsError, OSError) as exc:
            log.debug("no RDMA link to node %d yet: %s", index, exc)
        else:
            self.rdma_returns.offer(index, link)

    def _left(self) -> float:
        return self._deadline - time.monotonic()
