"""Exports a node's counters for Prometheus and its health: over HTTP, and as a file for node-exporter.

    /metrics    the metrics of the node, its wires and its ranks (`Collector`); needs the extra "metrics"
    /healthz    200 while the control loop runs, else 503: for a liveness probe; a slow start does not matter
    /readyz     200 once the node is in the job and connected, else 503 and the reason

The server answers as soon as the process runs, before there is a job. Counters of ranks lie in their lanes: no rank is
asked. HTTP threads read through the control loop, which owns the counters; while that is busy (it allocates or
compiles) they serve the last numbers, and how old those are. `bpsfast top` reads them back.
"""
from __future__ import annotations

import importlib.util
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from .._version import __version__
from ..base.settings import Settings
from ..orchestration.errors import ConfigError
from ..orchestration.messages import VERSION, LagRow
from .event_loop import EventLoop

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from .metrics_server import MetricsServer

log = logging.getLogger("bpsfast.node")

#: Between two writings of the text file.
_TEXTFILE_S = 5.0
#: How long a scrape waits for the control loop before it returns the last numbers. Prometheus waits 10 s.
_ANSWER_S = 2.0
#: A control loop that has not run for this long is dead: its longest wait is 30 s.
_LIVE_S = 60.0
#: Between two checks whether numbers have changed, and whether a port is free again.
_LOOK_S = 0.5
#: A port that stays in use for this long is reported: another node of this host may still have to release it.
_TAKEN_S = 5.0
_NS = 1e-9


def check(settings: Settings) -> None:
    """Raise `ConfigError` if the text file cannot be written; warn if the library is missing."""
    if not settings.metrics_port and not settings.metrics_textfile:
        return
    if not _has_library():
        asked = (f"BPSFAST_METRICS_PORT = {settings.metrics_port}" if settings.metrics_port
                 else f"BPSFAST_METRICS_TEXTFILE = {settings.metrics_textfile!r}")
        log.warning("%s: the library prometheus_client is not installed, so the job goes on without numbers for "
                    "Prometheus%s; pip install 'bpsfast[metrics]'", asked,
                    " (/healthz and /readyz answer)" if settings.metrics_port else "")
    folder = Path(settings.metrics_textfile or ".").absolute().parent
    if settings.metrics_textfile and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"BPSFAST_METRICS_TEXTFILE = {settings.metrics_textfile!r}: the folder {str(folder)!r} does "
                          "not exist, or this user may not write there")


def _has_library() -> bool:
    return importlib.util.find_spec("prometheus_client") is not None


