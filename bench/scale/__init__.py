"""``bpsfast bench scale``: what the control plane of a large job costs, and what a node takes.

The scheduler is the real one, in a process of its own. The nodes are modelled (`nodes`): they send and answer the
messages of real nodes over connections of their own, with the job's encryption, but hold no memory and sum nothing. For
each phase the result has the scheduler's CPU time and the most memory it had, the time that passed, and messages and
bytes:

    join      until every node has its Welcome
    declare   every rank declares all tensors, until every node has the plan
    commit    until every node has the commit
    loss      one helper is lost, until every node has the commit of the new owners
    rejoin    the scheduler is killed, and another one takes over, until every node may go on

With the option *real*, jobs of real nodes run as well (`real_nodes`).
"""
from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import psutil

from bpsfast.bench.harness import table
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.option_lists import parse_counts
from bpsfast.launch.daemons import reserve_port, tie_to_parent
from bpsfast.orchestration import messages as m
from bpsfast.orchestration.errors import BpsError, PeerLostError
from bpsfast.orchestration.messages import TensorSpec

from . import real_nodes
from .nodes import Nodes

#: The promised limits with 1,024 nodes: CPU seconds from the first join to the first commit, and for a lost helper.
MOST_START_S, MOST_LOSS_S, MOST_NBYTES = 30.0, 3.0, 1 << 30
_TIMEOUT_S = 300.0


class _Scheduler:
    """The scheduler's process, until `end`. Raises `PeerLostError` if it does not start."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        argv = [sys.executable, "-m", "bpsfast.bench.scale.scheduler", json.dumps(settings)]
        self._process = subprocess.Popen(tie_to_parent(argv), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "listening\n":
            self.end()
            raise PeerLostError("the scheduler of `bench scale` did not start; see its output")
        self._own = psutil.Process(self._process.pid)

    @property
    def cpu_s(self) -> float:
        """The CPU time that it has used, of all threads."""
        times = self._own.cpu_times()
        return float(times.user + times.system)

    @property
    def most_nbytes(self) -> int:
        """The most memory that it had resident."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))

    def end(self) -> None:
        """Kill it, if it has not ended."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print a table, and return (and write) the records.

    *options*, each of which may be missing or None: nodes ("8,64,1024": nodes with ranks), n_local (ranks of each),
    n_tensors, n_helpers, real ("24,64": nodes of real jobs); json_path, quick. Raises `StallError` if a phase does not
    end.
    """
    given = BenchRun("scale", options)
    counts = parse_counts("--nodes", given.get("nodes") or ("8,64" if given.quick else "8,64,256,1024"), 4096)
    n_tensors = given.get("n_tensors") or (1000 if given.quick else 16000)
    n_local, n_helpers = given.get("n_local") or 8, given.get("n_helpers") or 4
    real = parse_counts("--real", given.get("real"), 249) if given.get("real") else ()
    records = [record for n in counts for record in _measure(n, n_local, n_helpers, n_tensors)]
    print(report(records), flush=True)
    if real:
        try:
            of_real = [record for n in real for record in real_nodes.measure(n)]
        except BpsError:
            given.finish(records)
            raise
        print(real_nodes.report(of_real), flush=True)
        records += of_real
    return given.finish(records)


def tensors_of(n: int) -> tuple[TensorSpec, ...]:
    """Return *n* tensors as those of a large model: matrices of 4 MB and as many vectors of 4 KB."""
    return tuple(TensorSpec(name=f"layers.{i // 8}.block.{i % 8}.{'weight' if i % 2 else 'bias'}", dtype="float32",
                            shape=(1000, 1000) if i % 2 else (1000,), priority=-i) for i in range(n))


