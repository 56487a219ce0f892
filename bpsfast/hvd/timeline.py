"""Horovod's timeline: a Chrome trace of the negotiation and execution of each tensor on rank 0, one row each.

Open it in https://ui.perfetto.dev. `BPSFAST_TRACE_DIR` has the traces of the nodes.
"""
from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

from ..orchestration.errors import ConfigError
from ..orchestration.priority.negotiation import Response


class Timeline:
    """Writes events to the file *path* as they happen; viewers read the list even if its end is missing. Any thread.

    Times are microseconds since it was made. Raises ConfigError if the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._begin = time.monotonic()
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()
        try:
            with contextlib.ExitStack() as stack:
                self._file = stack.enter_context(open(path, "w", encoding="utf-8", buffering=1))
                self._file.write("[\n")
                stack.pop_all()
        except OSError as exc:
            raise ConfigError(f"the timeline {path!r} cannot be written: {exc}") from exc

    def note(self, response: Response, asked: list[float | None], begun: float, ended: float) -> None:
        """Write the events of *response*, which was executed from *begun* to *ended* (monotonic, in seconds).

        *asked*: when this rank submitted each of its names; None: this rank has joined.
        """
        with self._lock:
            if self._file.closed:
                return
            kind = response.kind.upper()
            for name, asked_at in zip(response.names, asked):
                row = self._row(name)
                self._span(row, f"NEGOTIATE_{kind}", begun if asked_at is None else asked_at, begun, {})
                self._span(row, "ERROR" if response.error else kind, begun, ended, _arguments(response, name))

    def _row(self, name: str) -> int:
        if name not in self._rows:
            self._rows[name] = len(self._rows) + 1
            self._write({"name": "process_name", "ph": "M", "pid": self._rows[name], "args": {"name": name}})
        return self._rows[name]

    def _span(self, row: int, name: str, begin: float, end: float, arguments: dict[str, Any]) -> None:
        begin = max(begin, self._begin)
        self._write({"name": name, "ph": "X", "pid": row, "tid": 0, "ts": round((begin - self._begin) * 1e6, 1),
                     "dur": round(max(0.0, end - begin) * 1e6, 1), "args": arguments})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")

    def close(self) -> None:
        """Complete the file. Calling it again does nothing."""
        with self._lock:
            if not self._file.closed:
                self._file.write("{}]\n")
                self._file.close()


def _arguments(response: Response, name: str) -> dict[str, Any]:
    if response.error:
        return {"error": response.error}
    specs = response.specs[response.names.index(name)] if response.specs else ()
    if not specs:  # of a barrier, for example
        return {}
    return {"dtype": specs[0].dtype, "shape": str([list(spec.shape or ()) for spec in specs]), "op": response.op,
            "fused": len(response.names)}