class Exporter:
    """Serves a node's metrics and health over HTTP, and writes metrics to a file. Owned by the control loop's thread.

    That thread alone calls *read*, which returns None while there is nothing to read, and *progress*, which returns
    numbers that change with each round, zeros before the first. Any thread calls *status*. *n_before*: other
    nodes of the job that are taken to be on this host, before this one; the port is so much higher. A port that is
    taken is tried again.
    """

    def __init__(self, settings: Settings, loop: EventLoop, status: Callable[[], Status],
                 read: Callable[[], Reading | None], progress: Callable[[], tuple[int, ...]],
                 n_before: int = 0) -> None:
        self._loop = loop
        self._status = status
        self._read_node = read
        self._progress = progress
        self._textfile = settings.metrics_textfile if _has_library() else ""
        self._path = ""
        self._host, self._first_port = settings.metrics_host, settings.metrics_port
        self._port = self._first_port + n_before
        self._taken_since: float | None = None
        self._server: MetricsServer | None = None
        self._last: tuple[float, Reading] | None = None
        self._done: tuple[int, ...] = ()  # the progress, and when it was seen to be that: monotonic time, time of day
        self._done_at: tuple[float, float] | None = None
        self._warned = self._closed = False
        collector = Collector(status, self._reading)
        self._metrics = _Metrics(collector) if _has_library() else None
        self._check_progress()

    def welcomed(self, index: int, n_before: int) -> None:
        """The node is number *index* of the job: listen, and write, where that one does.

        Raises `ConfigError` if two nodes would write one file.
        """
        if n_before and self._textfile and "{node}" not in self._textfile:
            raise ConfigError(f"BPSFAST_METRICS_TEXTFILE = {self._textfile!r}: several nodes of this host "
                              "would write it; put {node} into the name, which becomes the node's number")
        if self._first_port + n_before != self._port:
            self._stop_server()
            self._port = self._first_port + n_before
            self._listen()
        if self._textfile:
            self._path = self._textfile.replace("{node}", str(index))
            self._write_again()

    # -- in the control loop ---------------------------------------------------------------------------------------

    def _check_progress(self) -> None:
        if self._closed:
            return
        self._listen()
        self._note()
        self._loop.call_at(time.monotonic() + _LOOK_S, self._check_progress)

    def _listen(self) -> None:
        if not self._first_port or self._server is not None:
            return
        from .metrics_server import MetricsServer  # takes 5 % of a node's start, and few nodes serve metrics

        try:
            self._server = MetricsServer(self._host, self._port, self._answer)
        except (OSError, OverflowError) as exc:
            now = time.monotonic()
            self._taken_since = now if self._taken_since is None else self._taken_since
            if now - self._taken_since >= _TAKEN_S and not self._warned:
                self._warned = True
                log.warning("the node cannot serve its numbers on %s:%d: %s; the job goes on without them, and it is "
                            "tried again. Set BPSFAST_METRICS_PORT to a free port (further nodes of one host take the "
                            "next ones), or 0", self._host, self._port, exc)
            return
        self._taken_since = None
        log.info("numbers for Prometheus: http://%s:%d/metrics", self._host, self._port)

    def _note(self) -> None:
        """Note when a round has ended last."""
        done = self._progress()
        if done != self._done and any(done):
            self._done, self._done_at = done, (time.monotonic(), time.time())

    def _take(self) -> None:
        """Read what is counted, if anything is yet."""
        self._note()
        reading = self._read_node()
        if reading is not None:
            self._last = time.monotonic(), reading._replace(last_round=self._done_at)

    def _write_again(self) -> None:
        if not self._closed:
            self._write()
            self._loop.call_at(time.monotonic() + _TEXTFILE_S, self._write_again)

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        assert self._metrics is not None
        try:
            self._take()
            write_to_textfile(self._path, self._metrics.registry)  # to a file beside it, then renamed
        except Exception as exc:  # whatever it is: missing numbers must not end the job
            if not self._warned:
                log.warning("the numbers for Prometheus cannot be written to %s: %s: %s", self._path,
                            type(exc).__name__, exc)
            self._warned = True

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None

    def close(self) -> None:
        """Write the file for the last time and stop serving. While the engine still runs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._path:
            self._write()
        self._stop_server()

    # -- in threads of the HTTP server -----------------------------------------------------------------------------

    def _reading(self) -> tuple[float, Reading] | None:
        """Return what is counted, and how old that is (s); None if nothing is yet. In the control loop, too."""
        if threading.current_thread() is not self._loop.thread:
            self._ask()
        last = self._last
        return None if last is None else (max(0.0, time.monotonic() - last[0]), last[1])

    def _ask(self) -> None:
        """Have the control loop read, unless it is busy for too long."""
        answer: Future[None] = Future()

        def take() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    self._take()
                    answer.set_result(None)
                except Exception as exc:  # it is the scrape that fails, not the job
                    answer.set_exception(exc)

        self._loop.call_soon(take)
        try:
            answer.result(_ANSWER_S)
        except FutureTimeoutError:
            answer.cancel()

    def _answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Return status, content type and body."""
        try:
            return self._answer_of(path, accept)
        except Exception as exc:  # only the scrape fails, not the job
            return _plain_text(500, f"{type(exc).__name__}: {exc}")

    def _answer_of(self, path: str, accept: str) -> tuple[int, str, bytes]:
        if path == "/healthz":
            age_s = self._status().loop_age_s
            return _plain_text(200 if age_s < _LIVE_S else 503, f"the control loop ran {age_s:.1f} s ago")
        if path == "/readyz":
            why_not = self._status().why_not_ready
            return _plain_text(503 if why_not else 200, why_not or "in the job, and connected")
        if path not in ("/metrics", "/"):
            return _plain_text(404, "there are /metrics, /healthz and /readyz")
        if self._metrics is None:
            return _plain_text(501, "the library prometheus_client is not installed: pip install 'bpsfast[metrics]'")
        return 200, *self._metrics.text(accept)


class _Metrics:
    """The metrics of one node's process as text."""

    def __init__(self, collector: Collector) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector

        self.registry = CollectorRegistry()
        self._with_process = CollectorRegistry()  # not for files: node-exporter has a process of its own
        for registry in (self.registry, self._with_process):
            registry.register(collector)
        ProcessCollector(registry=self._with_process)

    def text(self, accept: str) -> tuple[str, bytes]:
        """Return content type and text for a client that takes *accept*."""
        from prometheus_client.exposition import choose_encoder

        encode, kind = choose_encoder(accept)
        return kind, encode(self._with_process)


def _plain_text(code: int, text: str) -> tuple[int, str, bytes]:
    return code, "text/plain; charset=utf-8", f"{text}\n".encode()


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


