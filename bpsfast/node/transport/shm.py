"""Transport between two nodes on one host: they map each other's memory and notification rings, and copy no bytes.

The connecting node sends a hello over the other's abstract socket; each side proves that it has the job's key (HMAC
over both indexes and process ids) and runs as the same user (SO_PEERCRED) before a descriptor is passed:

    connector                          acceptor
    PeerHello(proof)             ->
                                 <-    PeerWelcome(proof) + lane it reads, its doorbell, its pidfd
    PeerLane()  + the same three ->

Afterwards the channel carries segments and the places of results (`PeerSegment`, `PeerExtents`), once per generation.
Partials are announced natively, by lane entries.
"""
from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ...base import message_socket as channel
from ...base.message_socket import MessageSocket
from ...orchestration import messages, security
from ...orchestration.errors import DECODE_ERRORS, ConfigError, PeerLostError, ProtocolError
from ...pyx import ring
from ...pyx.pages import Segment
from .tcp import Epochs

log = logging.getLogger("bpsfast.node")

#: The longest message of a process that has not proved the job's key; an `Attach` has some kilobytes.
PENDING_MAX_NBYTES = 64 << 10


class PeerHello(messages.Message):
    """Node `source` wants to share memory with node `target`."""

    version: int
    source: int
    target: int
    epoch: int
    pid: int
    proof: bytes


class PeerWelcome(messages.Message):
    """The acceptor's answer, with its lane, doorbell and pidfd."""

    pid: int
    proof: bytes


class PeerLane(messages.Message):
    """The connector's lane, doorbell and pidfd."""


class PeerSegment(messages.Message):
    """Segment `segment` of this node (`kind`: input, partial, result); its descriptor comes with it."""

    segment: int
    kind: str
    nbytes: int


class PeerExtent(messages.Record):
    """Where this node publishes `part`: byte offsets of the even and the odd round's copy."""

    part: int
    segment: int
    offset_even: int
    offset_odd: int


class PeerExtents(messages.Message):
    """All parts of `generation` that this node owns."""

    generation: int
    extents: tuple[PeerExtent, ...]


_DECODER = msgspec.msgpack.Decoder(
    messages.LocalMessage | PeerHello | PeerWelcome | PeerLane | PeerSegment | PeerExtents
)


def decode(data: bytes) -> messages.Message:
    """Return the message in *data*: one of a rank's, or of a peer's."""
    try:
        return _DECODER.decode(data)
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"{len(data)} bytes on a local channel are no message: {exc}") from exc


class ShmEndpoint:
    """What one node offers its shm peers: its doorbell, its pidfd, and new lanes."""

    def __init__(self, doorbell: Segment) -> None:
        self.doorbell = doorbell
        self.pidfd = os.pidfd_open(os.getpid())

    def lane(self) -> Segment:
        """Return a new lane that this node reads."""
        made = Segment(ring.PEER_LANE_NBYTES, name="bpsfast-lane", huge=False, populate=False)
        ring.format_lane(made)
        return made

    def fds(self, lane: Segment) -> tuple[int, int, int]:
        """Return the descriptors that a peer gets."""
        return lane.fileno(), self.doorbell.fileno(), self.pidfd

    def close(self) -> None:
        """Close the pidfd. The doorbell is the node's."""
        os.close(self.pidfd)


@dataclass
class ShmLink:
    """An established pair: channel, both lanes, the peer's doorbell and pidfd, and its segments mapped here."""

    index: int
    channel: MessageSocket
    incoming: Segment
    outgoing: Segment
    doorbell: Segment
    pidfd: int
    segments: dict[int, Segment] = field(default_factory=dict)

    kind = "shm"
    is_encrypted = False
    end_reason = "its process is gone"

    def tell(self, message: messages.Message, fds: Sequence[int] = ()) -> None:
        """Post *message*, if the peer is still there; its pidfd tells when it has ended."""
        try:
            self.channel.post(message, fds)
        except PeerLostError:
            log.debug("node %d had ended before it could be sent %s", self.index, type(message).__name__)

    def map(self, message: PeerSegment, fd: int) -> Segment:
        """Map a segment that the peer shared (read-only) and return it; takes the descriptor over."""
        fds = [fd]
        try:
            mapped = _attach(self.index, fds, writable=False)
        finally:
            _close(fds)
        if message.segment in self.segments or mapped.nbytes < message.nbytes:
            nbytes = mapped.nbytes
            mapped.close()
            raise ProtocolError(f"node {self.index} shared segment {message.segment} twice, or with {nbytes} bytes "
                                f"instead of {message.nbytes}")
        self.segments[message.segment] = mapped
        return mapped

    def end_process(self, timeout_s: float) -> None:
        """Kill the peer's process, if it is alive, and wait until it has ended: then it writes nothing any more.

        Raises `PeerLostError` if it does not end within *timeout_s*.
        """
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        if not ended.poll(timeout_s * 1000):
            raise PeerLostError(f"node {self.index} is lost, but its process does not end within {timeout_s:g} s of "
                                "SIGKILL: it may still write into memory that is shared with this node")

    def close(self) -> None:
        """Unmap and close everything. Only after the engine has ended."""
        self.channel.close()
        os.close(self.pidfd)
        for segment in (self.incoming, self.outgoing, self.doorbell, *self.segments.values()):
            segment.close()
        self.segments.clear()


