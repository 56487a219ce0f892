"""For `bench optimum`: makes network namespaces for one layout of machines, and measures each cell's jobs on them."""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from bpsfast.bench.harness.contestant_group import Group
from bpsfast.bench.harness.launcher import SLOW_CONTROL_PLANE, ContestantLauncher
from bpsfast.bench.harness.samples import Row, take_turns_on_links
from bpsfast.bench.paper.optimum.cells import Cell, Layout
from bpsfast.launch.namespaces import Cluster
from bpsfast.orchestration.placement.shares import Machine

#: Above this busy share the CPUs are the bottleneck, not the network.
MOST_BUSY = 0.8


@dataclass
class Measured:
    """One cell: `rows` by contestant; `machines` with the measured rates of their links (bytes/s, duplex).

    `sent[contestant]`: bytes (payload and headers) that each machine's interface sent in one step.
    """

    cell: Cell
    machines: list[Machine]
    rows: list[Row]
    sent: dict[str, list[float]] = field(default_factory=dict)


class LayoutCluster:
    """The cluster of *layout*; a context manager for one thread."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._stack = ExitStack()
        self._lasting: dict[str, Group] = {}

    def __enter__(self) -> LayoutCluster:
        with self._stack as stack:
            self._cluster = stack.enter_context(Cluster(list(self._layout.rates), rates=dict(self._layout.rates)))
            n = len(self._layout.workers)
            self._launcher = stack.enter_context(ContestantLauncher(n, n, self._cluster))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def measure(self, cell: Cell, n_rounds: int) -> Measured:
        """Measure the contestants of *cell* in turns, and the links' rates before and after them."""
        own = {name: self._start(name, cell) for name in cell.contestants if name in ("optimal", "ps", "equal")
               or name.startswith("hash:")}
        for name in cell.contestants:
            if name not in own and name not in self._lasting:
                self._lasting[name] = self._start(name, cell)
        groups = self._lasting | own
        rows = [Row(groups[name], "gloo" if name == "gloo" else cell.load, cell.nbytes, label=name)
                for name in cell.contestants]
        rates = self._calibrate()
        sent = take_turns_on_links(rows, self._cluster, n_rounds)
        rates = {share: (rate + again) / 2 for (share, rate), again in zip(rates.items(), self._calibrate().values())}
        for group in own.values():
            self._launcher.dismiss(group)
        machines = cell.machines(self._layout, rates)
        mean = {name: [sum(turn) / len(turns) for turn in zip(*turns)] for name, turns in sent.items()}
        return Measured(cell, machines, rows, mean)

    def _start(self, name: str, cell: Cell) -> Group:
        if name == "gloo":
            return self._launcher.gloo()
        known = name not in ("equal",) and len({*self._layout.workers, *self._layout.helpers}) > 1
        return self._launcher.bpsfast(
            n_helpers=0 if name == "colocated" else cell.n_helpers,
            more={name: {"BPSFAST_NIC_RATE": str(bits / 1e9)} for name, bits in self._layout.rates.items() if known},
            transport="tcp", partition_bytes=cell.partition_nbytes(name), credit_bytes=cell.credit_nbytes(name),
            awake_us=cell.awake_us, placement="optimal" if name == "equal" else name, **SLOW_CONTROL_PLANE)

    def _calibrate(self) -> dict[float, float]:
        """Return the rate of each kind of link, measured against a fast link because the slower end is the limit."""
        shares = {f"node{i}": share for i, share in enumerate(self._layout.workers)}
        fast = max(shares, key=lambda name: shares[name])
        found: dict[float, float] = {}
        for share in sorted({*self._layout.workers, *self._layout.helpers}, reverse=True):
            like = [name for name, other in shares.items() if other == share and name != fast]
            found[share] = self._cluster.calibrate(fast, like[0]).rate_bytes
        return found


def busiest(rows: Sequence[Row]) -> float:
    """Return the busy share of all cores in the busiest turn."""
    return max(busy for row in rows for busy in row.cpu_busy)
