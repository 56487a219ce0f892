"""``bpsfast bench overhead``: the cost of a gradient from its autograd hook until it is announced to the rank's node.

Two ranks of this machine run `program`: the same backward pass with the optimizer's hooks and without them, in turns.
The difference, divided by the number of tensors, is the time for one tensor; a separate run counts Python calls and
locks. With ``--against`` another installation runs the same program, alternating with this one.
"""
from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bpsfast.bench.harness import job_output, table
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.orchestration.errors import ConfigError

N_TENSORS = (161, 2000)
_TIMEOUT_S = 170.0
_PROGRAM = Path(__file__).with_name("program.py")


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print a table, and return (and write) the records.

    *options*, each of which may be missing or None: against (a Python interpreter that has another version), n_elements
    (256) of a tensor, n_rounds (5), quick, json_path. Raises `ConfigError` if *against* is no program, `PeerLostError`
    or `StallError` if a run fails or does not end.
    """
    given = BenchRun("overhead", options)
    pythons = {"this": sys.executable}
    if "against" in given:
        if not Path(given["against"]).is_file():
            raise ConfigError(f"--against {given['against']}: expected the path of a Python interpreter")
        pythons["against"] = given["against"]
    n_rounds, n_steps = (1, 5) if given.quick else (given.rounds(5), 30)
    n_elements = given.get("n_elements") or 256
    records = []
    for n_tensors in N_TENSORS:
        found: dict[str, list[float]] = {name: [] for name in pythons}
        for _ in range(n_rounds):
            for name, python in pythons.items():
                found[name] += measure(python, n_tensors, n_elements, n_steps)["samples_s"]
        for name, python in pythons.items():
            counted = measure(python, n_tensors, n_elements, 1, counts=True)
            records.append({"section": "overhead", "chosen": {"version": name, "n_tensors": n_tensors},
                            "measured": {"samples_s": found[name], "median_s": statistics.median(found[name]),
                                         "calls": counted["calls"], "locks": counted["locks"]}})
    print(report(records), flush=True)
    return given.finish(records)


def measure(python: str, n_tensors: int, n_elements: int, n_steps: int, counts: bool = False) -> dict[str, Any]:
    """Return the results of rank 0 of a job of two ranks with the interpreter *python*."""
    options = json.dumps({"n_tensors": n_tensors, "n_elements": n_elements, "n_steps": n_steps, "counts": counts})
    command = [python, "-m", "bpsfast", "run", "-n", "2", "--", python, str(_PROGRAM), options]
    # in another folder, because Python would import the package of a source tree in the current one
    [found] = job_output.run(command, f"{n_tensors} tensors with {python}", 1, _TIMEOUT_S, cwd=_PROGRAM.parent)
    return found


def report(records: list[dict[str, Any]]) -> str:
    """Return the table: microseconds, Python calls and locks for each tensor."""
    rows = [["tensors", "version", "us per tensor", "Python calls", "locks"]]
    for record in records:
        chosen, measured = record["chosen"], record["measured"]
        rows.append([str(chosen["n_tensors"]), chosen["version"], f"{1e6 * measured['median_s']:.2f}",
                     f"{measured['calls']:.1f}", f"{measured['locks']:.1f}"])
    return table.plain(rows)
