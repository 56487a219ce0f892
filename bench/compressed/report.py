"""The report of `bench compressed`: speed-up of each codec, bytes sent, and the planner's prediction."""
from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bpsfast.base.settings import Settings
from bpsfast.bench.harness import table
from bpsfast.bench.harness.samples import Row
from bpsfast.orchestration.placement.shares import Machine
from bpsfast.tools.planner.catalog import Compute, Model
from bpsfast.tools.planner.prediction import parse, predict, step_s

#: Small compared with the model: with few partitions, uncompressed steps on slow links would take too long.
PARTITION_NBYTES = 512 << 10
UNCOMPRESSED = "uncompressed"
#: Kind of codec -> promised speed-up on links of 100 Mbit/s, relative to uncompressed steps.
BARS = {"topk": 4.0, "randomk": 4.0, "onebit": 2.2}


@dataclass
class Found:
    """Measurements on `n_machines` whose links carry `rate_bytes` of payload a second in each direction at once.

    `copy_rate`: bytes/s that this machine's summing threads copy. `sent[label]`: for each turn, the bytes that each
    machine's link sent in one step, counted by the kernel.
    """

    model: Model
    n_machines: int
    compute_s: float
    rate_bytes: float
    copy_rate: float
    rows: list[Row] = field(default_factory=list)
    sent: dict[str, list[list[float]]] = field(default_factory=dict)

    def sent_nbytes(self, label: str) -> float:
        """Return how many bytes the busiest machine sent in a step, the median over turns."""
        return median(max(turn) for turn in self.sent[label])

    def speed(self, row: Row) -> float:
        """Return how many steps *row* makes in the time of one uncompressed step."""
        return self.rows[0].median_s / row.median_s

    def expected_s(self, label: str) -> float:
        """Return the step time that the planner expects, given that the machines share these cores."""
        machines = [Machine(True, self.rate_bytes)] * self.n_machines
        codec = parse(label if label != UNCOMPRESSED else "float16")
        found = predict(self.model, machines, codec, self.copy_rate / self.n_machines,
                        partition_nbytes=PARTITION_NBYTES, fusion_nbytes=Settings().fusion_bytes)
        assert found.choice is not None, "there are several machines"
        compute = Compute(self.compute_s / 3, self.compute_s * 2 / 3, 0, "", "")
        return step_s(self.model, compute, found.choice.plain_s if label == UNCOMPRESSED else found.choice.all_s) or 0.0


def bar(label: str) -> float | None:
    """Return the promised speed-up of the codec *label*, or None."""
    return None if label == UNCOMPRESSED else BARS.get(parse(label).kind)


def text(found: Found) -> str:
    """Return the table."""
    lines = [["codec", "step ms", "speed", "promised", "expected ms", "sent MB", "of uncompressed", "CPU %", ""]]
    for row in found.rows:
        promised = bar(row.name)
        sent = found.sent_nbytes(row.name)
        share = f"1/{found.sent_nbytes(found.rows[0].name) / sent:.1f}"
        remarks = [f"{row.n_wrong} WRONG"] if row.n_wrong else []
        if promised and found.speed(row) < promised:
            remarks.append("NOT KEPT")
        lines.append([row.name, f"{1e3 * row.median_s:.0f}", f"{found.speed(row):.2f}x",
                      f"{promised:g}x" if promised else "-", f"{1e3 * found.expected_s(row.name):.0f}",
                      f"{sent / 1e6:.2f}", share, f"{100 * max(row.cpu_busy):.0f}", ", ".join(remarks)])
    return (f"# {found.model.title} ({found.model.nbytes / 1e6:.1f} MB) on {found.n_machines} machines, links that "
            f"move {found.rate_bytes * 8 / 1e6:.1f} Mbit/s of payload each way, {1e3 * found.compute_s:.0f} ms of "
            f"computing\n{table.plain(lines)}\n")


def records(found: Found) -> list[dict[str, Any]]:
    """Return one record for each codec for the result file; bytes and seconds."""
    return [{
        "section": f"{found.n_machines} machines",
        "chosen": {"codec": row.name, "model": found.model.name, "nbytes": found.model.nbytes,
                   "n_machines": found.n_machines, "partition_nbytes": PARTITION_NBYTES, "compute_s": found.compute_s,
                   "n_per_round": row.n_per_round, "n_warmup": row.n_warmup},
        "measured": {"samples_s": row.samples_s, "median_s": row.median_s, "n_wrong": row.n_wrong,
                     "speed": found.speed(row), "promised": bar(row.name), "expected_s": found.expected_s(row.name),
                     "sent_nbytes": found.sent[row.name], "rate_bytes": found.rate_bytes,
                     "copy_rate": found.copy_rate, "cpu_busy": row.cpu_busy,
                     "cpu_s": row.cpu_s},
    } for row in found.rows]
