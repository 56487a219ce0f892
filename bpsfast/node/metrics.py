"""The node's numbers for Prometheus: over HTTP, and as a file for node-exporter. Needs the extra "metrics".

One exporter per node tells of the node, its wires and its ranks. What a rank counts lies in its lane, so no rank is
asked. HTTP threads read through the control loop, which owns the counters.
"""
from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..orchestration.errors import ConfigError
from ..orchestration.messages import LagRow, Welcome
from ..settings import Settings
from .event_loop import EventLoop
from .vertex import Vertex

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger("bpsfast.node")

#: Between two writings of the text file.
_TEXTFILE_S = 5.0
#: How long a scrape waits for the control loop, which may be faulting in memory.
_ANSWER_S = 5.0
_NS = 1e-9


class Reading(NamedTuple):
    """What is counted at one moment: groups of counters as `Vertex.counters` has them, transports by peer, lags."""

    groups: dict[str, dict[str, int]]
    memory: dict[str, int]
    transports: dict[int, str]
    lags: tuple[LagRow, ...]


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
    ),
}
WIRE = (
    Row("bpsfast_sent_bytes", "bytes sent to a peer", "bytes_sent"),
    Row("bpsfast_received_bytes", "bytes received from a peer", "bytes_received"),
    Row("bpsfast_links_replaced", "connections to a peer that ended and were made anew", "replaced"),
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


def check(settings: Settings) -> None:
    """Raise `ConfigError` if numbers are to be exported and cannot be."""
    if not settings.metrics_port and not settings.metrics_textfile:
        return
    asked = (f"BPSFAST_METRICS_PORT = {settings.metrics_port}" if settings.metrics_port
             else f"BPSFAST_METRICS_TEXTFILE = {settings.metrics_textfile!r}")
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(f"{asked} needs the library prometheus_client, which is not installed: pip install "
                          "'bpsfast[metrics]', or unset it")
    folder = Path(settings.metrics_textfile or ".").absolute().parent
    if settings.metrics_textfile and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"BPSFAST_METRICS_TEXTFILE = {settings.metrics_textfile!r}: the folder {str(folder)!r} does "
                          "not exist, or this user may not write there")


def exporter_for(settings: Settings, welcome: Welcome, loop: EventLoop, vertex: Vertex) -> Exporter | None:
    """Return an exporter of the node that was welcomed, or None if nobody wants its numbers."""
    if not settings.metrics_port and not settings.metrics_textfile:
        return None
    me = welcome.nodes[welcome.index]
    n_before = sum(node.host == me.host for node in welcome.nodes[: welcome.index])

    def read() -> Reading:
        return Reading(vertex.counters(), vertex.regions.nbytes_by_kind(),
                       {index: link.kind for index, link in vertex.links.items()}, vertex.lags(owned=False))

    return Exporter(settings, welcome.index, n_before, loop, read)


