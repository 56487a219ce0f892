"""The interface of links that write into a peer's memory, and what tcp and RDMA links have in common."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from ...pyx import rdma, tcp
from ...pyx.dispatch import Dispatch
from ...pyx.engine import Engine

#: One queue of writes to a peer. Any thread may call `post`; the bytes stay where they are until EVENT_DELIVERED.
WireStream: TypeAlias = "tcp.Stream | rdma.Stream"


class WireLink(ABC):
    """A link over which bytes are written into the memory of node `index`: tcp or rdma.

    `bound`: the partitions that are expected from the peer: part -> address of even rounds, of odd rounds, bytes,
    n_streams, framed; see `bind`. `fenced`: whether `fence` was called.
    """

    kind: str
    is_encrypted = False
    index: int
    n_nodes: int
    bound: dict[int, tuple[int, int, int, int, bool]]
    fenced: bool
    streams: Sequence[WireStream]

    @abstractmethod
    def start(self, engine: Engine, source: int, link_number: int = 0) -> None:
        """Report arrivals to *engine* as those of *source*. Before anything is bound. Losses name *link_number*."""

    @abstractmethod
    def bind(self, part: int, even: int, odd: int, nbytes: int, n_streams: int = 0, framed: bool = False,
             first_round: int = 1) -> None:
        """Expect *part* from the peer, at addresses by the round's parity; `CapacityError` if that is impossible.

        Nothing of it may be under way; this replaces what was expected of it before. *first_round* comes next, and is
        awaited if the link ends before.

        *n_streams*: the number of tcp connections that its unit is sent over (0: as many as the setting says).
        *framed*: up to *nbytes* arrive each time; the first eight contain the number that follows.
        """

    @abstractmethod
    def unbind(self, part: int) -> None:
        """Expect nothing more of *part*: it was refused, or is retired and nothing of it is under way."""

    def route(self, dispatch: Dispatch, source: int) -> None:
        """Let *dispatch* post to these streams what goes to *source*. Once started."""
        dispatch.route(source, self.streams, n_nodes=self.n_nodes)

    @abstractmethod
    def fence(self) -> None:
        """End the link for good: nothing is written over it any more, in either direction, whatever the peer does.

        What waits to be sent is dropped, and `awaited` is final. Idempotent.
        """

    @property
    @abstractmethod
    def is_cut_off(self) -> bool:
        """Whether `fence` was called and it is certain that nothing arrives."""

    @abstractmethod
    def next_round(self, part: int) -> int:
        """Return the round of *part*, which is bound, that has not arrived whole."""

    @abstractmethod
    def why(self, code: int) -> str:
        """Return why the link was lost, as text; *code* is that of EVENT_LOST."""

    @abstractmethod
    def close(self) -> None:
        """Close everything. Before the engine is closed. Idempotent."""

    def awaited(self) -> dict[int, int]:
        """Return, of each part that is bound, the round that has not arrived, once fenced. Any thread."""
        return {part: self.next_round(part) for part in tuple(self.bound)}

    def counters(self) -> dict[str, int]:
        """Return what was written and received: the sums of the streams' counters."""
        total: Counter[str] = Counter()
        for stream in self.streams:
            total.update(stream.counters())
        return dict(total)

    def traces(self) -> list[bytes]:
        """Return the trace records of each stream."""
        return [stream.trace() for stream in self.streams]
