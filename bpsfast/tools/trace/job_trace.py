"""The trace of a job: all process files on one clock, with arrows and priority inversions.

A rank reads its node's clock, and nodes with the same `clock_id` read the same one, so an offset measured by one of
them (`orchestration.clock_offset`) holds for the others. Machines cloned while running may share an id but not a clock:
nodes that contradict each other are kept apart.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...base import trace_file
from ...base.trace_file import Process
from ...base.trace_records import Part, Span
from ...orchestration.clock_offset import Point, offset_at
from ...orchestration.errors import ConfigError
from . import flows, inversions as urgency


class Clock(NamedTuple):
    """A clock of the job. Without `points` its offset is zero or unknown."""

    points: tuple[Point, ...]

    def shift(self, span: Span) -> Span:
        """Return *span* on the scheduler's clock."""
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
    """The clocks of processes, in order; the `number` of different ones; processes with `unknown` offset."""

    of: list[Clock]
    number: int
    uncertainty_ns: int
    unknown: list[str]


def align(processes: Sequence[Process]) -> Clocks:
    """Find the clock of each of *processes*. A single clock needs no offset."""
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
    """Return a key of the clock of *process*, and its points."""
    group, points = shared.get(process.clock_id, ()), _points(process)
    if _contradict(points, group):
        return f"{process.clock_id} of node {process.node}", points
    return process.clock_id, group


def _contradict(some: tuple[Point, ...], others: tuple[Point, ...]) -> bool:
    """Tell whether an offset of *some* differs from that of *others* by more than both are uncertain."""
    found = [(point, offset_at(others, point.at_ns)) for point in some]
    return any(abs(offset_ns - point.offset_ns) > uncertainty_ns + point.uncertainty_ns
               for point, (offset_ns, uncertainty_ns) in found)


def _points(process: Process) -> tuple[Point, ...]:
    return tuple(sorted(Point(*point) for point in process.clock))


def _best(points: tuple[Point, ...]) -> int:
    return min(point.uncertainty_ns for point in points)

FORMAT = "bpsfast trace 1"
#: What a merged trace keeps of each process, besides its spans.
_KEPT = ("role", "node", "rank", "full", "credit_nbytes")


class Job(NamedTuple):
    """The processes of a job, nodes first, with spans on the scheduler's clock; the names of all partitions."""

    processes: list[Process]
    clocks: Clocks
    parts: dict[int, Part]


def merge(folder: str | Path, out_path: str | Path) -> int:
    """Merge all process files of *folder* into one trace at *out_path* and return its number of events.

    The first moment of the job is time 0. All spans are held in memory at once. Raises `ConfigError` if *folder* has no
    trace, or a file that cannot be read or is not a bpsfast trace.
    """
    return dump(load(folder), out_path)


def load(folder: str | Path) -> Job:
    """Read all process files of *folder* and align their clocks. Raises as `merge`."""
    paths = sorted(Path(folder).glob(trace_file.PATTERN))
    if not paths:
        raise ConfigError(f"no {trace_file.PATTERN} in {folder}: run the job with BPSFAST_TRACE_DIR set on all "
                          "machines, and copy their files to this folder")
    processes = [trace_file.read(path) for path in paths]
    who: dict[tuple[int, int], Path] = {}
    for process, path in zip(processes, paths):
        other = who.setdefault((process.node, process.rank), path)
        if other is not path:
            raise ConfigError(f"{other.name} and {path.name} in {folder} are both of {process.role}: the folder has "
                              "traces of two jobs; use one folder per job")
    processes.sort(key=lambda process: (process.rank >= 0, process.rank, process.node, process.path))
    clocks = align(processes)
    for process, its_clock in zip(processes, clocks.of):
        process.spans = [its_clock.shift(span) for span in process.spans]
    return Job(processes, clocks, _parts(processes))


def _parts(processes: list[Process]) -> dict[int, Part]:
    """Combine what processes know of partitions: nodes know the urgency, ranks know names that no node traced."""
    found: dict[int, Part] = {}
    for process in processes:
        for number, row in process.parts.items():
            part = Part(*row)
            if number not in found or found[number].urgency < 0:
                found[number] = part
    return found


def dump(job: Job, out_path: str | Path) -> int:
    """Write *job* to *out_path*; return the number of events."""
    base_ns = min((span.begin_ns for process in job.processes for span in process.spans), default=0)
    placed: list[tuple[Process, trace_file.Slice]] = []
    titles: list[dict[str, Any]] = []
    for pid, process in enumerate(job.processes, start=1):
        slices, rows = trace_file.place(process.spans, pid)
        placed += [(process, slice_) for slice_ in slices]
        titles += trace_file.titles(pid, process.role, rows)
    found = list(trace_file.events((slice_ for _, slice_ in placed), job.parts, base_ns, full=True))
    arrows = flows.arrows(placed, job.parts, base_ns)
    examined = urgency.examine((process, process.spans) for process in job.processes)
    found += [*arrows.events, *_marks(job, examined.inversions, base_ns)]
    return trace_file.dump(Path(out_path), [*titles, *trace_file.in_order(found)], {
        "format": FORMAT, "clocks": job.clocks.number,
        "clock_uncertainty_us": trace_file.micros(job.clocks.uncertainty_ns),
        "clock_unknown": job.clocks.unknown, "arrows": arrows.drawn, "arrows_left_out": arrows.impossible,
        "inversions": len(examined.inversions),
        "processes": [{name: getattr(process, name) for name in _KEPT} for process in job.processes],
        "parts": job.parts})


def _marks(job: Job, inversions: list[urgency.Inversion], base_ns: int) -> Iterator[dict[str, Any]]:
    pids = {process.node: pid for pid, process in enumerate(job.processes, start=1) if process.rank < 0}
    for each in inversions:
        urgent, by = (job.parts[span.key[0]].title if span.key[0] in job.parts else f"part {span.key[0]}"
                      for span in (each.urgent, each.by))
        yield {"name": f"priority inversion: {urgent} waits, {by} leaves", "cat": "inversion", "ph": "i", "s": "p",
               "pid": pids[each.node], "tid": 0, "ts": trace_file.micros(each.at_ns - base_ns),
               "args": {"urgent": urgent, "by": by, "peer": each.peer, "ahead_nbytes": each.ahead_nbytes,
                        "round": each.urgent.args["round"]}}


def reload(path: Path) -> Job:
    """Return the job that `dump` wrote to *path*; raise `ConfigError` if it is not a complete trace of bpsfast."""
    document = trace_file.decode(path)
    try:
        other = document["otherData"]
        if other["format"] != FORMAT:
            raise ValueError(f"its format is {other['format']!r}, expected {FORMAT!r}")
        by_pid: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for event in document["traceEvents"]:
            by_pid[event["pid"]].append(event)
        spans = {pid: list(trace_file.spans_of(events, 0)) for pid, events in by_pid.items()}
        processes = [Process(format=trace_file.FORMAT, pid=pid, base_ns=0, clock=(), clock_id="", parts={},
                             spans=spans.get(pid, []), path=str(path), **{name: row[name] for name in _KEPT})
                     for pid, row in enumerate(other["processes"], start=1)]
        clocks = Clocks([], other["clocks"], round(other["clock_uncertainty_us"] * 1000), other["clock_unknown"])
        return Job(processes, clocks, {int(number): Part(*row) for number, row in other["parts"].items()})
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ConfigError(f"{path} is not a trace of bpsfast: {trace_file.words(exc)}; give a folder of process "
                          "files, or what `bpsfast trace merge` made of one") from exc
