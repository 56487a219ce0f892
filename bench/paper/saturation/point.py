"""One point of a curve: its samples, what its processes burnt and hold, and what went over the wire."""
from __future__ import annotations

from typing import Any

import psutil

from bpsfast.bench.harness import table
from bpsfast.bench.harness.contestant_group import Group, cpu_s_of
from bpsfast.bench.harness.samples import Row

_WORDS = {"rank": "bpsfast.bench.harness.contestant", "node": "node", "scheduler": "scheduler"}


class Point:
    """One job and one size. `value` is what the curve grows; all else is of the last turn, per operation.

    `wire`: bytes that node 0 sent and received. `cpu_s`: CPU seconds by role (rank, node, scheduler), of all processes
    of it. `memory_nbytes`: what node 0's segments and its process and rank 0's take, with the arrays of all
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
        """Bits of gradient per second, of a rank."""
        return 8 * self.row.nbytes / self.row.median_s

    def look(self, begins: bool) -> None:
        """Read counters and CPU times, before a turn and after it."""
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
    """Return CPU seconds so far of a group's processes by what they are."""
    found: dict[str, float] = {}
    for pid in group.pids():
        try:
            words = psutil.Process(pid).cmdline()
        except psutil.NoSuchProcess:
            continue
        role = next((role for role, word in _WORDS.items() if word in words), "other")
        found[role] = found.get(role, 0.0) + cpu_s_of(pid)
    return found
