"""``bpsfast bench optimum``: whether real steps take the time that BytePS's formula predicts, beside other placements.

Every machine is a network namespace whose link is shaped in both directions; the kernel counts bytes. `cells` lists the
measurements, `measurement` makes one, `report` compares it with the formulas. Times are relative to B, the measured
rate at which two of these machines exchange bytes in both directions at once.

Source: BytePS (OSDI'20) section 4.1 and Table 1; unequal links and the placement of whole partitions are ours.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.paper.optimum import cells, report
from bpsfast.bench.paper.optimum.measurement import LayoutCluster


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print tables, and return (and write) the records.

    *options*, each of which may be missing or None: sets ("equal,unequal,models"), workers ("2,4,8"), n_rounds (3),
    json_path, quick. Raises `ConfigError` if one makes no sense, `LackingError` where no network namespaces can be
    made.
    """
    given = BenchRun("optimum", options)
    given.require_links()
    chosen = cells.chosen(given.get("sets", ",".join(cells.SETS)), given.get("workers", "2,4,8"), given.quick)
    records: list[dict[str, Any]] = []
    for layout, planned in chosen:
        with LayoutCluster(layout) as cluster:
            measured = [cluster.measure(cell, given.rounds(3)) for cell in planned]
        print(report.block(layout, measured), flush=True)
        records += report.records(layout, measured)
    return given.finish(records)
