"""What nodes use of a link, whichever transport it is."""
from __future__ import annotations

from typing import Protocol

from ...pyx.engine import Engine
from . import rdma, shm, tcp

Link = shm.ShmLink | tcp.TcpLink | rdma.RdmaLink


class WireStream(Protocol):
    """One queue of writes to a peer (`bpsfast.pyx.tcp.Stream`, `bpsfast.pyx.rdma.Lane`). `post`: any thread."""

    def post(self, slot: int, round: int, flags: int, address: int, nbytes: int) -> None:
        """Write into the peer's *slot*; the bytes stay where they are until EVENT_DELIVERED."""


class WireLink(Protocol):
    """A link over which bytes are written into the peer's memory: what nodes use of tcp and rdma alike."""

    index: int
    kind: str
    #: What is expected from the peer: see `RdmaLink`.
    bound: dict[int, tuple[int, int, int, int, bool]]

    def start(self, engine: Engine, source: int) -> None:
        """Let *engine* take arrivals as those of *source*. Before anything is bound."""

    def bind(self, part: int, even: int, odd: int, nbytes: int, n_streams: int = 0, framed: bool = False,
             first_round: int = 1) -> None:
        """Expect *part* from the peer, at addresses by the round's parity; `CapacityError` if that cannot be.

        Nothing of it may be under way; what was expected of it before is not any more. *first_round*: what comes next.

        *n_streams*: the connections that its unit takes turns on, if it goes by tcp (0: as many as the setting says).
        *framed*: up to *nbytes* come each time, the first eight of which say how many follow.
        """

    def unbind(self, part: int) -> None:
        """Expect nothing more of *part*: it was refused, or is retired and nothing of it is under way."""

    def stream_of(self, part: int) -> WireStream:
        """Return the lane that *part* takes, always the same one, on both sides."""

    def fence(self) -> None:
        """End it for good: nothing is written over it any more, in either direction, whatever the peer does."""

    @property
    def sealed(self) -> bool:
        """Whether `fence` was called and it is certain that nothing arrives."""

    def next_round(self, part: int) -> int:
        """Return the round of *part*, which is bound, that has not arrived whole."""

    def awaited(self) -> dict[int, int]:
        """Return, of each part that is bound, the round that has not arrived, once fenced. Any thread."""

    def why(self, code: int) -> str:
        """Return in words why the link was lost; *code* is that of EVENT_LOST."""

    def counters(self) -> dict[str, int]:
        """Return what was written and received."""

    def traces(self) -> list[bytes]:
        """Return the trace records (`record.h`) of each connection."""

    def close(self) -> None:
        """Close everything. Before the engine is closed. Idempotent."""


#: Links with a channel for messages of the control loops.
TalkingLink = shm.ShmLink | rdma.RdmaLink


def wire(link: Link | None) -> WireLink | None:
    """Return *link* if bytes are written over it, None if memory is shared or there is none."""
    return link if link is not None and not isinstance(link, shm.ShmLink) else None


def talking(link: Link) -> TalkingLink | None:
    """Return *link* if it has a channel."""
    return link if not isinstance(link, tcp.TcpLink) else None
