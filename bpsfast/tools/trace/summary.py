"""Summary of a trace: where the time of a step went in the mean of the ranks, busiest links and nodes, inversions.

A rank's step is computing, copying and waiting. The cause of a wait is what happened meanwhile to the same round of the
same partition on any node: the first kind in `CAUSES`.
"""
from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ...base.trace_file import Process
from ...base.trace_records import CREDIT, Span, printable
from . import inversions as urgency
from .job_trace import Job

#: Causes of waits: kinds of spans, the most specific first; "inputs" that other ranks have not pushed come last.
CAUSES = {"sum": "sums", "wire": "the wire", CREDIT: "credit or more urgent writes", "queue": "a free summing thread",
          "gather": "inputs of others"}
_REST = "other"
_COPIES = ("copy", "push", "deliver")

Times = list[tuple[int, int]]


class Work(NamedTuple):
    """Busy time and bytes per step of a link or node."""

    title: str
    busy_s: float
    nbytes: float


class Summary(NamedTuple):
    """Seconds per step, as means over ranks. `waiting` by cause; `tensors`: waits; longest first."""

    ranks: int
    steps: float
    step_s: float
    compute_s: float
    copy_s: float
    wait_s: float
    waiting: dict[str, float]
    tensors: dict[str, float]
    links: list[Work]
    nodes: list[Work]
    urgency: urgency.Urgency
    job: Job

    def data(self) -> dict[str, Any]:
        """Return the JSON data."""
        most = self.urgency.most
        return {
            "ranks": self.ranks, "steps": self.steps, "step_s": self.step_s, "compute_s": self.compute_s,
            "copy_s": self.copy_s, "wait_s": self.wait_s, "waiting_s": self.waiting,
            "waiting_for_tensors_s": self.tensors,
            "links": [work._asdict() for work in self.links], "nodes": [work._asdict() for work in self.nodes],
            "inversions": len(self.urgency.inversions), "writes": self.urgency.writes,
            "less_urgent_ahead_nbytes": self.urgency.most_nbytes, "credit_window_nbytes": self.urgency.window_nbytes,
            "most_delayed": title(self.job, most) if most is not None else None,
            "clocks": self.job.clocks.number, "clock_uncertainty_s": self.job.clocks.uncertainty_ns * 1e-9,
            "clock_unknown": self.job.clocks.unknown,
            "full": [process.role for process in self.job.processes if process.full],
        }

    def lines(self) -> list[str]:
        """Return the summary as five lines."""
        return [_step(self), _waiting(self), _slowest(self), _urgent(self), self.clocks_line]

    @property
    def clocks_line(self) -> str:
        """How well the clocks agree, and whose records were dropped."""
        clocks, processes = self.job.clocks, self.job.processes
        text = f"clocks: {len(processes)} processes on {clocks.number} clock{'s' if clocks.number != 1 else ''}"
        if clocks.number > 1:
            text += f", known to {clocks.uncertainty_ns / 1e3:.3g} us"
        if clocks.unknown:
            text += f"; unknown clock of {', '.join(clocks.unknown)}"
        if full := [process.role for process in processes if process.full]:
            text += (f"; records dropped on {', '.join(full)}: set trace_capacity, or trace_first_step and "
                     "trace_last_step")
        return text


def summarise(job: Job) -> Summary:
    """Summarize *job*."""
    rounds = _rounds(job)
    ranks = [process for process in job.processes if process.rank >= 0 and process.spans]
    of_ranks = [_of_rank(process, job, rounds) for process in ranks]
    n = len(of_ranks) or 1
    steps = sum(each.steps for each in of_ranks) / n

    def mean(values: Iterable[float]) -> float:
        return sum(values) / n * 1e-9

    waiting = {cause: mean(each.waiting.get(cause, 0.0) for each in of_ranks) for cause in (*CAUSES.values(), _REST)}
    tensors = {name: mean(each.tensors.get(name, 0.0) for each in of_ranks)
               for name in sorted({name for each in of_ranks for name in each.tensors})}
    step, copy, wait = (mean(getattr(each, name) for each in of_ranks) for name in ("step_ns", "copy_ns", "wait_ns"))
    links, nodes = _works(job, max(1.0, _traced_steps(job)))
    return Summary(len(ranks), steps, step, step - copy - wait, copy, wait, waiting,
                   dict(sorted(tensors.items(), key=lambda item: -item[1])), links, nodes,
                   urgency.examine((process, process.spans) for process in job.processes), job)


