"""What on_worker_loss = continue costs a step: a job with it and a job with the default take turns."""
from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bpsfast.base import settings
from bpsfast.base.process_identity import folder_prefix
from bpsfast.bench.harness import table
from bpsfast.bench.harness.contestant_group import Group, Start
from bpsfast.bench.harness.samples import Row, take_turns
from bpsfast.bench.push_pull.paired import interval
from bpsfast.launch import local_job
from bpsfast.launch.daemons import reserve_port
from bpsfast.launch.processes import Kind
from bpsfast.tools.planner import catalog

SECTION = "cost"
#: The operation of `cost_rank`: push_pull of one private NumPy array into itself.
IN_PLACE = "in place"
#: Values of on_worker_loss, the default first.
MODES = ("abort", "continue")
#: The machines of the two ranks, and the transport: on one they sum directly by default; two are over loopback.
MACHINES = {1: "auto", 2: "tcp"}
_NAMES = {1: "one machine", 2: "two machines"}
MODEL = "resnet18"
_TURN_NBYTES, _FEWEST, _MOST = 256 << 20, 3, 300


def run(sizes: Sequence[int], n_rounds: int) -> list[Row]:
    """Measure both modes on one machine and on two; return rows in pairs, abort and continue.

    Labels are "one machine, in place" and the like.
    """
    found = []
    operations = [(IN_PLACE, nbytes) for nbytes in sizes] + [(f"gradients of {MODEL}", catalog.load(MODEL).nbytes)]
    for n_machines in MACHINES:
        with _jobs(n_machines) as groups:
            for operation, nbytes in operations:
                pair = [Row(group, operation, nbytes, label=f"{_NAMES[n_machines]}, {operation}") for group in groups]
                n = max(_FEWEST, min(_MOST, _TURN_NBYTES // nbytes))
                for i in range(n_rounds):
                    take_turns(pair[::-1] if i % 2 else pair, 1, n=n)
                found += pair
    return found


def ratio(pair: Sequence[Row]) -> tuple[float, float, float]:
    """Return the median over rounds of the time with the mode by the time without it, and its 95 % interval."""
    abort, goes_on = pair
    return interval(abort.turns_s, goes_on.turns_s)


def pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return *rows* of `run` as pairs of abort and continue."""
    return list(zip(rows[::2], rows[1::2]))


def text(rows: Sequence[Row]) -> str:
    """Return a table: the median time of either mode, and the ratio."""
    lines = [["a step", "bytes", *(f"{mode} us" for mode in MODES), "continue / abort", "95 %", "#wrong"]]
    for abort, goes_on in pairs(rows):
        median, low, high = ratio((abort, goes_on))
        lines.append([abort.name, str(abort.nbytes), f"{1e6 * abort.median_s:.1f}", f"{1e6 * goes_on.median_s:.1f}",
                      f"{median:.2f}", f"{low:.2f} to {high:.2f}", str(abort.n_wrong + goes_on.n_wrong)])
    return table.plain(lines)


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows of the result file; those of continue have the `ratio` and its interval."""
    found = []
    for pair in pairs(rows):
        for row in pair:
            [n_machines] = [n for n, name in _NAMES.items() if row.name.startswith(name)]
            found.append(table.record(SECTION, row, 2, n_machines))
        found[-1]["measured"] |= dict(zip(("ratio", "ratio_low", "ratio_high"), ratio(pair)))
    return found


@contextlib.contextmanager
def _jobs(n_machines: int) -> Iterator[list[Group]]:
    """Yield a job of two ranks for each of `MODES`; all of them live until the end."""
    with tempfile.TemporaryDirectory(prefix=folder_prefix("bench")) as folder, contextlib.ExitStack() as stack:
        groups = []
        for mode in MODES:
            place = Path(folder, mode)
            place.mkdir()
            groups.append(_start(n_machines, mode, place))
            stack.callback(groups[-1].close)
        yield groups


def _start(n_machines: int, mode: str, folder: Path) -> Group:
    loaded = settings.load({"encryption": "off", "transport": MACHINES[n_machines], "on_worker_loss": mode}, {})
    program = [sys.executable, "-m", "bpsfast.bench.worker_loss.cost_rank", str(folder / "socket")]
    with reserve_port("127.0.0.1") as reserved:
        commands = local_job.plan(local_job.shape_of(2, n_machines, 0), program, loaded, os.environ,
                                  reserved.getsockname()[:2], secrets.token_hex(32))
        commands.sort(key=lambda command: command.kind is Kind.RANK)
        return Group(mode, [Start(each.argv, each.environ, each.via) for each in commands], 2, folder)