def connect(job_key: bytes, name: bytes, mine: int, peer: int, epoch: int, shm_endpoint: ShmEndpoint,
            timeout_s: float) -> ShmLink:
    """Share memory with node *peer*, whose socket is *name*; raises `BpsError` if that is impossible."""
    # The peer's socket was bound before it joined the job: without a listener now there will be none.
    link = channel.connect(name, 0.0, decode)
    link.frame_max_nbytes = PENDING_MAX_NBYTES
    pid = os.getpid()
    lane = None
    fds: list[int] = []
    try:
        check_user(link)
        proof = security.prove(job_key, *_proof_words("hello", mine, peer, epoch, pid))
        link.send(PeerHello(version=messages.VERSION, source=mine, target=peer, epoch=epoch, pid=pid, proof=proof),
                  timeout_s=timeout_s)
        answer, received = link.recv(timeout_s)
        fds += received
        if isinstance(answer, messages.Refuse):
            raise ProtocolError(answer.reason)
        if not isinstance(answer, PeerWelcome) or len(fds) != 3 or not security.verify(
            job_key, answer.proof, *_proof_words("welcome", peer, mine, epoch, answer.pid, pid)
        ):
            raise ProtocolError(f"process {link.peer[0]} behind node {peer}'s local socket did not prove the job key")
        link.frame_max_nbytes = channel.MAX_NBYTES
        lane = shm_endpoint.lane()
        link.send(PeerLane(), shm_endpoint.fds(lane), timeout_s)
        return complete(peer, link, lane, fds)
    except BaseException:
        _close(fds)
        if lane is not None:
            lane.close()
        link.close()
        raise


def check(job_key: bytes, hello: PeerHello, link: MessageSocket) -> None:
    """Raise `BpsError` unless *hello* comes from a process of this user that has the job's key."""
    check_user(link)
    words = _proof_words("hello", hello.source, hello.target, hello.epoch, hello.pid)
    if not security.verify(job_key, hello.proof, *words):
        raise ProtocolError(f"process {link.peer[0]} has another job key")


def welcome(job_key: bytes, hello: PeerHello, link: MessageSocket, mine: int, epochs: Epochs,
            shm_endpoint: ShmEndpoint) -> Segment:
    """Answer *hello* on *link* with a new lane and return that lane; `BpsError` if it is for another node or epoch.

    The connector's `PeerLane` completes the pair: pass it to `complete`.
    """
    check(job_key, hello, link)
    least = epochs.least_of(hello.source)
    if (hello.version, hello.target) != (messages.VERSION, mine) or hello.epoch < least:
        raise ProtocolError(f"this is node {mine} (version {messages.VERSION}, epoch {least} or later), not node "
                            f"{hello.target} (version {hello.version}, epoch {hello.epoch})")
    lane = shm_endpoint.lane()
    pid = os.getpid()
    words = _proof_words("welcome", mine, hello.source, hello.epoch, pid, hello.pid)
    link.post(PeerWelcome(pid=pid, proof=security.prove(job_key, *words)), shm_endpoint.fds(lane))
    return lane


def complete(index: int, link: MessageSocket, lane: Segment, fds: list[int]) -> ShmLink:
    """Return the established pair with node *index*, whose `PeerLane` brought *fds*; it takes out what it keeps.

    If this raises, the caller closes *link*, *lane* and what is left of *fds*.
    """
    if len(fds) != 3:
        raise ProtocolError(f"node {index} passed {len(fds)} descriptors instead of lane, doorbell and pidfd")
    with contextlib.ExitStack() as undo:
        outgoing = undo.enter_context(_attach(index, fds, writable=True))
        doorbell = undo.enter_context(_attach(index, fds, writable=True))
        undo.pop_all()
    return ShmLink(index, link, lane, outgoing, doorbell, fds.pop())


def _proof_words(kind: str, *numbers: int) -> list[str]:
    """Return what a proof of the job's key signs in a message of *kind*."""
    return [f"shm {kind}", *map(str, numbers)]


def _attach(index: int, fds: list[int], writable: bool) -> Segment:
    """Map the first of *fds*, from node *index*, and remove it from the list: the segment closes it."""
    try:
        segment = Segment.attach(fds[0], writable=writable)
    except OSError as exc:
        raise ProtocolError(f"node {index} passed a descriptor that cannot be mapped: {exc}") from exc
    del fds[0]
    return segment


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def check_user(link: MessageSocket) -> None:
    """Raise `ConfigError` unless the other end runs as this process's user, or as root."""
    pid, uid = link.peer
    if uid not in (os.getuid(), 0):
        raise ConfigError(f"process {pid} runs as user {uid}, this node as user {os.getuid()}: start both as one user")
