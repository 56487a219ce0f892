"""The clocks of a job's machines, brought to the scheduler's.

A rank reads its node's clock, and nodes with the same `clock_id` read the same one: what one of them found out
(`orchestration.clock_offset`) holds for the others. Machines that were cloned while they ran may have one id and two
clocks: nodes that contradict each other are not taken together.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...base.trace_file import Process
from ...base.trace_records import Span
from ...orchestration.clock_offset import Point, offset_at


class Clock(NamedTuple):
    """One clock of the job. Without `points` nothing is known of it but that it is the only one, or may be any."""

    points: tuple[Point, ...]

    def shift(self, span: Span) -> Span:
        """Return *span* by the scheduler's clock; its length stays."""
        if not self.points:
            return span
        offset_ns, _ = offset_at(self.points, span.begin_ns)
        return span._replace(begin_ns=span.begin_ns + offset_ns, end_ns=span.end_ns + offset_ns)

    def uncertainty_ns(self, spans: Sequence[Span]) -> int:
        """Return the largest uncertainty of *spans*."""
        if not self.points or not spans:
            return 0
        times = [min(span.begin_ns for span in spans), max(span.end_ns for span in spans)]
        times += [point.at_ns for point in self.points if times[0] < point.at_ns < times[1]]
        return max(offset_at(self.points, at_ns)[1] for at_ns in times)


class Clocks(NamedTuple):
    """`of` each process, in their order; `number` of different ones; those whose offset nobody knows are `unknown`."""

    of: list[Clock]
    number: int
    uncertainty_ns: int
    unknown: list[str]


def align(processes: Sequence[Process]) -> Clocks:
    """Find the clock of each of *processes*. If all have the same one, it needs no offset."""
    shared: dict[str, tuple[Point, ...]] = {}
    for process in processes:
        points = _points(process)
        if points and (process.clock_id not in shared or _best(points) < _best(shared[process.clock_id])):
            shared[process.clock_id] = points
    of_nodes = {process.node: _key(process, shared) for process in processes if process.rank < 0}
    keys = [of_nodes.get(process.node) or _key(process, shared) for process in processes]
    if len(set(keys)) <= 1:
        return Clocks([Clock(())] * len(processes), len(set(keys)), 0, [])
    clocks = [Clock(key[1]) for key in keys]
    return Clocks(clocks, len(set(keys)),
                  max(clock.uncertainty_ns(process.spans) for clock, process in zip(clocks, processes)),
                  [process.role for clock, process in zip(clocks, processes) if not clock.points])


def _key(process: Process, shared: dict[str, tuple[Point, ...]]) -> tuple[str, tuple[Point, ...]]:
    """Return what tells the clock of *process* from others, and its points."""
    group, points = shared.get(process.clock_id, ()), _points(process)
    if _contradict(points, group):
        return f"{process.clock_id} of node {process.node}", points
    return process.clock_id, group


def _contradict(some: tuple[Point, ...], others: tuple[Point, ...]) -> bool:
    for point in some:
        offset_ns, uncertainty_ns = offset_at(others, point.at_ns)
        if abs(offset_ns - point.offset_ns) > uncertainty_ns + point.uncertainty_ns:
            return True
    return False


def _points(process: Process) -> tuple[Point, ...]:
    return tuple(sorted(Point(*point) for point in process.clock))


def _best(points: tuple[Point, ...]) -> int:
    return min(point.uncertainty_ns for point in points)
