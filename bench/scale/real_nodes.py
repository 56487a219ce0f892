"""The real nodes of ``bench scale --real``: the CPU time of a start, what each node takes, and the time of a step.

Each node has one rank, and a network namespace of its own if namespaces can be made. Rank 0 reads what nodes and
scheduler have used from /proc, first when all ranks have returned from `init`, then after the steps.
"""
from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bpsfast.base import settings
from bpsfast.bench.harness import table
from bpsfast.launch import local_job
from bpsfast.launch.namespaces import netns
from bpsfast.orchestration.errors import PeerLostError

#: The promised limits of a job without encryption: CPU seconds per node until `init` has returned on all ranks,
#: scheduler included (25 s for 64 nodes), and bytes of memory per node (PSS without segments).
MOST_START_S, MOST_NBYTES = 25 / 64, 80 << 20
PROMISED = "not encrypted"
#: Name of a row -> the settings of its job, besides transport=tcp.
CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    PROMISED: {"encryption": "off", "checksum": "off", "insecure": True}, "default": {}}
_START_TIMEOUT_S = 300.0


def measure(n_nodes: int) -> list[dict[str, Any]]:
    """Run a job of *n_nodes* under each of `CONDITIONS`; return the records. Raises `PeerLostError` if one fails."""
    records = []
    for name, values in CONDITIONS.items():
        loaded = settings.load({"transport": "tcp", "start_timeout_s": _START_TIMEOUT_S, **values}, {})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "record.json")
            code = local_job.run(local_job.shape_of(n_nodes, n_nodes, 0),
                                 [sys.executable, "-m", "bpsfast.bench.scale.real_rank", str(path)], loaded,
                                 netns=netns.missing() is None)
            if code:
                raise PeerLostError(f"the job of {n_nodes} nodes ({name}) ended with exit code {code}; see its output")
            records.append({"phase": "real", "n_nodes": n_nodes, "condition": name, **json.loads(path.read_text())})
    return records


def report(records: list[dict[str, Any]]) -> str:
    """Return the table, and whether the largest job that was not encrypted kept the limits."""
    rows = [["nodes", "", "start CPU s", "scheduler's", "threads", "MB of a node", "at most", "step ms"]]
    rows += [[str(each["n_nodes"]), each["condition"], f"{each['start']['nodes_cpu_s']:.1f}",
              f"{each['start']['scheduler_cpu_s']:.1f}", str(each["end"]["most_threads"]),
              f"{each['start']['median_nbytes'] / 1e6:.0f}", f"{each['start']['most_nbytes'] / 1e6:.0f}",
              f"{statistics.median(each['samples_s']) * 1e3:.0f}"] for each in records]
    last = max((each for each in records if each["condition"] == PROMISED), key=lambda each: each["n_nodes"])
    start, n_nodes = last["start"], last["n_nodes"]
    cpu_s = start["nodes_cpu_s"] + start["scheduler_cpu_s"]
    kept = cpu_s <= MOST_START_S * n_nodes and start["most_nbytes"] <= MOST_NBYTES
    return "\n".join(["# real nodes of one rank each, on this machine (the CPU time of the ranks is not counted)",
                      table.plain(rows),
                      f"# the start of {n_nodes} nodes, {PROMISED}: {cpu_s:.1f} s of CPU time, at most "
                      f"{start['most_nbytes'] / 1e6:.0f} MB a node: {'within' if kept else 'NOT within'} "
                      f"{MOST_START_S * n_nodes:.1f} s and {MOST_NBYTES / 1e6:.0f} MB"])