class _Rank(NamedTuple):
    """The times of one rank in nanoseconds per step."""

    steps: int
    step_ns: float
    copy_ns: float
    wait_ns: float
    waiting: Mapping[str, float]
    tensors: Mapping[str, float]


def _of_rank(process: Process, job: Job, rounds: Mapping[tuple[int, int], list[tuple[int, Span]]]) -> _Rank:
    begin_ns, end_ns, steps = _window(process.spans)
    inside = [(max(span.begin_ns, begin_ns), min(span.end_ns, end_ns), span) for span in process.spans
              if span.begin_ns < end_ns and span.end_ns > begin_ns]
    copies = union((a, b) for a, b, span in inside if span.kind in _COPIES)
    wait_ns = 0
    waiting: dict[str, float] = defaultdict(float)
    tensors: dict[str, float] = defaultdict(float)
    seen_ns = begin_ns
    waits = sorted((each for each in inside if each[2].kind in ("wait", "direct")), key=lambda each: each[:2])
    for a, b, span in waits:
        left = without([(max(a, seen_ns), b)], copies)  # if two threads wait at once, the first one counts
        seen_ns = max(seen_ns, b)
        wait_ns += length(left)
        tensors[_tensor(job, span)] += length(left) / steps
        happened = rounds.get(span.key, [])
        for kind, cause in CAUSES.items():
            rest = without(left, union((other.begin_ns, other.end_ns) for node, other in happened
                                       if other.kind == kind and _concerns(process, job, node, other)))
            waiting[cause] += (length(left) - length(rest)) / steps
            left = rest
        waiting[_REST] += length(left) / steps
    return _Rank(steps, (end_ns - begin_ns) / steps, length(copies) / steps, wait_ns / steps, waiting, tensors)


def _window(spans: list[Span]) -> tuple[int, int, int]:
    """Return begin, end and number of steps between inputs of the most pushed partition; of one step, all time."""
    given: dict[int, dict[int, int]] = defaultdict(dict)
    for span in spans:
        if span.kind in ("copy", "push", "direct"):
            part, round_ = span.key
            given[part][round_] = min(span.begin_ns, given[part].get(round_, span.begin_ns))
    moments = max((sorted(by_round.values()) for by_round in given.values()), key=lambda m: (len(m), -m[0]), default=[])
    if len(moments) > 1 and moments[0] < moments[-1]:
        return moments[0], moments[-1], len(moments) - 1
    begin_ns, end_ns = min(span.begin_ns for span in spans), max(span.end_ns for span in spans)
    return begin_ns, max(end_ns, begin_ns + 1), 1


def _concerns(process: Process, job: Job, node: int, span: Span) -> bool:
    """Tell whether *span* of *node* delays the result of *process*; results for other nodes do not."""
    if span.kind not in ("wire", CREDIT):
        return True
    part = job.parts.get(span.key[0])
    return part is None or node != part.owner or span.args["peer"] == process.node


def _rounds(job: Job) -> dict[tuple[int, int], list[tuple[int, Span]]]:
    found: dict[tuple[int, int], list[tuple[int, Span]]] = defaultdict(list)
    for process in job.processes:
        if process.rank < 0:
            for span in process.spans:
                found[span.key].append((process.node, span))
    return found


def _traced_steps(job: Job) -> float:
    """Return the rounds of the most summed partition."""
    rounds: dict[int, set[int]] = defaultdict(set)
    for process in job.processes:
        for span in process.spans:
            part, round_ = span.key
            rounds[part].add(round_)
    return max((len(found) for found in rounds.values()), default=0)


