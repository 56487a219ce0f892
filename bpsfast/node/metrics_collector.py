"""What a node's exporter tells at one moment, as Prometheus' metrics; `bpsfast.tools.top` reads them back."""
from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from .._version import __version__
from ..orchestration.messages import VERSION, LagRow

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_NS = 1e-9


class Member(NamedTuple):
    """A node of the job as this one knows it: a helper or one with ranks, still there or not."""

    node: int
    host: str
    is_helper: bool
    is_there: bool


class Status(NamedTuple):
    """What a node is, whether or not there is a job yet; read by any thread.

    `node`: its number, -1 before the job has one for it. `job`: a name that no other job has, "" before it has one.
    `why_not_ready`: in words, "" once the node is in the job and connected. `loop_age_s`: since the control loop ran.
    """

    node: int
    job: str
    why_not_ready: str
    is_scheduler_connected: bool
    loop_age_s: float


class Reading(NamedTuple):
    """What is counted at one moment: groups of counters as `NodeRuntime.counters` has them, transports by peer, lags.

    `owned_lags`: of all inputs of units that this node owns. `epoch` rises when nodes are lost or come, `generation`
    when units are added. `last_round`: when this node has summed, or got a result for its ranks, last: monotonic time
    and time of day (s); None: never.
    """

    groups: dict[str, dict[str, int]]
    memory: dict[str, int]
    transports: dict[int, str]
    lags: tuple[LagRow, ...]
    owned_lags: tuple[LagRow, ...] = ()
    members: tuple[Member, ...] = ()
    n_recoveries: int = 0
    n_joined: int = 0
    epoch: int = 0
    generation: int = 0
    last_round: tuple[float, float] | None = None


class Row(NamedTuple):
    """A metric made of counter `counter` of a group, times `scale`. Prometheus appends _total to a counter's name."""

    name: str
    doc: str
    counter: str
    scale: float = 1
    is_gauge: bool = False


NODE = {
    "engine": (
        Row("bpsfast_sums", "partitions summed", "sums"),
        Row("bpsfast_summed_bytes", "input of all sums", "bytes_summed"),
        Row("bpsfast_published_bytes", "results made known to the ranks of this node", "published_bytes"),
    ),
    "dispatch": (
        Row("bpsfast_queued_partitions", "partitions that wait for the card", "queued", 1, True),
        Row("bpsfast_queued_partitions_peak", "most partitions that waited for the card", "peak_queued", 1, True),
        Row("bpsfast_in_flight_bytes", "bytes under way to all peers", "in_flight_nbytes", 1, True),
        Row("bpsfast_credit_bytes", "most bytes under way to one peer", "credit_nbytes", 1, True),
    ),
}
WIRE = (
    Row("bpsfast_sent_bytes", "bytes sent to a peer", "bytes_sent"),
    Row("bpsfast_received_bytes", "bytes received from a peer", "bytes_received"),
    Row("bpsfast_links_replaced", "connections to a peer that ended and were made anew", "replaced"),
    Row("bpsfast_damaged_writes", "writes of a peer that came otherwise than it had sent them, and were sent again",
        "writes_damaged"),
)
RANK = (
    Row("bpsfast_pushed_bytes", "inputs of a rank", "pushed_bytes"),
    Row("bpsfast_steps", "steps of a rank, without the first", "steps"),
    Row("bpsfast_step_seconds", "time of these steps", "step_ns", _NS),
    Row("bpsfast_exposed_seconds", "of which in calls of bpsfast: copies and waits", "exposed_ns", _NS),
    Row("bpsfast_communication_seconds", "from first push to last result of these steps", "communication_ns", _NS),
    Row("bpsfast_hidden_seconds", "of which not exposed", "hidden_ns", _NS),
    Row("bpsfast_stalls", "waits longer than stall_warn_s", "stalls"),
)


