"""The node's numbers for Prometheus: over HTTP, and as a file for node-exporter. Needs the extra "metrics".

One exporter per node tells of the node, its wires and its ranks. What a rank counts lies in its lane, so no rank is
asked. HTTP threads read through the control loop, which owns the counters.
"""
from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..orchestration.errors import ConfigError, LackingError
from ..orchestration.messages import Welcome
from ..settings import Settings
from .event_loop import EventLoop
from .reading import Collector, Reading

if TYPE_CHECKING:
    from .peers import Peers
    from .recovery import Recovery
    from .vertex import Vertex

log = logging.getLogger("bpsfast.node")

#: Between two writings of the text file.
_TEXTFILE_S = 5.0
#: How long a scrape waits for the control loop, which may be faulting in memory.
_ANSWER_S = 5.0


def check(settings: Settings) -> None:
    """Raise `ConfigError` if numbers are to be exported and cannot be."""
    if not settings.metrics_port and not settings.metrics_textfile:
        return
    asked = (f"BPSFAST_METRICS_PORT = {settings.metrics_port}" if settings.metrics_port
             else f"BPSFAST_METRICS_TEXTFILE = {settings.metrics_textfile!r}")
    if importlib.util.find_spec("prometheus_client") is None:
        raise LackingError(f"{asked} needs the library prometheus_client, which is not installed: pip install "
                           "'bpsfast[metrics]', or unset it")
    folder = Path(settings.metrics_textfile or ".").absolute().parent
    if settings.metrics_textfile and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"BPSFAST_METRICS_TEXTFILE = {settings.metrics_textfile!r}: the folder {str(folder)!r} does "
                          "not exist, or this user may not write there")


def exporter_for(settings: Settings, welcome: Welcome, loop: EventLoop, vertex: Vertex, peers: Peers,
                 recovery: Recovery) -> Exporter | None:
    """Return an exporter of the node that was welcomed, or None if nobody wants its numbers."""
    if not settings.metrics_port and not settings.metrics_textfile:
        return None
    me = welcome.nodes[welcome.index]
    n_before = sum(node.host == me.host for node in welcome.nodes[: welcome.index])

    def read() -> Reading:
        return Reading(vertex.counters(), vertex.regions.nbytes_by_kind(),
                       {index: link.kind for index, link in vertex.links.items()}, vertex.lags(owned=False),
                       vertex.lags(owned=True), peers.members(), recovery.count, recovery.n_joined, welcome.job)

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
            registry.register(Collector(index, self._read_in_loop))
            self._serve(settings.metrics_host, settings.metrics_port + n_before, registry)
        if self._path:
            self._file_registry = CollectorRegistry()
            self._file_registry.register(Collector(index, read))
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
