"""``bpsfast bench saturation``: goodput, latency, CPU per GB and memory of push_pull while one parameter grows.

The parameters are the array's size, the number of ranks and of nodes, `partition_bytes` and `credit_bytes`. All nodes
run on this machine, over tcp on loopback. All jobs of one curve run until its end and take turns. Wire throughput is
the traffic of node 0 with all peers, counted by the node.
"""
from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from bpsfast.bench.harness import peers, plots, table
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.contestant_group import Group, cpu_s_of
from bpsfast.bench.harness.launcher import ContestantLauncher
from bpsfast.bench.harness.option_lists import parse_names, parse_sizes
from bpsfast.bench.harness.samples import Row, take_turns
from bpsfast.orchestration.errors import ConfigError

_WORDS = {"rank": "bpsfast.bench.harness.contestant", "node": "node", "scheduler": "scheduler"}


class Point:
    """One job and one size. `value` is the curve's parameter; the rest is from the last turn, per operation.

    `wire`: bytes that node 0 sent and received. `cpu_s`: CPU seconds of all processes of each role (rank, node,
    scheduler). `memory_nbytes`: memory of node 0's segments and process and of rank 0, including the arrays of all
    points that share the job; 0 for a peer.
    """

    def __init__(self, group: Group, value: int, nbytes: int, n_ranks: int, n_nodes: int) -> None:
        self.row = Row(group, "numpy" if group.name == "bpsfast" else group.name, nbytes)
        self.value, self.n_ranks, self.n_nodes = value, n_ranks, n_nodes
        self.wire = (0.0, 0.0)
        self.cpu_s: dict[str, float] = {}
        self.memory_nbytes = 0
        self._before: tuple[dict[str, int], dict[str, float]] = {}, {}

    @property
    def goodput_bits(self) -> float:
        """Return a rank's bits of gradient per second."""
        return 8 * self.row.nbytes / self.row.median_s

    def look(self, begins: bool) -> None:
        """Read counters and CPU times before (*begins*) or after a turn."""
        counters = self._counters()
        cpu_s = _by_role(self.row.group)
        if begins:
            self._before = counters, cpu_s
            return
        n = self.row.n_per_round + self.row.n_warmup
        sent, received = (sum(value - self._before[0].get(name, 0) for name, value in counters.items()
                              if name.startswith("wire_") and name.endswith(end)) / n
                          for end in ("_bytes_sent", "_bytes_received"))
        self.wire = sent, received
        self.cpu_s = {role: (value - self._before[1].get(role, 0.0)) / n for role, value in cpu_s.items()}
        if counters:
            rank = self.row.group.ask("process", only=[0])[0]["resident_outside_segments_nbytes"]
            self.memory_nbytes = counters["memory_segments"] + counters["memory_outside_segments"] + rank

    def _counters(self) -> dict[str, int]:
        group = self.row.group
        return dict(group.ask("counters", only=[0])[0]) if group.name == "bpsfast" else {}

    def record(self, curve: str) -> dict[str, Any]:
        """Return the row of the result file."""
        found = table.record(f"by {curve}", self.row, self.n_ranks, self.n_nodes)
        found["chosen"]["value"] = self.value
        found["measured"] |= {"sent_nbytes": self.wire[0], "received_nbytes": self.wire[1],
                              "cpu_s_by_role": self.cpu_s, "memory_nbytes": self.memory_nbytes}
        return found


def _by_role(group: Group) -> dict[str, float]:
    """Return the CPU seconds so far of a group's processes by role."""
    found: dict[str, float] = {}
    for pid in group.pids():
        try:
            words = psutil.Process(pid).cmdline()
        except psutil.NoSuchProcess:
            continue
        role = next((role for role, word in _WORDS.items() if word in words), "other")
        found[role] = found.get(role, 0.0) + cpu_s_of(pid)
    return found


