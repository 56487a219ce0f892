"""``bpsfast bench push_pull -H``: the same operation between real hosts, over the links that a job would have."""
from __future__ import annotations

import json
from typing import Any

from bpsfast import settings
from bpsfast.bench import table
from bpsfast.bench.group import Group
from bpsfast.bench.plan import Plan
from bpsfast.bench.samples import Row, best
from bpsfast.launch import over_ssh
from bpsfast.launch.output import Output, Sink
from bpsfast.orchestration.errors import PeerLostError


class Elsewhere(Group):
    """A contestant whose processes ran on other hosts: rows need only its name."""

    def __init__(self, name: str) -> None:
        self.name = name


def run(plan: Plan, hosts: over_ssh.Plan) -> list[dict[str, Any]]:
    """Measure as *plan* says on *hosts*; print tables, return the records.

    Raises
    ------
    PeerLostError
        If the job of a bench has failed; its output says why.
    """
    options = {"sizes": plan.sizes, "n_rounds": plan.n_rounds, "peers": plan.peers}
    program = [hosts.ssh.python, "-m", "bpsfast.bench.host_rank", json.dumps(options)]
    output = _Collected()
    code = over_ssh.run(hosts, program, settings.load({}), output=output)
    if code:
        raise PeerLostError(f"the bench's job on {len(hosts.everywhere)} hosts ended with exit code {code}; its output "
                            "is above")
    names = {"numpy": "bpsfast"}
    rows = []
    for found in json.loads(output.result)["rows"]:
        variant, nbytes = found.pop("variant"), found.pop("nbytes")
        rows.append(Row(Elsewhere(names.get(variant, variant)), variant, nbytes, **found))
    return _report(plan, hosts, rows)


def _report(plan: Plan, hosts: over_ssh.Plan, rows: list[Row]) -> list[dict[str, Any]]:
    n_nodes, records = len(hosts.hosts), []
    where = ", ".join([f"{host.name}:{host.slots}" for host in hosts.hosts]
                      + [f"helper {host.name}" for host in hosts.helpers])
    for name in dict.fromkeys(row.name for row in rows):
        chosen = [row for row in rows if row.name == name]
        plan.say(table.block(f"{name} ({chosen[0].group.name}), {where}", chosen, plan.n_ranks, n_nodes, {}) + "\n")
        records += [table.record(where, row, plan.n_ranks, n_nodes) for row in chosen]
    if "gloo" in plan.peers:
        lines = [["times faster, by size (B)", "numpy / gloo"]]
        for nbytes in plan.sizes:
            mine, theirs = best(rows, ["numpy"], nbytes), best(rows, ["gloo"], nbytes)
            assert mine is not None and theirs is not None
            lines.append([str(nbytes), f"{theirs.median_s / mine.median_s:.2f}"])
        plan.say(table.plain(lines))
    return records


class _Collected(Output):
    """Output whose rank 0 is a program's: what it writes to standard output is kept as `result`."""

    def __init__(self) -> None:
        super().__init__()
        self.result = b""

    def streams(self, name: str, rank: int | None = None, n_ranks: int = 0) -> tuple[Any, Any]:
        out, err = super().streams(name, rank, n_ranks)
        return (_Kept(self) if rank == 0 else out), err


class _Kept(Sink):
    """Keeps what comes."""

    def __init__(self, output: _Collected) -> None:
        self._output = output

    def feed(self, data: bytes) -> None:
        """See `Sink`."""
        self._output.result += data

    def finish(self) -> None:
        """See `Sink`."""