def _works(job: Job, steps: float) -> tuple[list[Work], list[Work]]:
    links: list[Work] = []
    nodes: list[Work] = []
    for process in job.processes:
        if process.rank < 0:
            sent: dict[int, list[Span]] = defaultdict(list)
            for span in process.spans:
                if span.kind == "wire":
                    sent[span.args["peer"]].append(span)
            nodes.append(_work(process.role, [span for span in process.spans if span.kind == "sum"], steps))
            links += [_work(f"{process.role} to node {peer}", spans, steps) for peer, spans in sorted(sent.items())]
    return sorted(links, key=lambda work: -work.busy_s), sorted(nodes, key=lambda work: -work.busy_s)


def _work(title: str, spans: list[Span], steps: float) -> Work:
    busy_ns = length(union((span.begin_ns, span.end_ns) for span in spans))
    return Work(title, busy_ns / steps * 1e-9, sum(span.args["nbytes"] for span in spans) / steps)


def union(times: Iterable[tuple[int, int]]) -> Times:
    """Return the union of *times* as sorted, disjoint intervals."""
    found: Times = []
    for begin, end in sorted(times):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def without(times: Times, taken: Times) -> Times:
    """Return *times* without *taken*; both are results of `union`, but intervals may be empty or negative."""
    found: Times = []
    for begin, end in times:
        for at in range(max(0, bisect_left(taken, (begin, begin)) - 1), len(taken)):
            a, b = taken[at]
            if a >= end:
                break
            if b <= begin:
                continue
            if a > begin:
                found.append((begin, a))
            begin = b
        if begin < end:
            found.append((begin, end))
    return found


def length(times: Times) -> int:
    """Return the total length of *times*, a result of `union`."""
    return sum(end - begin for begin, end in times)


def title(job: Job, span: Span) -> str:
    """Return the name of the partition of *span*."""
    part, round_ = span.key
    return f"{job.parts[part].title if part in job.parts else f'part {part}'} of round {round_}"


def _tensor(job: Job, span: Span) -> str:
    part = span.key[0]
    return job.parts[part].tensor if part in job.parts else f"part {part}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _step(summary: Summary) -> str:
    if not summary.ranks:
        return "step: unknown, because there is no trace of a rank"
    whole = summary.step_s or 1.0
    parts = ", ".join(f"{name} {_ms(seconds)} ({seconds / whole:.0%})" for name, seconds in (
        ("computing", summary.compute_s), ("copying", summary.copy_s), ("waiting", summary.wait_s)))
    return f"step: {_ms(summary.step_s)} (mean of {summary.ranks} ranks and {summary.steps:g} steps): {parts}"


def _waiting(summary: Summary) -> str:
    found = [f"{cause} {_ms(seconds)}" for cause, seconds in
             sorted(summary.waiting.items(), key=lambda item: -item[1]) if seconds > 0]
    return "waiting for: " + (", ".join(found) or "nothing")


def _slowest(summary: Summary) -> str:
    found = []
    if summary.links and summary.links[0].busy_s:
        link = summary.links[0]
        found.append(f"link {link.title} ({_ms(link.busy_s)} a step for {link.nbytes / 1e6:.3g} MB: "
                     f"{link.nbytes / link.busy_s * 8e-9:.3g} Gbit/s)")
    if summary.nodes and summary.nodes[0].busy_s:
        node = summary.nodes[0]
        found.append(f"sums on {node.title} ({_ms(node.busy_s)} a step for {node.nbytes / 1e6:.3g} MB)")
    if summary.tensors:
        name, seconds = next(iter(summary.tensors.items()))
        found.append(f"tensor {printable(name)} (waited for {_ms(seconds)} a step)")
    return "slowest: " + (", ".join(found) or "nothing was sent, summed or waited for")


def _urgent(summary: Summary) -> str:
    found = summary.urgency
    if not found.writes:
        return "urgency: nothing was written to another node"
    behind = f"behind {found.most_nbytes / 1e6:.3g} MB of less urgent ones"
    most = f"at most {behind} ({title(summary.job, found.most)})" if found.most else "never behind a less urgent one"
    return (f"urgency: {len(found.inversions)} priority inversions in {found.writes} writes; a write waited {most}; "
            f"the credit window is {found.window_nbytes / 1e6:.3g} MB")
