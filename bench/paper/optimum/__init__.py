"""``bpsfast bench optimum``: whether steps on real packets take what the model says, beside other placements.

Every machine is a network namespace whose link is shaped both ways; bytes are counted by the kernel. `cells` says what
is measured, `cell` measures one, `report` puts it beside the formulas. Times are compared with B, what two of the same
machines really exchange both ways at once.

Source: BytePS (OSDI'20) section 4.1 and Table 1; unequal links and the placement of whole partitions are ours.
"""
from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bpsfast.bench.harness import table
from bpsfast.bench.paper.optimum import cells, report
from bpsfast.bench.paper.optimum.measurement import Ground
from bpsfast.launch.namespaces import netns
from bpsfast.orchestration.errors import LackingError


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print tables, and return (and write) the records.

    Parameters
    ----------
    options
        sets ("equal,unequal,models"), workers ("2,4,8"), n_rounds, json_path, quick. All may be missing or None.

    Raises
    ------
    ConfigError
        If an option makes no sense.
    LackingError
        If network namespaces cannot be made here.
    """
    given = {name: value for name, value in options.items() if value is not None}
    lacking = netns.missing()
    if lacking is not None:
        raise LackingError(f"bench optimum needs machines with links of their own: {lacking}")
    quick = bool(given.get("quick"))
    chosen = cells.chosen(given.get("sets", ",".join(cells.SETS)), given.get("workers", "2,4,8"), quick)
    n_rounds = given.get("n_rounds") or (1 if quick else 3)
    start = time.time()
    records: list[dict[str, Any]] = []
    for layout, planned in chosen:
        with Ground(layout) as ground:
            measured = [ground.measure(cell, n_rounds) for cell in planned]
        print(report.block(layout, measured), flush=True)
        records += report.records(layout, measured)
    return table.finish("optimum", given, start, records)