class Exporter:
    """Serves what *read* returns for node *index*. Owned by the control loop's thread, the only one to call *read*.

    Where *n_before* other nodes of the job are on this host, the port is so much higher, and a text file needs
    ``{node}`` in its name.

    Raises
    ------
    ConfigError
        If the port cannot be listened on, or two nodes would write one file.
    """

    def __init__(self, settings: Settings, index: int, n_before: int, loop: EventLoop,
                 read: Callable[[], Reading]) -> None:
        from prometheus_client import CollectorRegistry

        self._loop = loop
        self._read = read
        self._path = settings.metrics_textfile.replace("{node}", str(index))
        self._server: Any = None
        self._thread: Any = None
        self._warned = self._closed = False
        if n_before and self._path and "{node}" not in settings.metrics_textfile:
            raise ConfigError(f"BPSFAST_METRICS_TEXTFILE = {settings.metrics_textfile!r}: several nodes of this host "
                              "would write it; put {node} into the name, which becomes the node's number")
        if settings.metrics_port:
            registry = CollectorRegistry()
            registry.register(_Collector(index, self._read_in_loop))
            self._serve(settings.metrics_host, settings.metrics_port + n_before, registry)
        if self._path:
            self._file_registry = CollectorRegistry()
            self._file_registry.register(_Collector(index, read))
            self._write_again()

    def _serve(self, host: str, port: int, registry: Any) -> None:
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as exc:
            raise ConfigError(f"the node cannot serve its numbers on {host}:{port}: {exc}; set BPSFAST_METRICS_PORT to "
                              "a free port (further nodes of one host take the next ones), or 0") from exc
        log.info("numbers for Prometheus: http://%s:%d/metrics", host, port)

    def _read_in_loop(self) -> Reading:
        """Return what is counted. Threads of the HTTP server."""
        answer: Future[Reading] = Future()

        def read() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(self._read())
                except Exception as exc:  # it is the scrape that fails, not the job
                    answer.set_exception(exc)

        self._loop.call_soon(read)
        try:
            return answer.result(_ANSWER_S)
        finally:
            answer.cancel()

    def _write_again(self) -> None:
        if not self._closed:
            self._write()
            self._loop.call_at(time.monotonic() + _TEXTFILE_S, self._write_again)

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(self._path, self._file_registry)  # to a file beside it, then renamed
        except Exception as exc:  # whatever it is: numbers that nobody gets end no job
            if not self._warned:
                log.warning("the numbers for Prometheus cannot be written to %s: %s: %s", self._path,
                            type(exc).__name__, exc)
            self._warned = True

    def close(self) -> None:
        """Write the file for the last time and stop serving. While the engine still runs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._path:
            self._write()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class _Collector:
    """Turns readings into metrics of node *index*, each time anew: nothing is counted twice."""

    def __init__(self, index: int, read: Callable[[], Reading]) -> None:
        self._node = str(index)
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        reading = self._read()
        for group, rows in NODE.items():
            yield from _families(rows, ["node"], [([self._node], reading.groups[group])])
        wires = [([self._node, str(peer), kind], reading.groups[f"wire_{peer}"])
                 for peer, kind in sorted(reading.transports.items()) if f"wire_{peer}" in reading.groups]
        yield from _families(WIRE, ["node", "peer", "transport"], wires)
        ranks = [([self._node, name.removeprefix("rank_")], counters)
                 for name, counters in reading.groups.items() if name.startswith("rank_")]
        yield from _families(RANK, ["node", "rank"], ranks)
        labels = ["node", "rank"]
        lag = SummaryMetricFamily("bpsfast_lag_seconds", "how late a rank was, compared to the first one of its node",
                                  labels=labels)
        longest = GaugeMetricFamily("bpsfast_lag_max_seconds", "how late a rank was at most", labels=labels)
        last = GaugeMetricFamily("bpsfast_lag_last_ratio", "in which share of units it was the last", labels=labels)
        for row in reading.lags:
            values = [self._node, str(row.rank)]
            lag.add_metric(values, row.count, row.total_ns * _NS)
            longest.add_metric(values, row.max_ns * _NS)
            last.add_metric(values, row.n_last / row.count)
        yield from (lag, longest, last)
        memory = GaugeMetricFamily("bpsfast_segment_bytes", "shared memory by kind", labels=["node", "kind"])
        for kind, nbytes in reading.memory.items():
            memory.add_metric([self._node, kind], nbytes)
        yield memory
        cpu = CounterMetricFamily("bpsfast_node_cpu_seconds", "CPU time of the node's process", labels=["node"])
        cpu.add_metric([self._node], time.process_time())
        yield cpu


def _families(rows: tuple[Row, ...], labels: list[str],
              groups: list[tuple[list[str], dict[str, int]]]) -> Iterator[Metric]:
    """Yield a metric for each row, with one value for each of *groups* (values of the labels, counters)."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for row in rows:
        family: Any = (GaugeMetricFamily if row.is_gauge else CounterMetricFamily)(row.name, row.doc, labels=labels)
        for values, counters in groups:
            family.add_metric(values, counters.get(row.counter, 0) * row.scale)
        yield family
