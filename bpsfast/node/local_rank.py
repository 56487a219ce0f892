"""The node's object for one rank of its machine: identity, lane (ring of announcements), input memory, channel."""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from ..base.message_socket import MessageSocket
from ..hardware.affinity.plan import CpuAffinity
from ..orchestration import messages
from ..orchestration.errors import BpsError, MismatchError, ProtocolError
from ..pyx import ring
from ..pyx.pages import Segment
from .regions import Arena, Chunk, Regions


def check_attach(message: messages.Attach, package: str, fingerprint: Mapping[str, str]) -> None:
    """Raise `MismatchError`, with field and both values, unless rank and node agree on version and settings."""
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
        raise MismatchError(f"local_rank: {who} claims to be one of {message.local_size}")


class LocalRank:
    """A rank that has attached. Owns its channel, pidfd, lane and arena of input memory."""

    def __init__(self, link: MessageSocket, message: messages.Attach, pidfd: int, regions: Regions) -> None:
        self.channel = link
        self.pidfd = pidfd
        self.pid = message.pid
        self.local_rank = message.local_rank
        self.rank = message.rank
        self.left = False
        self.lost = False  # the job goes on without it
        self.dead = False
        self.source = -1
        self.attach = message
        self.affinity = CpuAffinity()
        self.lane = Segment(ring.LANE_NBYTES, name="bpsfast-lane", huge=False)
        ring.format_lane(self.lane)
        self._inputs: Arena = regions.arena("input")
        self._results: set[tuple[int, int]] = set()
        self._channels: set[int] = set()

    @property
    def gone(self) -> bool:
        """Whether no message needs to be sent to this rank any more."""
        return self.left or self.dead

    def set_affinity(self, affinity: CpuAffinity) -> None:
        """Set where the rank runs, and where its inputs are allocated. Before it has any."""
        self.affinity = affinity
        if affinity.home is not None:
            self._inputs.home = affinity.home

    def describe(self) -> str:
        """Return how the rank is named in errors."""
        return f"rank {self.rank}" if self.rank >= 0 else f"local rank {self.local_rank}"

    def tell(self, message: messages.Message, fds: Sequence[int] = ()) -> None:
        """Post *message*, unless the rank's process has ended."""
        if not self.dead:
            try:
                self.channel.post(message, fds)
            except BpsError:
                self.dead = True  # its pidfd, or the end of its channel, is about to tell the loop

    def allocate(self, request: messages.Allocate, on_growth: Callable[[Chunk], None]) -> None:
        """Answer *request*; *on_growth* gets the segment that was made for it, if any. Raises `CapacityError`."""
        if request.nbytes <= 0:
            raise ProtocolError(f"{self.describe()} asked for {request.nbytes} bytes of input memory")
        place, fresh = self._inputs.allocate(request.nbytes)
        if fresh is not None:
            on_growth(fresh)  # first: the rank may push from it as soon as it has the answer
            self.tell(messages.SegmentShared(owner="rank", segment=fresh.index, nbytes=fresh.segment.nbytes),
                      [fresh.segment.fileno()])
        self.tell(messages.Allocated(request=request.request, segment=place.segment, offset=place.offset))

    def address_of(self, segment: int, offset: int, nbytes: int) -> int:
        """Return the address of these bytes of its input memory; `ProtocolError` if there are none."""
        for chunk in self._inputs.chunks:
            if chunk.index == segment and 0 <= offset <= offset + nbytes <= chunk.segment.nbytes:
                return chunk.segment.address + offset
        raise ProtocolError(f"{self.describe()} has no input memory of {nbytes} bytes at {offset} of segment {segment}")

    def share_result(self, node: int, number: int, segment: Segment) -> None:
        """Share segment *number* of node *node*'s results with the rank, once."""
        if (node, number) not in self._results:
            self._results.add((node, number))
            # The rank maps it read-only; the descriptor would allow writing, which only harms this user's own job.
            self.tell(messages.SegmentShared(owner=f"result:{node}", segment=number, nbytes=segment.nbytes),
                      [segment.fileno()])

    def share_channels(self, number: int, segment: Segment) -> None:
        """Share segment *number*, in which the ranks of this machine sum directly, with the rank, once."""
        if number not in self._channels:
            self._channels.add(number)
            self.tell(messages.SegmentShared(owner="channel", segment=number, nbytes=segment.nbytes),
                      [segment.fileno()])

    def close(self) -> None:
        """Close channel, pidfd and lane. Only after the engine has ended."""
        self.channel.close()
        os.close(self.pidfd)
        self.lane.close()
