"""Arrows in a job's trace from an input of a round through its sums to the result.

    a rank's copy (or push) -> its node's sum -> arrival at the owner -> the owner's sum -> arrival -> delivery, or wait

An arrow skips steps that did not happen, such as arrivals between nodes that share memory. Each arrow is a flow of its
own between slices: a flow event is bound to the slice around it, and asynchronous events cannot carry one.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...base.trace_file import Process, Slice, micros
from ...base.trace_records import Part

_NAME = "gradient"


class Arrows(NamedTuple):
    """The flow `events` of `drawn` arrows; `impossible` ones would point back in time."""

    events: list[dict[str, Any]]
    drawn: int
    impossible: int


class _Round:
    """The slices of one round of one partition."""

    def __init__(self) -> None:
        self.inputs: dict[int, Slice] = {}  # by rank
        self.sums: dict[int, Slice] = {}  # by node
        self.arrivals: dict[tuple[int, int], Slice] = {}  # (from, to)
        self.ends: dict[int, Slice] = {}  # by rank

    def take(self, process: Process, slice_: Slice) -> None:
        """Add one slice."""
        kind = slice_.span.kind
        if kind in ("copy", "push") and process.rank >= 0:
            self.inputs[process.rank] = slice_
        elif kind == "sum" and process.rank < 0:
            self.sums[process.node] = slice_
        elif kind == "receive" and process.rank < 0:
            self.arrivals[slice_.span.args.get("peer", -1), process.node] = slice_
        elif process.rank >= 0 and (kind == "deliver" or (kind == "wait" and process.rank not in self.ends)):
            self.ends[process.rank] = slice_

    def pairs(self, owner: int, node_of: Mapping[int, int]) -> Iterator[tuple[Slice, Slice]]:
        """Yield the pairs of slices that arrows connect."""
        result = self.sums.get(owner)
        for rank, given in self.inputs.items():
            node = node_of[rank]
            yield from _joined(given, self.sums.get(node) or self.arrivals.get((node, owner)) or result)
        for node, partial in self.sums.items():
            if node != owner:
                yield from _joined(partial, self.arrivals.get((node, owner)) or result)
        for (origin, to), arrival in self.arrivals.items():
            if to == owner:
                yield from _joined(arrival, result)
            elif origin == owner:
                yield from _joined(result, arrival)
        for rank, taken in self.ends.items():
            yield from _joined(self.arrivals.get((owner, node_of[rank])) or result, taken)


def _joined(begin: Slice | None, end: Slice | None) -> Iterator[tuple[Slice, Slice]]:
    if begin is not None and end is not None:
        yield begin, end


def arrows(placed: Sequence[tuple[Process, Slice]], parts: Mapping[int, Part], base_ns: int) -> Arrows:
    """Return the arrows between the slices in *placed*, *base_ns* being time 0."""
    rounds: dict[tuple[int, int], _Round] = defaultdict(_Round)
    for process, slice_ in placed:
        if slice_.tid:
            _, round_ = slice_.span.key
            for number in slice_.span.covered:
                if number in parts:
                    rounds[number, round_].take(process, slice_)
    node_of = {process.rank: process.node for process, _ in placed if process.rank >= 0}
    found: list[dict[str, Any]] = []
    drawn = impossible = 0
    for (number, _), each in rounds.items():
        for begin, end in each.pairs(parts[number].owner, node_of):
            if begin.span.begin_ns > end.span.end_ns:
                impossible += 1
                continue
            drawn += 1
            bound_ns = max(begin.span.begin_ns, end.span.begin_ns)
            for slice_, at_ns, phase in ((begin, begin.span.begin_ns, {"ph": "s"}), (end, bound_ns, _FINISH)):
                found.append({"name": _NAME, "cat": "flow", "id": drawn, "pid": slice_.pid, "tid": slice_.tid,
                              "ts": micros(at_ns - base_ns), **phase})
    return Arrows(found, drawn, impossible)


#: "bp" binds to the slice around it instead of the next slice.
_FINISH = {"ph": "f", "bp": "e"}
