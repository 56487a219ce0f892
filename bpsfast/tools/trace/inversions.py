"""Priority inversions in a job's trace: bytes of less urgent writes that went ahead of each write to a peer.

Bytes in flight to a peer when an urgent write is ready cannot be recalled: at most one window of credit
(`credit_queue`), or one partition if that is larger. An urgent write waits for no other less urgent bytes. A write that
leaves while a more urgent one of the same pass has already waited for more than such a window is a *priority
inversion*.
"""
from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from ...base.trace_file import Process
from ...base.trace_records import CREDIT, Span

_DELIVERED, _READY, _LEFT = range(3)


class Write(NamedTuple):
    """One write to one peer: when it was ready, left and was delivered; a lower `order` in its pass is more urgent."""

    order: int
    ready_ns: int
    left_ns: int
    delivered_ns: int
    nbytes: int
    pass_: int
    span: Span

    @property
    def rank(self) -> tuple[int, int]:
        """The priority among all waiting writes."""
        return self.pass_, self.order


class Inversion(NamedTuple):
    """From `node` to `peer`, `by` left at `at_ns` while `urgent` (in one only) waited behind `ahead_nbytes`."""

    node: int
    peer: int
    at_ns: int
    urgent: Span
    by: Span
    ahead_nbytes: int


class Urgency(NamedTuple):
    """Of all writes: the most bytes that went ahead of a more urgent one (`most`), and the credit window."""

    writes: int
    most_nbytes: int
    most: Span | None
    window_nbytes: int
    inversions: list[Inversion]


def examine(processes: Iterable[tuple[Process, Iterable[Span]]]) -> Urgency:
    """Examine the spans of all nodes."""
    n_writes = most_nbytes = window_nbytes = 0
    most: Span | None = None
    inversions: list[Inversion] = []
    for process, spans in processes:
        if process.rank >= 0:
            continue
        for peer, writes in _by_peer(spans).items():
            n_writes += len(writes)
            window_nbytes = max([window_nbytes, process.credit_nbytes, *(write.nbytes for write in writes)])
            ahead, found = _examine(process, peer, writes)
            inversions += found
            for write, nbytes in zip(writes, ahead):
                if nbytes > most_nbytes:
                    most_nbytes, most = nbytes, write.span
    inversions.sort(key=lambda each: each.at_ns)
    return Urgency(n_writes, most_nbytes, most, window_nbytes, inversions)


def _by_peer(spans: Iterable[Span]) -> dict[int, list[Write]]:
    sends: dict[int, list[Span]] = defaultdict(list)
    delivered: dict[tuple[int, tuple[int, int]], int] = {}
    for span in spans:
        if span.kind == CREDIT:
            sends[span.args["peer"]].append(span)
        elif span.kind == "wire":
            delivered[span.args["peer"], span.key] = span.end_ns
    return {peer: [Write(span.args["order"], span.begin_ns, span.end_ns,
                         max(span.end_ns, delivered.get((peer, span.key), span.end_ns)), span.args["nbytes"],
                         span.args["pass"], span) for span in found]
            for peer, found in sends.items()}


def _examine(process: Process, peer: int, writes: list[Write]) -> tuple[list[int], list[Inversion]]:
    """Replay *writes* in order of time; return the bytes ahead of each, and the inversions."""
    moments = sorted((at_ns, what, i) for i, write in enumerate(writes) for what, at_ns in (
        (_READY, write.ready_ns), (_LEFT, write.left_ns), (_DELIVERED, write.delivered_ns)))
    ahead = [0] * len(writes)
    inversions: list[Inversion] = []
    waiting: list[tuple[tuple[int, int], int]] = []
    under_way: set[int] = set()
    gone: set[int] = set()
    inverted: set[int] = set()
    for at_ns, what, i in moments:
        write = writes[i]
        if what == _READY:
            ahead[i] = sum(writes[k].nbytes for k in under_way
                           if writes[k].pass_ == write.pass_ and writes[k].order > write.order)
            insort(waiting, (write.rank, i))
        elif what == _DELIVERED:
            under_way.discard(i)
            gone.add(i)
        else:
            del waiting[bisect_left(waiting, (write.rank, i))]
            first = bisect_left(waiting, ((write.pass_, -1), -1))
            for _, k in waiting[first:bisect_left(waiting, (write.rank, -1))]:
                ahead[k] += write.nbytes
                if ahead[k] > max(process.credit_nbytes, write.nbytes) and k not in inverted:
                    inverted.add(k)
                    inversions.append(Inversion(process.node, peer, at_ns, writes[k].span, write.span, ahead[k]))
            if i not in gone:
                under_way.add(i)
    return ahead, inversions