class Collector:
    """Turns status and readings, with their age in seconds, into metrics, each time anew: nothing is counted twice.

    *read* returns None while there is none.
    """

    def __init__(self, status: Callable[[], Status], read: Callable[[], tuple[float, Reading] | None]) -> None:
        self._status = status
        self._read = read
        self._node = ""

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: a registry asks for this, and there may be nothing to collect yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        found = self._read()
        status = self._status()
        self._node = str(status.node) if status.node >= 0 else ""
        yield from self._standing(status, None if found is None else found[0])
        if found is not None:
            yield from self._counted(found[1])

    def _standing(self, status: Status, age_s: float | None) -> Iterator[Metric]:
        """Yield what this node is, and whether it does what it should."""
        from prometheus_client.core import GaugeMetricFamily

        build = GaugeMetricFamily("bpsfast_build_info", "always 1: what runs here",
                                  labels=["node", "version", "protocol", "python"])
        build.add_metric([self._node, __version__, str(VERSION), platform.python_version()], 1)
        yield build
        if status.job:
            # bpsfast_job is what bpsfast_job_info was called before: dashboards have it
            for name in ("bpsfast_job_info", "bpsfast_job"):
                job = GaugeMetricFamily(name, "always 1: the job's name, the version of bpsfast",
                                        labels=["node", "name", "version"])
                job.add_metric([self._node, status.job, __version__], 1)
                yield job
        gauges = [("bpsfast_ready", "1: in the job, and connected", not status.why_not_ready),
                  ("bpsfast_scheduler_connected", "1: the scheduler is heard", status.is_scheduler_connected),
                  ("bpsfast_control_loop_age_seconds", "since the node's control loop ran", status.loop_age_s)]
        if age_s is not None:
            gauges.append(("bpsfast_reading_age_seconds", "how old these numbers are: the control loop may be busy",
                           age_s))
        yield from self._gauges(gauges)

    def _gauges(self, rows: list[tuple[str, str, float]]) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        for name, doc, value in rows:
            gauge = GaugeMetricFamily(name, doc, labels=["node"])
            gauge.add_metric([self._node], value)
            yield gauge

    def _counted(self, reading: Reading) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for group, rows in NODE.items():
            yield from _families(rows, ["node"], [([self._node], reading.groups[group])])
        wires = [([self._node, str(peer), kind], reading.groups[f"wire_{peer}"])
                 for peer, kind in sorted(reading.transports.items()) if f"wire_{peer}" in reading.groups]
        yield from _families(WIRE, ["node", "peer", "transport"], wires)
        ranks = [([self._node, name.removeprefix("rank_")], counters)
                 for name, counters in reading.groups.items() if name.startswith("rank_")]
        yield from _families(RANK, ["node", "rank"], ranks)
        yield from self._lags(reading)
        memory = GaugeMetricFamily("bpsfast_segment_bytes", "shared memory by kind", labels=["node", "kind"])
        for kind, nbytes in reading.memory.items():
            memory.add_metric([self._node, kind], nbytes)
        yield memory
        cpu = CounterMetricFamily("bpsfast_node_cpu_seconds", "CPU time of the node's process", labels=["node"])
        cpu.add_metric([self._node], time.process_time())
        yield cpu
        yield from self._job(reading)

    def _lags(self, reading: Reading) -> Iterator[Metric]:
        """Yield who is late: ranks of this machine among each other, and all inputs of what this node owns."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        labels = ["node", "rank"]
        lag = SummaryMetricFamily("bpsfast_lag_seconds", "how late a rank was, compared to the first one of its node",
                                  labels=labels)
        longest = GaugeMetricFamily("bpsfast_lag_max_seconds", "how late a rank was at most", labels=labels)
        ratio = GaugeMetricFamily("bpsfast_lag_last_ratio", "in which share of units it was the last", labels=labels)
        of_input = [*labels, "peer", "where"]
        last = CounterMetricFamily("bpsfast_input_last", "units of which this input was the last", labels=of_input)
        late = CounterMetricFamily("bpsfast_input_last_seconds", "how late it was then, in all", labels=of_input)
        inputs = CounterMetricFamily("bpsfast_inputs", "units to which a rank or a peer gave input", labels=of_input)
        lags = CounterMetricFamily("bpsfast_input_lag_seconds", "how late that was, compared to the first one, in all",
                                   labels=of_input)
        for row in reading.lags:
            values = [self._node, str(row.rank)]
            lag.add_metric(values, row.count, row.total_ns * _NS)
            longest.add_metric(values, row.max_ns * _NS)
            ratio.add_metric(values, row.n_last / row.count)
        for where, rows in (("here", reading.lags), ("owned", reading.owned_lags)):
            for row in rows:
                values = [self._node, str(row.rank), str(row.node), where]
                inputs.add_metric(values, row.count)
                lags.add_metric(values, row.total_ns * _NS)
                last.add_metric(values, row.n_last)
                late.add_metric(values, row.last_total_ns * _NS)
        yield from (lag, longest, ratio, inputs, lags, last, late)

    def _job(self, reading: Reading) -> Iterator[Metric]:
        """Yield who belongs to the job, how often it has gone on with others, and when it did anything last."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        member = GaugeMetricFamily("bpsfast_member_up", "1: this node of the job is there, 0: the job goes on without "
                                   "it", labels=["node", "member", "host", "kind"])
        for each in reading.members:
            member.add_metric([self._node, str(each.node), each.host, "helper" if each.is_helper else "ranks"],
                              each.is_there)
        recoveries = CounterMetricFamily("bpsfast_recoveries", "how often the job went on without a helper",
                                         labels=["node"])
        recoveries.add_metric([self._node], reading.n_recoveries)
        joined = CounterMetricFamily("bpsfast_joined", "helpers that have come to the running job", labels=["node"])
        joined.add_metric([self._node], reading.n_joined)
        yield from (member, recoveries, joined)
        gauges: list[tuple[str, str, float]] = [
            ("bpsfast_epoch", "rises when nodes are lost or have come", reading.epoch),
            ("bpsfast_generation", "rises when tensors are added", reading.generation)]
        if reading.last_round is not None:
            monotonic_s, time_s = reading.last_round
            gauges += [("bpsfast_last_round_age_seconds", "since a round ended here, to half a second",
                        max(0.0, time.monotonic() - monotonic_s)),
                       ("bpsfast_last_round_timestamp_seconds", "when that was, since 1970", time_s)]
        yield from self._gauges(gauges)


def _families(rows: tuple[Row, ...], labels: list[str],
              groups: list[tuple[list[str], dict[str, int]]]) -> Iterator[Metric]:
    """Yield a metric for each row, with one value for each of *groups* (values of the labels, counters)."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for row in rows:
        family: Any = (GaugeMetricFamily if row.is_gauge else CounterMetricFamily)(row.name, row.doc, labels=labels)
        for values, counters in groups:
            family.add_metric(values, counters.get(row.counter, 0) * row.scale)
        yield family