CURVES = ("size", "ranks", "nodes", "partition", "credit")
_SIZES, _QUICK_SIZES = "4K:64M", "64K,1M,16M"
_NBYTES = 16 << 20
_RANKS, _NODES = (2, 4, 6), (1, 2, 3)
_PARTITIONS = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
_CREDITS = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print tables, and return (and write) the records.

    *options*, each of which may be missing or None: curves ("size,credit"; None for all), sizes (of the first curve),
    compare ("gloo"), n_rounds (5), json_path, plot_path, quick. Raises `ConfigError` if one makes no sense, or if a
    requested plot cannot be drawn.
    """
    given = BenchRun("saturation", options)
    names = parse_names("--curves", given["curves"], CURVES) if "curves" in given else tuple(CURVES)
    if given.get("compare") not in (None, "gloo"):
        raise ConfigError(f"--compare {given['compare']}: between nodes it is gloo that is compared with")
    sizes = parse_sizes(given.get("sizes") or (_QUICK_SIZES if given.quick else _SIZES))
    if "plot_path" in given:
        plots.check(given["plot_path"])
    gloo = given.get("compare") == "gloo"
    lacking = peers.missing("gloo") if gloo else None
    if lacking is not None:
        print(lacking)
    found = {}
    for name in names:
        found[name] = _measure(name, sizes, given.quick, gloo and lacking is None, given.rounds(5, quick=2))
        print(f"{report(name, found[name])}\n", flush=True)
    if "plot_path" in given:
        with plots.figure(4.4, 3.6, n_panels=len(found)) as (made, panels):
            for panel, (name, points) in zip(panels, found.items()):
                draw(panel, name, points)
            plots.save(made, given.pop("plot_path"))
    return given.finish([point.record(name) for name, points in found.items() for point in points])


def _measure(name: str, sizes: Sequence[int], quick: bool, gloo: bool, n_rounds: int) -> list[Point]:
    """Measure one curve; all of its jobs run while the points take turns."""
    with contextlib.ExitStack() as stack:

        def point(value: int, nbytes: int = _NBYTES, n_ranks: int = 2, n_nodes: int = 2, **settings: Any) -> Point:
            launcher = stack.enter_context(ContestantLauncher(n_ranks, n_nodes))
            return Point(launcher.bpsfast(transport="tcp", **settings), value, nbytes, n_ranks, n_nodes)

        if name == "size":
            launcher = stack.enter_context(ContestantLauncher(2, 2))
            ours, theirs = launcher.bpsfast(transport="tcp"), launcher.gloo() if gloo else None
            points = [Point(group, nbytes, nbytes, 2, 2) for nbytes in sizes for group in (ours, theirs) if group]
        elif name == "ranks":
            points = [point(n, n_ranks=n) for n in _some(_RANKS, quick)]
        elif name == "nodes":
            points = [point(n, n_ranks=max(2, n), n_nodes=n) for n in _some(_NODES, quick)]
        elif name == "partition":
            points = [point(n, partition_bytes=n) for n in _some(_PARTITIONS, quick)]
        else:  # partitions so small that the credit is the limit
            points = [point(n, credit_bytes=n, partition_bytes=64 << 10) for n in _some(_CREDITS, quick)]
        by_row = {id(each.row): each for each in points}
        take_turns([each.row for each in points], n_rounds, around=lambda row, begins: by_row[id(row)].look(begins))
    return points


def _some(values: Sequence[int], quick: bool) -> Sequence[int]:
    return (values[0], values[-1]) if quick else values


def report(name: str, points: Sequence[Point]) -> str:
    """Return one curve as a table, at most 120 columns wide."""
    cells = [[name, "", "goodput Gbit/s", "p50 us", "p99 us", "sent Gbit/s", "received", "CPU s/GB: ranks", "node",
              "memory MB", "wrong"]]
    for point in points:
        sent, received = (f"{8 * nbytes / point.row.median_s / 1e9:.2f}" if nbytes else "-" for nbytes in point.wire)
        ranks, node = (f"{point.cpu_s.get(role, 0.0) / point.row.nbytes * 1e9:.2f}" for role in ("rank", "node"))
        cells.append([str(point.value), point.row.group.name, f"{point.goodput_bits / 1e9:.2f}",
                      f"{point.row.median_s * 1e6:.0f}", f"{point.row.percentile_s(99) * 1e6:.0f}", sent, received,
                      ranks, node, f"{point.memory_nbytes / 1e6:.0f}", str(point.row.n_wrong)])
    return table.plain(cells)


def draw(panel: Any, name: str, points: Sequence[Point]) -> None:
    """Draw goodput over the parameter, and CPU seconds per GB on a second axis."""
    right = panel.twinx()
    for contestant, line in (("bpsfast", "-"), ("gloo", ":")):
        mine = [point for point in points if point.row.group.name == contestant]
        if mine:
            values = [point.value for point in mine]
            panel.plot(values, [point.goodput_bits / 1e9 for point in mine], f"o{line}", color="C0",
                       label=contestant)
            right.plot(values, [point.row.median_cpu_s / point.row.nbytes * 1e9 for point in mine], f"s{line}",
                       color="C1")
    counted = name in ("ranks", "nodes")
    panel.set(title=f"by {name}", xlabel=name if counted else f"{name}, bytes")
    panel.legend(fontsize=8)
    panel.set_ylabel("goodput, Gbit/s", color="C0")
    right.set_ylabel("CPU seconds per GB", color="C1")
    if not counted:
        panel.set_xscale("log")
