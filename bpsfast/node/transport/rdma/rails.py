"""The rails of one node: the RDMA ports it uses, each opened once, with all of its segments registered.

No rail is opened once anything is registered: nodes that join later are reached by the open ones, or by tcp. A rail
stays open when its last stream fails, because its port may come back; it is closed when its device is gone.

A rail is device, protection domain, completion queue and one native thread (`bpsfast.pyx.rdma.Rail`); queue pairs to
all peers share it. Each segment is registered once, when it is made; remote writes are allowed to slots and results
only. Two resources are limited, and checked first: the lengths of a device's queues (max_qp_wr, max_cqe, max_qp), which
all peers share; and memory that may be locked, of which every segment takes its size once per device.

References
----------
Linux, ``drivers/infiniband/core/umem.c`` (ib_umem_get): pinned pages of the process against RLIMIT_MEMLOCK, unless it
has CAP_IPC_LOCK.
"""
from __future__ import annotations

import bisect
import contextlib
import errno
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from ....base.settings import Settings, parse_address
from ....hardware import rdma_route
from ....hardware.affinity.binding import device_cores, on_cores
from ....hardware.host import Host
from ....hardware.verbs import provider
from ....orchestration.errors import BpsError, CapacityError
from ....pyx import rdma as native
from ....pyx.pages import Segment, Shadow
from .failures import NoDeviceError, NoRdmaError, PortNow
from .rdma_messages import RailOffer

log = logging.getLogger("bpsfast.node")

#: Kinds of memory that peers write into; everything else is only read by the device.
_WRITTEN_BY_PEERS = frozenset({"slot", "result", "direct"})
#: Receive requests of a stream if the device's queues are long enough: eight times the default of rdma_queue_depth.
RECEIVES = 1024
#: With fewer, a peer would have to repeat most of what it sends at once.
LEAST_RECEIVES = 64
#: Memory that must be lockable with transport=auto: the segments of a small model.
LEAST_FOR_AUTO = 1 << 30
#: How long to wait for the rail's thread to take completions of closed streams; it takes microseconds.
_DRAIN_S = 1.0
_CAP_IPC_LOCK = 14
#: How long what is known of the ports counts, once a link is sought again.
_FACTS_LAST_S = 1.0


class Depths(NamedTuple):
    """Lengths of one stream's queues, and of the completion queue that all streams of a device share."""

    send: int
    receive: int
    completions: int


