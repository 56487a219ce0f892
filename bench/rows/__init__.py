"""``bpsfast bench rows``: the cost of a push of a few rows of a large table, compared with a dense array.

Two machines of one rank each (network namespaces with shaped links if possible) push different rows in every step
(`program`). A dense push would send and receive the table's size on each machine, and need at least three copies of it
in memory; a smaller array is measured to show that.
"""
from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from bpsfast.base.value_formats import parse_size
from bpsfast.bench.harness import job_output, table
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.launch.namespaces import netns
from bpsfast.orchestration.errors import ConfigError

#: Promise for a push of 1 % of the rows: bytes sent, as a share of those of the dense table.
MOST_OF_DENSE = 0.03
_DENSE_NBYTES = 64 << 20
_TIMEOUT_S = 300.0


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print a table, and return (and write) the records.

    *options*, each of which may be missing or None: table_size ("2G"), row_elements (128): of the table; share (0.01)
    of its rows that a rank pushes; n_rounds (5) steps; quick: a table of 64 MB, two steps; json_path. Raises
    `ConfigError` if one makes no sense, `PeerLostError` or `StallError` if the job fails or does not end.
    """
    given = BenchRun("rows", options)
    nbytes = parse_size(given.get("table_size") or ("64M" if given.quick else "2G"))
    dim, share = given.get("row_elements") or 128, given.get("share") or 0.01
    n_rows = (nbytes or 0) // (4 * dim)
    n_pushed = int(n_rows * share)
    if not n_pushed:
        raise ConfigError(f"--table {given.get('table_size')!r}, rows of {dim} float32 and --share {share:g} make no "
                          "row to push; expected a size such as 2G")
    lacking = netns.missing()
    if lacking is not None:
        print(f"without links of their own ({lacking}): bytes of both machines are counted together, on loopback")
    ranks = _measure(n_rows, dim, n_pushed, given.rounds(5, quick=2), _DENSE_NBYTES // (16 if given.quick else 1),
                     lacking is None)
    records = [{"section": rows["name"], "chosen": {"rank": rank, "n_machines_counted": 1 if lacking is None else 2},
                "measured": rows} for rank, both in enumerate(ranks) for rows in both]
    print(report(records), flush=True)
    return given.finish(records)


def of_dense(measured: Mapping[str, Any], n_machines: int) -> float:
    """Return the bytes that a machine sent, as a share of those of the dense table."""
    return statistics.median(measured["sent_nbytes"]) / n_machines / measured["nbytes"]


def report(records: list[dict[str, Any]]) -> str:
    """Return a table of *records* with a line for each rank and operation."""
    lines = [["", "of MB", "pushed rows", "pulled rows", "ms", "sent MB", "of the dense bytes", "node MB", "#wrong"]]
    for record in records:
        found, n_machines = record["measured"], record["chosen"]["n_machines_counted"]
        memory = found.get("memory_nbytes", {}).get("memory_segments")
        lines.append([f"{found['name']}, rank {record['chosen']['rank']}", f"{found['nbytes'] / 1e6:.0f}",
                      str(found.get("n_pushed", "-")), str(found.get("n_pulled", "-")),
                      f"{1e3 * statistics.median(found['samples_s']):.1f}",
                      f"{statistics.median(found['sent_nbytes']) / n_machines / 1e6:.2f}",
                      f"{100 * of_dense(found, n_machines):.2f} %", "-" if memory is None else f"{memory / 1e6:.0f}",
                      str(found["n_wrong"])])
    return table.plain(lines)


def _measure(n_rows: int, dim: int, n_pushed: int, n_steps: int, dense_nbytes: int,
             on_links: bool) -> list[list[dict[str, Any]]]:
    """Return the results of each rank."""
    place = ["-n", "2", "--nodes", "2", *(["--netns"] if on_links else [])]
    command = [sys.executable, "-m", "bpsfast", "run", *place, "--", sys.executable, "-m", "bpsfast.bench.rows.program"]
    environ = {**os.environ, "TABLE_ROWS": str(n_rows), "ROW_ELEMENTS": str(dim), "PUSHED_ROWS": str(n_pushed),
               "STEPS": str(n_steps), "DENSE_NBYTES": str(dense_nbytes), "ON_LINKS": str(int(on_links)),
               "BPSFAST_TRANSPORT": "tcp"}
    what = f"pushing {n_pushed} of {n_rows} rows"
    return [each["found"] for each in job_output.run(command, what, 2, _TIMEOUT_S, env=environ)]