def _measure(n_workers: int, n_local: int, n_helpers: int, n_tensors: int) -> list[dict[str, Any]]:
    key = secrets.token_bytes(32)
    records: list[dict[str, Any]] = []
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        settings = {"num_nodes": n_workers, "num_helpers": n_helpers, "package": "scale", "key": key.hex(),
                    "port": port, "lease_s": 60.0, "helper_lease_s": 60.0, "start_timeout_s": _TIMEOUT_S}
        scheduler, nodes = _Scheduler(settings), Nodes(n_workers, n_local, n_helpers, key, port)

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            cpu_s, begin_s, before = scheduler.cpu_s, time.monotonic(), nodes.traffic.copy()
            yield
            records.append({"phase": name, "n_nodes": n_workers, "n_ranks": n_workers * n_local, "n_tensors": n_tensors,
                            "n_helpers": n_helpers, "wall_s": time.monotonic() - begin_s,
                            "cpu_s": scheduler.cpu_s - cpu_s, "most_nbytes": scheduler.most_nbytes,
                            **nodes.traffic.since(before)})
            click.echo(f"{n_workers} nodes: {name}, {records[-1]['wall_s']:.1f} s", err=True)

        try:
            with phase("join"):
                for node in nodes.all:
                    node.dial()
                    node.join()
                nodes.run_until(lambda node: bool(node.has["Welcome"]), "Welcome", _TIMEOUT_S)
            with phase("declare"):
                nodes.declare(tensors_of(n_tensors))
                nodes.run_until(lambda node: bool(node.has["Plan"]), "Plan", _TIMEOUT_S)
            with phase("commit"):
                nodes.run_until(lambda node: bool(node.has["Commit"]), "Commit", _TIMEOUT_S)
            with phase("loss"):
                lost = nodes.all[-1]
                lost.hang_up()
                for node in nodes.all[:n_workers]:
                    node.say(m.Lost(who=f"node {lost.index}", reason="its connection has ended"))
                nodes.run_until(lambda node: node.has["Commit"] == 2, "Commit of a loss", _TIMEOUT_S)
            scheduler.end()
            scheduler = _Scheduler(settings)
            with phase("rejoin"):
                nodes.rejoin()
                nodes.run_until(lambda node: bool(node.has["Resume"]), "Resume", _TIMEOUT_S)
        finally:
            scheduler.end()
            nodes.close()
    return records


def report(records: list[dict[str, Any]]) -> str:
    """Return the table, and whether the largest job kept its limits."""
    rows = [["nodes", "ranks", "phase", "CPU s", "wall s", "memory MB", "messages/node", "KB/node to", "KB/node from"]]
    for each in records:
        n = each["n_nodes"]
        rows.append([str(n), str(each["n_ranks"]), each["phase"], f"{each['cpu_s']:.2f}", f"{each['wall_s']:.2f}",
                     f"{each['most_nbytes'] / 1e6:.0f}", f"{(each['n_sent'] + each['n_received']) / n:.1f}",
                     f"{each['sent_nbytes'] / n / 1e3:.1f}", f"{each['received_nbytes'] / n / 1e3:.1f}"])
    largest = {each["phase"]: each for each in records if each["n_nodes"] == max(r["n_nodes"] for r in records)}
    start_s = sum(largest[name]["cpu_s"] for name in ("join", "declare", "commit"))
    most = max(each["most_nbytes"] for each in largest.values())
    kept = start_s <= MOST_START_S and largest["loss"]["cpu_s"] <= MOST_LOSS_S and most <= MOST_NBYTES
    return "\n".join([f"# the scheduler of jobs with {records[0]['n_tensors']} tensors, by nodes with ranks",
                      table.plain(rows),
                      f"# from the first join to the first commit: {start_s:.1f} s of one core; a lost helper: "
                      f"{largest['loss']['cpu_s']:.1f} s; at most {most / 1e6:.0f} MB: "
                      f"{'within' if kept else 'NOT within'} {MOST_START_S:g} s, {MOST_LOSS_S:g} s and "
                      f"{MOST_NBYTES / 1e6:.0f} MB"])
