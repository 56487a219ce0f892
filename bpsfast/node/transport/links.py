"""The interface of links between nodes, common to all transports."""
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
    """A link over which bytes are written into the peer's memory: tcp or rdma."""

    index: int
    kind: str
    #: The partitions that are expected from the peer: see `RdmaLink`.
    bound: dict[int, tuple[int, int, int, int, bool]]

    def start(self, engine: Engine, source: int) -> None:
        """Report arrivals to *engine* as those of *source*. Before anything is bound."""

    def bind(self, part: int, even: int, odd: int, nbytes: int, n_streams: int = 0, framed: bool = False,
             first_round: int = 1) -> None:
        """Expect *part* from the peer, at addresses by the round's parity; `CapacityError` if that is impossible.

        Nothing of it may be under way; this replaces what was expected of it before. *first_round* comes next.

        *n_streams*: the tcp connections that its unit takes turns on (0: as many as the setting says). *framed*: up to
        *nbytes* arrive each time; the first eight contain the number that follows.
        """

    def unbind(self, part: int) -> None:
        """Expect nothing more of *part*: it was refused, or is retired and nothing of it is under way."""

    def stream_of(self, part: int) -> WireStream:
        """Return the stream of *part*, always the same one, on both sides."""

    def fence(self) -> None:
        """End the link for good: nothing is written over it any more, in either direction, whatever the peer does."""

    @property
    def is_cut_off(self) -> bool:
        """Whether `fence` was called and it is certain that nothing arrives."""

    def next_round(self, part: int) -> int:
        """Return the round of *part*, which is bound, that has not arrived whole."""

    def awaited(self) -> dict[int, int]:
        """Return, of each part that is bound, the round that has not arrived, once fenced. Any thread."""

    def why(self, code: int) -> str:
        """Return why the link was lost, as text; *code* is that of EVENT_LOST."""

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
