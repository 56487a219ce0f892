"""One trainer process as its node sees it: who it is, its lane and input memory, what it was told."""
from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Mapping, Sequence

from ..base import message_socket
from ..base.message_socket import MessageSocket
from ..hardware.affinity.plan import CpuAffinity
from ..orchestration import messages
from ..orchestration.errors import BpsError, ConfigError, MismatchError, ProtocolError
from ..pyx import ring
from ..pyx.pages import Segment
from .regions import Arena, Chunk, Regions


def check_user(link: MessageSocket) -> None:
    """Raise `ConfigError` unless the other end runs as this process's user, or as root."""
    pid, uid = link.peer
    if uid not in (os.getuid(), 0):
        raise ConfigError(f"process {pid} runs as user {uid}, this node as user {os.getuid()}: start both as one user")


def check_proof(job_key: bytes, pid: int, local_rank: int, proof: bytes) -> None:
    """Raise `ConfigError` unless *proof* shows that process *pid* has the job's key."""
    if not hmac.compare_digest(proof, message_socket.attach_proof(job_key, pid, local_rank)):
        raise ConfigError(f"process {pid} has another job key than this node: give all roles the same BPSFAST_JOB_KEY")


def check_attach(message: messages.Attach, package: str, fingerprint: Mapping[str, str]) -> None:
    """Raise `MismatchError` naming the field and both values unless rank and node agree on version and settings."""
    who = f"local rank {message.local_rank} (process {message.pid})"
    if message.version != messages.VERSION:
        raise MismatchError(f"protocol version: {who} has {message.version}, its node has {messages.VERSION}")
    if message.package != package:
        raise MismatchError(f"package version: {who} runs bpsfast {message.package}, its node {package}")
    for name in sorted(set(message.settings) | set(fingerprint)):
        theirs, ours = message.settings.get(name), fingerprint.get(name)
        if theirs != ours:
            raise MismatchError(f"setting {name}: {who} has {theirs!r}, its node has {ours!r}")
    if not 0 <= message.local_rank < message.local_size:
        raise MismatchError(f"local_rank: {who} says it is one of {message.local_size}")


class LocalRank:
    """A rank that has attached. Owns its channel, its pidfd, its lane and its arena of input memory."""

    def __init__(self, link: MessageSocket, message: messages.Attach, pidfd: int, regions: Regions) -> None:
        self.channel = link
        self.pidfd = pidfd
        self.pid = message.pid
        self.local_rank = message.local_rank
        self.rank = message.rank
        self.left = False
        self.dead = False
        self.source = -1
        self.came = message
        self.seat = CpuAffinity()
        self.lane = Segment(ring.LANE_NBYTES, name="bpsfast-lane", huge=False)
        ring.format_lane(self.lane)
        self._inputs: Arena = regions.arena("input")
        self._results: set[tuple[int, int]] = set()

    @property
    def gone(self) -> bool:
        """Whether nothing needs to be told to this rank any more."""
        return self.left or self.dead

    def take(self, seat: CpuAffinity) -> None:
        """Have the rank told where to run, and its inputs put there. Before it has any."""
        self.seat = seat
        if seat.home is not None:
            self._inputs.home = seat.home

    def describe(self) -> str:
        """Return how the rank is named in errors."""
        return f"rank {self.rank}" if self.rank >= 0 else f"local rank {self.local_rank}"

    def tell(self, message: messages.Message, fds: Sequence[int] = ()) -> None:
        """Post *message*; a rank that is gone is not told."""
        if not self.dead:
            try:
                self.channel.post(message, fds)
            except BpsError:
                self.dead = True  # its pidfd, or the end of its channel, says so in a moment

    def allocate(self, request: messages.Allocate, on_growth: Callable[[Chunk], None]) -> None:
        """Answer *request*; *on_growth* gets the chunk that was made for it, if one was. Raises `CapacityError`."""
        if request.nbytes <= 0:
            raise ProtocolError(f"{self.describe()} asked for {request.nbytes} bytes of input memory")
        place, fresh = self._inputs.allocate(request.nbytes)
        if fresh is not None:
            on_growth(fresh)  # first: the rank may push from it as soon as it has the answer
            self.tell(messages.SegmentShared(owner="rank", segment=fresh.index, nbytes=fresh.segment.nbytes),
                      [fresh.segment.fileno()])
        self.tell(messages.Allocated(request=request.request, segment=place.segment, offset=place.offset))

    def address_of(self, segment: int, offset: int, nbytes: int) -> int:
        """Return where these bytes of its input memory lie here; raise `ProtocolError` if they do not."""
        for chunk in self._inputs.chunks:
            if chunk.index == segment and 0 <= offset <= offset + nbytes <= chunk.segment.nbytes:
                return chunk.segment.address + offset
        raise ProtocolError(f"{self.describe()} has no input memory of {nbytes} bytes at {offset} of segment {segment}")

    def share_result(self, node: int, number: int, segment: Segment) -> None:
        """Pass on segment *number* of node *node*'s results, unless the rank has it."""
        if (node, number) not in self._results:
            self._results.add((node, number))
            # Its own read-only mapping is the rank's business: the descriptor itself could map it writable, which
            # only harms the ranks of this user's own job.
            self.tell(messages.SegmentShared(owner=f"result:{node}", segment=number, nbytes=segment.nbytes),
                      [segment.fileno()])

    def close(self) -> None:
        """Close channel, pidfd and lane. Only after the engine has ended."""
        self.channel.close()
        os.close(self.pidfd)
        self.lane.close()
