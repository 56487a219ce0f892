"""The fields of ``--json`` of the measuring commands: `trace summary`, `perf`, `tune`. See `json_schemas`."""
from __future__ import annotations

from typing import Any, Literal

from bpsfast.tools.perf.perf_plan import Plan
from tests.support.json_schemas import Exact


class TraceSummary(Exact):
    class Work(Exact):
        title: str
        busy_s: float
        nbytes: float

    ranks: int
    steps: float
    step_s: float
    compute_s: float
    copy_s: float
    wait_s: float
    waiting_s: dict[str, float]
    waiting_for_tensors_s: dict[str, float]
    links: list[Work]
    nodes: list[Work]
    inversions: int
    writes: int
    less_urgent_ahead_nbytes: int
    credit_window_nbytes: int
    most_delayed: str | None
    clocks: int
    clock_uncertainty_s: float
    clock_unknown: list[str]
    full: list[str]


class Perf(Exact):
    """Output of `bpsfast perf bw` and `lat`: `plan` is the agreed plan, `places` the resources of each side."""

    class Row(Exact):
        transport: str
        operation: str
        verbs: str | None
        nbytes: int
        iterations: int
        counters: dict[Literal["client", "server"], list[dict[str, Any]]]

    class Bandwidth(Row):
        messages: int
        seconds: float
        average_bytes_per_s: float
        peak_bytes_per_s: float | None
        messages_per_s: float

    class Latency(Row):
        min_s: float
        max_s: float
        typical_s: float
        average_s: float
        stdev_s: float
        p99_s: float
        p999_s: float
        n_warmup: int
        samples_s: list[float]

    plan: Plan
    places: dict[Literal["client", "server"], dict[str, Any]]
    rows: list[dict[str, Any]]  # of `Bandwidth` or `Latency`, depending on the plan's verb


class TunedJob(Exact):
    class Point(Exact):
        partition_nbytes: int
        fusion_nbytes: int
        credit_nbytes: int
        n_streams: int

    class Trial(Exact):
        point: TunedJob.Point
        step_s: float | None
        n_steps: int
        reason: str

    chosen: Point
    n_steps: int
    is_over: bool
    trials: list[Trial]


class TunedRdma(Exact):
    class Load(Exact):
        class Series(Exact):
            median: float
            spread: float
            samples: list[float]

        class Counted(Exact):
            port: str
            changes: dict[str, int]
            verdicts: list[str]

        unit: Literal["s", "bytes/s"]
        before: Series
        after: Series | None
        gain: float | None
        noise: float | None
        verdict: str | None
        counters: dict[Literal["before", "after"], list[Counted]]

    class Step(Exact):
        knob: str
        value: int | str | bool
        was: int | str | bool
        taken: bool
        words: str

    class Network(Exact):
        class Action(Exact):
            where: str
            command: str

        status: str
        found: str
        troubled: bool
        actions: list[Action]

    host: str
    partners: list[str]
    goal: str
    budget_s: float
    seconds: float
    samples: int
    changed: bool
    verdict: str
    start: dict[str, int | str | bool]
    best: dict[str, int | str | bool]
    changes: dict[str, int | str | bool]
    loads: dict[str, Load]
    steps: list[Step]
    not_tried: dict[str, str]
    network: Network
    profile: dict[str, Any] | None
