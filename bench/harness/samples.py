"""Times the contestants of a benchmark in turns, each once per round, so that other load on the machine affects all."""
from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bpsfast.bench.harness.contestant_group import Group
from bpsfast.hardware.host import Host
from bpsfast.launch.namespaces import Cluster
from bpsfast.tools.doctor import hardware

_BATCH_NBYTES = 192 << 20
_MAX_BATCH = 64


@dataclass
class Row:
    """One contestant's operation at one size.

    `samples_s` are seconds per operation of the slowest rank, in order. For each turn: `cpu_busy`, the busy share of
    all cores (including other programs); `cpu_s`, the contestant's CPU seconds per operation; and `handover_ns`, the
    time of a cache line, before the turn, between the two cores that share a cache and were the farthest from each
    other before the first turn (0: unknown).
    """

    group: Group = field(repr=False)
    variant: str
    nbytes: int
    label: str = ""
    n_per_round: int = 0
    n_warmup: int = 0
    samples_s: list[float] = field(default_factory=list)
    n_wrong: int = 0
    cpu_busy: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    handover_ns: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the row's name in tables."""
        return self.label or self.variant

    @property
    def median_s(self) -> float:
        """Return the median of all samples."""
        return statistics.median(self.samples_s)

    @property
    def median_cpu_s(self) -> float:
        """Return the median CPU seconds per operation, of all processes and threads together."""
        return statistics.median(self.cpu_s)

    @property
    def turns_s(self) -> list[float]:
        """Return the median of each turn's samples."""
        n = self.n_per_round
        return [statistics.median(self.samples_s[i:i + n]) for i in range(0, len(self.samples_s), n)]

    def percentile_s(self, percent: float) -> float:
        """Return the smallest sample that *percent* of the samples do not exceed."""
        ordered = sorted(self.samples_s)
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def batch(nbytes: int) -> int:
    """Return the number of operations of this size in a turn: enough to time, few enough to alternate."""
    return max(2, min(_MAX_BATCH, _BATCH_NBYTES // max(nbytes, 1)))


def take_turns(rows: Sequence[Row], n_rounds: int, n: int | None = None, n_warmup: int | None = None,
               around: Callable[[Row, bool], None] | None = None) -> None:
    """Measure all *rows* in *n_rounds* rounds of *n* operations each (default: by size).

    *around* is called with (row, True) before each turn and (row, False) after it.
    """
    cores = hardware.measure(Host())
    for _ in range(n_rounds):
        for row in rows:
            row.n_per_round = batch(row.nbytes) if n is None else n
            row.n_warmup = max(1, row.n_per_round // 10) if n_warmup is None else n_warmup
            if not row.samples_s:  # allocation and check are not part of a turn
                row.group.prepare(row.variant, row.nbytes)
            row.handover_ns.append(hardware.again(cores).ns)
            if around is not None:
                around(row, True)
            turn = row.group.measure(row.variant, row.nbytes, row.n_warmup, row.n_per_round)
            if around is not None:
                around(row, False)
            row.samples_s += turn.samples_s
            row.n_wrong = turn.n_wrong
            row.cpu_busy.append(turn.cpu_busy)
            row.cpu_s.append(turn.cpu_s)


def take_turns_on_links(rows: Sequence[Row], cluster: Cluster, n_rounds: int) -> dict[str, list[list[float]]]:
    """Measure all *rows* in *n_rounds* rounds of two operations, after one that warms up.

    Returns row's name -> for each turn, the bytes that each machine of *cluster* sent in one operation, counted by the
    kernel.
    """
    sent: dict[str, list[list[float]]] = {row.name: [] for row in rows}
    before: list[int] = []

    def around(row: Row, begins: bool) -> None:
        now = [machine.traffic().tx for machine in cluster]
        if begins:
            before[:] = now
        else:
            n = row.n_warmup + row.n_per_round
            sent[row.name].append([(after - then) / n for after, then in zip(now, before)])

    take_turns(rows, n_rounds, n=2, n_warmup=1, around=around)
    return sent


def bounds_s(row: Row, bounds: Iterable[Row]) -> list[float | None]:
    """Return the bound of each turn of *row*: the least median of *bounds* in that round.

    It is None if the machine's cores were nearer to each other, or farther apart, in the turn of one bound than in
    *row*'s.
    """
    found: list[float | None] = []
    for own_ns, *turns in zip(row.handover_ns, *(zip(bound.handover_ns, bound.turns_s) for bound in bounds)):
        is_known = bool(turns) and not any(hardware.differ(own_ns, ns) for ns, _ in turns)
        found.append(min(turn_s for _, turn_s in turns) if is_known else None)
    return found


def bound_s(row: Row, bounds: Iterable[Row]) -> float | None:
    """Return the bound of *row*'s median time, from the median ratio over turns, or None if it is unknown."""
    shares = [each / turn_s for each, turn_s in zip(bounds_s(row, bounds), row.turns_s) if each is not None]
    return row.median_s * statistics.median(shares) if shares else None


def find(rows: Iterable[Row], name: str, nbytes: int) -> Row | None:
    """Return the row *name* at this size, or None."""
    return next((row for row in rows if row.name == name and row.nbytes == nbytes), None)


def best(rows: Iterable[Row], names: Sequence[str], nbytes: int) -> Row | None:
    """Return the row with the smallest median among *names* at this size, or None."""
    found = [row for row in rows if row.name in names and row.nbytes == nbytes]
    return min(found, key=lambda row: row.median_s, default=None)