def queue_depths(device: str, attributes: Mapping[str, Any], n_peers: int, n_pairs: int, n_sends: int) -> Depths:
    """Return the queue lengths for *n_pairs* streams, of *n_sends* writes, to each of *n_peers* peers over *device*.

    The completion queue is as long as the queues of all streams together, so nothing can overrun it. If the device has
    none that long, the queues are shorter. A receive queue is twice as long as a send queue at least, if max_qp_wr
    allows it: a peer with the same send queue exhausts it only if it gets completions for a whole queue of writes, and
    sends as many again, while this node's thread handles none. The peer's card then repeats what found no request.

    Raises `CapacityError` if the device cannot hold them; with what is needed and what there is.
    """
    n_streams = max(1, n_peers * n_pairs)
    if n_streams > attributes["max_qp"]:
        raise CapacityError(f"{n_peers} peers x {n_pairs} queue pairs need {n_streams} queue pairs, {device} has "
                            f"max_qp={attributes['max_qp']}: lower BPSFAST_RDMA_QUEUE_PAIRS, or use tcp")
    both = attributes["max_cqe"] // n_streams
    send = min(n_sends, attributes["max_qp_wr"], max(1, both // 3))
    receive = min(max(RECEIVES, 2 * send), attributes["max_qp_wr"], both - send)
    if receive < LEAST_RECEIVES:
        raise CapacityError(
            f"{n_peers} peers x {n_pairs} queue pairs, each of {send} sends and at least {LEAST_RECEIVES} receives, "
            f"need a completion queue of {n_streams * (send + LEAST_RECEIVES)} and queues of {LEAST_RECEIVES}; "
            f"{device} has max_cqe={attributes['max_cqe']} and max_qp_wr={attributes['max_qp_wr']}: lower "
            "BPSFAST_RDMA_QUEUE_PAIRS or BPSFAST_RDMA_QUEUE_DEPTH, or use tcp")
    return Depths(send, receive, n_streams * (send + receive))


def completion_vector(wanted: int, n_vectors: int) -> int:
    """Return the completion vector for the setting *wanted*; -1: by process, so that nodes of one machine differ."""
    return os.getpid() % n_vectors if wanted < 0 else wanted


def lockable_nbytes(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process may lock, None without a limit (also with CAP_IPC_LOCK)."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY or _may_lock_all(root) else soft


def least_lockable_nbytes(transport: str, segment_nbytes: int) -> int:
    """Return how many bytes a node must be able to lock before it connects; *segment_nbytes*: its smallest segment.

    With transport=rdma one segment each of inputs, slots and results is enough. With "auto", tcp can only be chosen
    before that: a limit that the first real model exceeds (8 MiB, the kernel's default) is of no use.
    """
    return 3 * segment_nbytes if transport == "rdma" else max(3 * segment_nbytes, LEAST_FOR_AUTO)


def require_lockable(wanted: int, locked: int, n_devices: int, purpose: str, limit: int | None) -> None:
    """Return if *wanted* more bytes can be locked in addition to *locked*, once for each of *n_devices*.

    Raises `CapacityError` with what is needed and what *limit* (bytes; None: no limit) leaves.
    """
    if limit is None:
        return
    needed, left = wanted * n_devices, max(0, limit - locked * n_devices)
    if needed > left:
        each = f" ({wanted} bytes x {n_devices} devices)" if n_devices > 1 else ""
        raise CapacityError(
            f"{purpose} needs {needed} bytes of locked memory for RDMA{each}, but memlock={limit} leaves {left}: "
            "`ulimit -l unlimited` (a service: LimitMEMLOCK=infinity; a container: --ulimit memlock=-1 or "
            "--cap-add=IPC_LOCK), or use tcp"
            + (", or fewer ports (BPSFAST_RDMA_DEVICES)" if n_devices > 1 else ""))


def require_regions(n_regions: int, device: str, attributes: Mapping[str, Any], nbytes: int) -> None:
    """Return if *device* can hold one more region of *nbytes* in addition to *n_regions*; else `CapacityError`."""
    if n_regions >= attributes["max_mr"]:
        raise CapacityError(f"region {n_regions + 1} of this node cannot be registered: {device} has "
                            f"max_mr={attributes['max_mr']}; declare fewer, larger tensors, or use tcp")
    if nbytes > attributes["max_mr_size"]:
        raise CapacityError(f"a segment of {nbytes} bytes cannot be registered: {device} has "
                            f"max_mr_size={attributes['max_mr_size']}; declare smaller tensors at a time, or use tcp")


def _may_lock_all(root: Path) -> bool:
    """Whether this process has CAP_IPC_LOCK in the first user namespace, which the kernel checks."""
    try:
        status = (root / "proc/self/status").read_text()
        namespace = (root / "proc/self/uid_map").read_text().split()
    except OSError:
        return False
    effective = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    return bool(effective >> _CAP_IPC_LOCK & 1) and namespace == ["0", "0", str(0xFFFFFFFF)]


class Registered(NamedTuple):
    """One segment on one rail."""

    address: int
    nbytes: int
    rkey: int


class Rail:
    """One port, opened by *verbs* (`hardware.verbs`). Owned by `Rails`; `users` is the number of streams over it.

    The GID that a peer is reached from is the peer's (`PeerRail`): a port may have one for each of several subnets.

    Its thread runs on *cores* only, if there are any.

    Raises `OSError` or `CapacityError` if the device cannot be opened, or its queues are too short for *n_peers* peers
    with *settings*.
    """

    def __init__(self, verbs: ModuleType, chosen: rdma_route.Rail, n_peers: int, settings: Settings,
                 cores: frozenset[int] = frozenset()) -> None:
        self.verbs = verbs
        self.device_name = chosen.device
        self.port_number = chosen.port
        self.position = chosen.position
        self.settings = settings
        self.name = chosen.name
        self.users = 0
        self.is_closed = False
        self._n_left = 0  # closed streams whose completions may still be in the queue
        self._users_lock = threading.Lock()
        self.registered: list[Registered] = []
        with contextlib.ExitStack() as undo:
            self.device = undo.enter_context(verbs.Device(chosen.device))
            self.attributes = self.device.attributes
            self.port = self.device.port(chosen.port)
            self.depths = queue_depths(chosen.device, self.attributes, n_peers, settings.rdma_queue_pairs,
                                        settings.rdma_queue_depth)
            self.domain = undo.enter_context(verbs.ProtectionDomain(self.device))
            self.queue = undo.enter_context(verbs.CompletionQueue(
                self.device, self.depths.completions, events=True,
                vector=completion_vector(settings.rdma_completion_vector, self.device.completion_vectors)))
            with on_cores(cores):  # a thread inherits them from the thread that starts it
                self.native = native.Rail(self.queue.handle, port=chosen.port, awake_us=settings.awake_us,
                                          keep=self.queue)
            undo.callback(self.native.close)
            self._undo = undo.pop_all()

    @property
    def is_gone(self) -> bool:
        """Whether the device was reset, unplugged, or has lost its driver: nothing can be done with it any more."""
        try:
            self.device.port(self.port_number)
            return self.device_name not in self.verbs.devices()
        except OSError:
            return True

    def queue_pair(self, pkey_index: int) -> Any:
        """Return a new queue pair in INIT: receives may be posted, and the peer may write once it is connected.

        *pkey_index*: the row of the port's table of partition keys.
        """
        inline_nbytes = self.settings.rdma_inline_bytes
        try:
            pair = self.verbs.QueuePair(self.domain, self.queue, self.queue, max_send=self.depths.send,
                                        max_recv=self.depths.receive, max_inline=inline_nbytes)
        except OSError as exc:
            if not inline_nbytes or exc.errno not in (errno.EINVAL, errno.ENOMEM):
                raise
            raise CapacityError(f"{exc.strerror}; BPSFAST_RDMA_INLINE_BYTES={inline_nbytes} may be more than "
                                f"{self.device_name} carries inline: lower it") from exc
        try:
            pair.to_init(self.port_number, pkey_index=pkey_index)
        except BaseException:
            pair.close()
            raise
        return pair

    def join(self) -> None:
        """Count one more stream, for whose completions the queue has room from now on. Any thread, as `leave`.

        A node that joins the running job adds streams, so the queue grows if it must. Raises `CapacityError` with what
        is needed and what there is if it cannot.
        """
        with self._users_lock:
            if self._room_wanted() > self.queue.depth and self._n_left and self.native.drain(_DRAIN_S):
                self._n_left = 0
            if (wanted := self._room_wanted()) > self.queue.depth:
                self._grow(wanted)
            self.users += 1

    def leave(self) -> None:
        """Count one stream fewer, whose queue pair is destroyed."""
        with self._users_lock:
            self.users -= 1
            self._n_left += 1

    def _room_wanted(self) -> int:
        """Return how many completions there may be with one more stream."""
        return (self.users + self._n_left + 1) * (self.depths.send + self.depths.receive)

    def _grow(self, wanted: int) -> None:
        most = self.attributes["max_cqe"]
        try:
            if wanted > most:
                raise OSError(errno.EINVAL, "EINVAL: it is too long")
            self.queue.resize(wanted)
        except OSError as exc:
            raise CapacityError(
                f"{self.name} has no room for one more queue pair: with it, {self.depths.send} sends and "
                f"{self.depths.receive} receives each of {self.users + self._n_left + 1} queue pairs need a completion "
                f"queue of {wanted}; it has {self.queue.depth}, the device allows max_cqe={most} ({exc.strerror}): "
                "lower BPSFAST_RDMA_QUEUE_PAIRS or BPSFAST_RDMA_QUEUE_DEPTH, or use tcp") from exc

    def adopt(self, region: Any) -> None:
        """Keep *region* until the end; streams may send from it, and peers may write to it."""
        self._undo.callback(region.close)
        self.native.know(region.address, region.nbytes, region.lkey)
        bisect.insort(self.registered, Registered(region.address, region.nbytes, region.rkey))

    def rkey(self, address: int, nbytes: int) -> int:
        """Return the key that a peer needs to write to *address*; LookupError if the memory is not registered."""
        at = bisect.bisect(self.registered, (address, 1 << 64)) - 1
        found = self.registered[at] if at >= 0 else None
        if found is None or address + nbytes > found.address + found.nbytes:
            raise LookupError(f"{nbytes} bytes at {address:#x} are not registered with {self.name}")
        return found.rkey

    def close(self) -> None:
        """Deregister and close everything. BufferError while streams are open. Idempotent."""
        self.is_closed = True
        self._undo.close()


class PeerRail(NamedTuple):
    """A rail towards one peer: *chosen* has the GID that reaches it, *port* what the device says of its port now."""

    rail: Rail
    chosen: rdma_route.Rail
    port: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.rail.name

    def offer(self) -> RailOffer:
        """Return the description of the port for the peer."""
        rail, gid, port = self.rail, self.chosen.gid, self.port
        return RailOffer(device=rail.device_name, port=rail.port_number, link_layer=port["link_layer"],
                         gid=gid.value if gid else b"", version=gid.version if gid else "IB", lid=port["lid"],
                         mtu=min(port["active_mtu"], rail.settings.rdma_mtu or port["active_mtu"]),
                         position=rail.position, gbps=self.chosen.gbps, network=self.chosen.network,
                         is_on_route=self.chosen.is_on_route, pkey=self.chosen.pkey)

    def port_now(self) -> PortNow:
        """Return the present state of the port, including events that the device has reported."""
        rail, gid, error_ns = self.rail, self.chosen.gid, 0
        try:
            rail.native.look()
            error_ns = rail.native.port_error_ns
            port = rail.device.port(rail.port_number)
            return PortNow(str(port["state"]), port["lid"] == self.port["lid"],
                           port["link_layer"] != "Ethernet" or gid is None
                           or rail.device.gid(rail.port_number, gid.index) == gid.value, error_ns)
        except (OSError, ValueError):
            return PortNow("gone with its device", error_ns=error_ns)


@contextlib.contextmanager
def _as_no_rdma() -> Iterator[None]:
    """Turn errors that are reasons against RDMA into `NoRdmaError`."""
    try:
        yield
    except NoRdmaError:
        raise
    except (BpsError, OSError) as exc:
        raise NoRdmaError(exc.strerror or str(exc) if isinstance(exc, OSError) else str(exc)) from exc


class Rails:
    """All rails of one node. Peers connect from several threads; `settle` and everything after it is for one thread.

    *least_nbytes*: bytes that a node locks at least, before any model is known. *allowed*: CPUs that the rails' threads
    may run on, even if this process is bound to fewer.
    """

    def __init__(self, settings: Settings, least_nbytes: int, allowed: frozenset[int] = frozenset()) -> None:
        self._allowed = allowed
        self.n_pairs = settings.rdma_queue_pairs
        self._settings = settings
        self._host = Host()
        self._read_host: Callable[[], Host] = Host
        self._read_at = float("-inf")
        self._least_nbytes = least_nbytes
        self._limit: int | None = None
        self._facts_lock = threading.Lock()  # taken before the other one
        self._lock = threading.Lock()
        self._open: dict[str, Rail] = {}
        self._refused: set[str] = set()  # ports that could not be opened
        self._locked_nbytes = self._n_segments = self._n_registrations = 0
        self._closed = False

    @property
    def devices(self) -> tuple[str, ...]:
        """The RDMA devices that reach peers."""
        return tuple(rail.device_name for rail in self._open.values())

    @property
    def used(self) -> bool:
        """Whether memory is registered for RDMA."""
        return bool(self._open)

    def towards(self, address: str | None, n_peers: int, *, opens: bool = True) -> list[PeerRail]:
        """Return the opened rails that lead to *address* ("host:port"; None: in general), of a job of *n_peers* peers.

        Not *opens*: only rails that are open. Memory is already registered with each, possibly more than could be
        registered with another one, and running transfers cannot wait for that.

        Raises `NoRdmaError` with the reason: no device, no usable port, a setting that names none, no library, no room
        in the device's queues or in the memory that may be locked.
        """
        settings = self._settings
        with _as_no_rdma(), self._facts_lock:  # around everything: the facts about this machine are read once
            host = self._host
            if settings.nic_limit:
                raise NoDeviceError(f"nic_limit={settings.nic_limit:g} is kept on tcp connections only")
            if not host.ports:
                raise NoDeviceError("there is no RDMA device here")
            peer = rdma_route.peer_address(host, parse_address(address, "a node")[0]) if address else None
            choice = rdma_route.choose(host, settings, peer)
            for name, why in choice.rejected.items():
                self._log_refused(name, why)
            chosen = choice.require()
            with self._lock:
                if self._closed:
                    raise NoRdmaError("the node is closing")
                wanted = [each for each in chosen if opens or each.name in self._open]
                if not wanted:
                    raise NoRdmaError(f"no peer was reached by {', '.join(each.name for each in chosen)} when the job "
                                      "began, so no memory is registered there")
                if settings.gpu_direct and not settings.rdma_devices:
                    wanted = wanted[:1]  # a GPU reaches cards below its own PCIe switch
                self._limit = lockable_nbytes()
                require_lockable(self._least_nbytes, 0, 1, "a node", self._limit)
                if self._limit is not None and not settings.rdma_devices:  # the best come first
                    wanted = wanted[:max(1, self._limit // max(1, self._least_nbytes))]
                return self._opened_of(wanted, n_peers)

    def towards_again(self, address: str, names: Collection[str]) -> list[PeerRail]:
        """Return those of the rails *names*, which led to *address*, that are open and can be used now.

        Ports are looked at anew. Raises `NoRdmaError` if there is none, with the reason for each.
        """
        with self._lock:
            rails = [rail for name, rail in self._open.items() if name in names]
        found, reasons = [], []
        with _as_no_rdma(), self._facts_lock:
            if time.monotonic() - self._read_at > _FACTS_LAST_S:
                self._host, self._read_at = self._read_host(), time.monotonic()
            peer = rdma_route.peer_address(self._host, parse_address(address, "a node")[0])
            for rail in rails:
                exactly = msgspec.structs.replace(self._settings,
                                                  rdma_devices=f"={rail.device_name}:{rail.port_number}")
                try:
                    [chosen] = rdma_route.choose(self._host, exactly, peer).require()
                    found.append(PeerRail(rail, chosen, rail.device.port(rail.port_number)))
                except (BpsError, OSError, ValueError) as exc:  # ValueError: the rail is closed meanwhile
                    reasons.append(str(exc))
        if not found:
            raise NoRdmaError("; ".join(reasons) or f"{', '.join(names)} are closed: their devices are gone")
        return found

    def settle(self) -> None:
        """Close the rails that no peer uses: the job begins, and nothing more is registered with them."""
        with self._lock:
            self._shut([name for name, rail in self._open.items() if not rail.users])

    def close_gone(self) -> None:
        """Close the rails whose device is gone and that no stream uses; others wait for their port."""
        with self._lock:
            self._shut([name for name, rail in self._open.items() if not rail.users and rail.is_gone])

    def _shut(self, names: list[str]) -> None:
        for name in names:
            try:
                self._open.pop(name).close()
            except (OSError, BufferError) as exc:  # it is not needed any more
                log.warning("rail %s stays open: %s", name, exc)

    def require(self, nbytes: int, purpose: str) -> None:
        """Return if *nbytes* more in one segment can be registered; raises `CapacityError` with both numbers."""
        if self._open:
            require_lockable(nbytes, self._locked_nbytes, len(self._open), purpose, self._limit)
        for rail in self._open.values():
            require_regions(self._n_segments, rail.device_name, rail.attributes, nbytes)

    def register(self, kind: str, segment: Segment | Shadow) -> None:
        """Register *segment*, of the *kind* that `Regions` gives it, with every rail; it stays until `close`.

        After that no code in this process can read or write a device's memory, not even the host device's, so that
        bugs that try are detected.

        Raises `CapacityError` if a device refuses; it is then registered with none.
        """
        made: list[tuple[Rail, Any]] = []
        with self._lock:
            rails = list(self._open.values())
        try:
            for rail in rails:
                try:
                    made.append((rail, self._region(rail, segment, kind in _WRITTEN_BY_PEERS)))
                except OSError as exc:
                    if rail.users:
                        raise
                    # nothing needs it now: its peers stay with tcp
                    log.warning("rail %s is not used again, it refuses memory: %s", rail.name, exc.strerror)
                    with self._lock:
                        self._shut([rail.name])
            if isinstance(segment, Shadow):
                segment.shut()
        except OSError as exc:
            for _, region in made:
                region.close()
            raise CapacityError(f"a segment of {segment.nbytes} bytes for {kind}s cannot be registered for RDMA beside "
                                f"{self._locked_nbytes} bytes in {self._n_segments} segments: {exc.strerror}") from exc
        for rail, region in made:
            rail.adopt(region)
        self._n_registrations += len(made)
        if not isinstance(segment, Shadow) or segment.maps:
            self._locked_nbytes += segment.nbytes
        self._n_segments += 1

    def _region(self, rail: Rail, segment: Segment | Shadow, remote_write: bool) -> Any:
        region, relaxed = rail.verbs.MemoryRegion, self._settings.rdma_relaxed_ordering
        if isinstance(segment, Shadow) and not segment.maps:
            return region.of_dmabuf(rail.domain, segment.fileno(), segment.nbytes, segment.address,
                                    remote_write=remote_write, relaxed_ordering=relaxed)
        return region(rail.domain, segment, remote_write=remote_write, relaxed_ordering=relaxed)

    def counters(self) -> dict[str, int]:
        """Return the memory regions ever registered, the bytes they lock, and what the rails' threads did."""
        found = {"rails": len(self._open), "registrations": self._n_registrations,
                 "locked_nbytes": self._locked_nbytes * len(self._open)}
        for rail in self._open.values():
            for name in ("completions", "batches", "sleeps"):
                found[name] = found.get(name, 0) + rail.native.counters()[name]
        return found

    def close(self) -> None:
        """Close all rails; the memory that was registered may go afterwards. Once all links are closed. Idempotent."""
        with self._lock:
            self._closed = True
            while self._open:
                name, rail = self._open.popitem()
                try:
                    rail.close()
                except BufferError as exc:  # a handshake is under way: it ends with the process
                    log.debug("rail %s stays open: %s", name, exc)
                except OSError as exc:  # the others have to be closed, too
                    log.warning("rail %s was not closed in order: %s", name, exc)

    def _opened_of(self, wanted: Sequence[rdma_route.Rail], n_peers: int) -> list[PeerRail]:
        """Return those of the ports *wanted* that can be opened; the first error if there is none."""
        found: list[PeerRail] = []
        errors: list[Exception] = []
        for chosen in wanted:
            try:
                found.append(self._opened(chosen, n_peers))
            except (BpsError, OSError) as exc:
                errors.append(exc)
                self._log_refused(chosen.name, exc)
        if errors and (not found or self._settings.rdma_devices):
            raise errors[0]
        return found

    def _log_refused(self, name: str, why: object) -> None:
        if name not in self._refused:
            self._refused.add(name)
            log.info("%s is not used: %s", name, why)

    def _opened(self, chosen: rdma_route.Rail, n_peers: int) -> PeerRail:
        if chosen.name not in self._open:
            settings = self._settings
            self._open[chosen.name] = Rail(provider(settings.verbs), chosen, n_peers, settings,
                                           device_cores(self._host, chosen.device, settings.rdma_cores, self._allowed))
        rail = self._open[chosen.name]
        return PeerRail(rail, chosen, rail.port)