LAG = (
    Row("bpsfast_lag_max_seconds", "how late a rank was at most", "max_ns", _NS, True),
    Row("bpsfast_lag_last_ratio", "in which share of units it was the last", "last_ratio", 1, True),
)
INPUT = (
    Row("bpsfast_inputs", "units to which a rank or a peer gave input", "count"),
    Row("bpsfast_input_lag_seconds", "how late that was, compared to the first one, in all", "total_ns", _NS),
    Row("bpsfast_input_last", "units of which this input was the last", "n_last"),
    Row("bpsfast_input_last_seconds", "how late it was then, in all", "last_total_ns", _NS),
)
JOB = (
    Row("bpsfast_recoveries", "how often the job went on without a helper", "n_recoveries"),
    Row("bpsfast_joined", "helpers that have come to the running job", "n_joined"),
    Row("bpsfast_epoch", "rises when nodes are lost or have come", "epoch", 1, True),
    Row("bpsfast_generation", "rises when tensors are added", "generation", 1, True),
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
        yield from self._status_metrics(status, None if found is None else found[0])
        if found is not None:
            yield from self._counted(found[1])

    def _status_metrics(self, status: Status, age_s: float | None) -> Iterator[Metric]:
        """Yield what this node is, and whether it does what it should."""
        yield _family("bpsfast_build_info", "always 1: what runs here", ["node", "version", "protocol", "python"],
                      [([self._node, __version__, str(VERSION), platform.python_version()], 1)])
        # bpsfast_job is what bpsfast_job_info was called before: dashboards have it
        for name in ("bpsfast_job_info", "bpsfast_job") if status.job else ():
            yield _family(name, "always 1: the job's name, the version of bpsfast", ["node", "name", "version"],
                          [([self._node, status.job, __version__], 1)])
        yield self._gauge("bpsfast_ready", "1: in the job, and connected", not status.why_not_ready)
        yield self._gauge("bpsfast_scheduler_connected", "1: the scheduler is heard", status.is_scheduler_connected)
        yield self._gauge("bpsfast_control_loop_age_seconds", "since the node's control loop ran", status.loop_age_s)
        if age_s is not None:
            yield self._gauge("bpsfast_reading_age_seconds", "how old these numbers are: the control loop may be busy",
                              age_s)

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        return _family(name, doc, ["node"], [([self._node], value)])

    def _counted(self, reading: Reading) -> Iterator[Metric]:
        for group, rows in NODE.items():
            yield from _families(rows, ["node"], [([self._node], reading.groups[group])])
        wires = [([self._node, str(peer), kind], reading.groups[f"wire_{peer}"])
                 for peer, kind in sorted(reading.transports.items()) if f"wire_{peer}" in reading.groups]
        yield from _families(WIRE, ["node", "peer", "transport"], wires)
        ranks = [([self._node, name.removeprefix("rank_")], counters)
                 for name, counters in reading.groups.items() if name.startswith("rank_")]
        yield from _families(RANK, ["node", "rank"], ranks)
        yield from self._lags(reading)
        yield _family("bpsfast_segment_bytes", "shared memory by kind", ["node", "kind"],
                      [([self._node, kind], nbytes) for kind, nbytes in reading.memory.items()])
        yield _family("bpsfast_node_cpu_seconds", "CPU time of the node's process", ["node"],
                      [([self._node], time.process_time())], is_gauge=False)
        yield _family("bpsfast_member_up", "1: this node of the job is there, 0: the job goes on without it",
                      ["node", "member", "host", "kind"],
                      [([self._node, str(each.node), each.host, "helper" if each.is_helper else "ranks"], each.is_there)
                       for each in reading.members])
        yield from _families(JOB, ["node"], [([self._node], reading._asdict())])
        if reading.last_round is not None:
            monotonic_s, time_s = reading.last_round
            yield self._gauge("bpsfast_last_round_age_seconds", "since a round ended here, to half a second",
                              max(0.0, time.monotonic() - monotonic_s))
            yield self._gauge("bpsfast_last_round_timestamp_seconds", "when that was, since 1970", time_s)

    def _lags(self, reading: Reading) -> Iterator[Metric]:
        """Yield lateness: of this machine's ranks among each other, and of all inputs of what this node owns."""
        from prometheus_client.core import SummaryMetricFamily

        labels = ["node", "rank"]
        lag = SummaryMetricFamily("bpsfast_lag_seconds", "how late a rank was, compared to the first one of its node",
                                  labels=labels)
        for row in reading.lags:
            lag.add_metric([self._node, str(row.rank)], row.count, row.total_ns * _NS)
        yield lag
        yield from _families(LAG, labels, [
            ([self._node, str(row.rank)], {"max_ns": row.max_ns, "last_ratio": row.n_last / row.count})
            for row in reading.lags])
        inputs = [([self._node, str(row.rank), str(row.node), where], msgspec.structs.asdict(row))
                  for where, rows in (("here", reading.lags), ("owned", reading.owned_lags)) for row in rows]
        yield from _families(INPUT, [*labels, "peer", "where"], inputs)


def _family(name: str, doc: str, labels: list[str], samples: Iterable[tuple[list[str], float]],
            is_gauge: bool = True) -> Metric:
    """Return a metric, a gauge or a counter, with one value for each of *samples* (values of the labels, value)."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    family: Any = (GaugeMetricFamily if is_gauge else CounterMetricFamily)(name, doc, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _families(rows: tuple[Row, ...], labels: list[str],
              groups: Sequence[tuple[list[str], Mapping[str, Any]]]) -> Iterator[Metric]:
    """Yield a metric for each row, with one value for each of *groups* (values of the labels, counters)."""
    for row in rows:
        yield _family(row.name, row.doc, labels,
                      [(values, counters.get(row.counter, 0) * row.scale) for values, counters in groups], row.is_gauge)
