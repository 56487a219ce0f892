"""``bpsfast bench push_pull -H``: push_pull between real hosts, over the links that a job would use."""
from __future__ import annotations

import json
from typing import Any

from bpsfast.base import settings
from bpsfast.bench.harness import table
from bpsfast.bench.harness.contestant_group import Group
from bpsfast.bench.harness.samples import Row
from bpsfast.bench.push_pull import one_machine
from bpsfast.bench.push_pull.host_rank import ROWS_MARK
from bpsfast.bench.push_pull.options import Plan
from bpsfast.launch import ssh_job
from bpsfast.launch.output import Output, Sink
from bpsfast.orchestration.errors import PeerLostError


class RemoteGroup(Group):
    """A contestant whose processes ran on other hosts; rows need only its name."""

    def __init__(self, name: str) -> None:
        self.name = name


def run(plan: Plan, hosts: ssh_job.SshPlan) -> list[dict[str, Any]]:
    """Measure *plan* on *hosts*, print tables, and return the records.

    Raises `PeerLostError` if the job fails (see its output) or reports nothing.
    """
    options = {"sizes": plan.sizes, "n_rounds": plan.n_rounds, "peers": plan.peers}
    program = [hosts.ssh.python, "-m", "bpsfast.bench.push_pull.host_rank", json.dumps(options)]
    output = _Collected()
    code = ssh_job.run(hosts, program, settings.load({}), output=output)
    if code:
        raise PeerLostError(f"the bench's job on {len(hosts.all_hosts)} hosts ended with exit code {code}; its output "
                            "is above")
    names = {"numpy": "bpsfast"}
    rows = []
    for found in output.rows:
        variant, nbytes = found.pop("variant"), found.pop("nbytes")
        rows.append(Row(RemoteGroup(names.get(variant, variant)), variant, nbytes, **found))
    return _report(plan, hosts, rows)


def _report(plan: Plan, hosts: ssh_job.SshPlan, rows: list[Row]) -> list[dict[str, Any]]:
    n_nodes, records = len(hosts.hosts), []
    where = ", ".join([f"{host.name}:{host.slots}" for host in hosts.hosts]
                      + [f"helper {host.name}" for host in hosts.helpers])
    for name in dict.fromkeys(row.name for row in rows):
        chosen = [row for row in rows if row.name == name]
        plan.say(table.block(f"{name} ({chosen[0].group.name}), {where}", chosen, plan.n_ranks, n_nodes, {}) + "\n")
        records += [table.record(where, row, plan.n_ranks, n_nodes) for row in chosen]
    if "gloo" in plan.peers:
        plan.say(one_machine.ratios(plan, rows))
    return records


class _Collected(Output):
    """Output of a job whose rank 0 prints rows on one line; other lines are shown."""

    def __init__(self) -> None:
        super().__init__()
        self._rank_0: _Rows | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return rank 0's rows; raises `PeerLostError` if it has not printed them."""
        if self._rank_0 is None or self._rank_0.found is None:
            raise PeerLostError("the bench's rank 0 has ended well and has not said what it measured: is its bpsfast "
                                "the one of this machine?")
        return list(json.loads(self._rank_0.found)["rows"])

    def streams(self, name: str, rank: int | None = None, n_ranks: int = 0) -> tuple[Any, Any]:
        out, err = super().streams(name, rank, n_ranks)
        if rank != 0:
            return out, err
        self._rank_0 = _Rows(out)
        return self._rank_0, err


class _Rows(Sink):
    """Removes the line with the rows from the output, and passes all other output on."""

    def __init__(self, further: Sink) -> None:
        self.found: bytes | None = None
        self._further = further
        self._line = bytearray()

    def feed(self, data: bytes) -> None:
        first, *others = data.split(b"\n")
        self._line += first
        for other in others:
            self._take(bytes(self._line) + b"\n")
            self._line = bytearray(other)

    def finish(self) -> None:
        self._take(bytes(self._line))
        self._line.clear()
        self._further.finish()

    def _take(self, line: bytes) -> None:
        before, mark, rows = line.partition(ROWS_MARK.encode())
        if mark:
            self.found = rows
        self._further.feed(before)
