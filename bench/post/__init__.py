"""``bpsfast bench post``: a message from rank to rank and back, compared with torch's send and recv over gloo.

The two ranks have one node (local sockets; payloads are read from the sender's memory), or two nodes on this machine
(tcp over loopback). gloo uses tcp over loopback in both cases. Times are half of a round trip.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bpsfast.bench.harness import peers, table
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.launcher import ContestantLauncher
from bpsfast.bench.harness.option_lists import parse_sizes
from bpsfast.bench.harness.samples import Row, find, take_turns
from bpsfast.bench.post.ping_pong import VARIANT
from bpsfast.orchestration.errors import ConfigError

_SIZES, _QUICK_SIZES = "8,4K,64K,1M,16M,64M", "8,1M"


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print a table, and return (and write) the records.

    *options*, each of which may be missing or None: n_nodes (1 or 2; None: both, one after another), sizes ("8,64M"),
    n_rounds (5), json_path, quick. Raises `ConfigError` if one makes no sense.
    """
    given = BenchRun("post", options)
    wanted = parse_sizes(given.get("sizes") or (_QUICK_SIZES if given.quick else _SIZES))
    shapes = (given["n_nodes"],) if "n_nodes" in given else (1, 2)
    if not set(shapes) <= {1, 2}:
        raise ConfigError(f"bench post measures two ranks on 1 or 2 nodes, got {shapes[0]}")
    return given.finish([record for n_nodes in shapes for record in _measure(n_nodes, wanted, given.rounds(5))])


def _measure(n_nodes: int, sizes: Sequence[int], n_rounds: int) -> list[dict[str, Any]]:
    lacking = peers.missing("gloo")
    if lacking is not None:
        print(lacking)
    with ContestantLauncher(2, n_nodes) as launcher:
        groups = [launcher.bpsfast(transport="tcp")] + ([] if lacking else [launcher.gloo()])
        rows = [Row(group, VARIANT, nbytes, label=group.name) for nbytes in sizes for group in groups]
        take_turns(rows, n_rounds)
    print(_table(n_nodes, rows, sizes) + "\n", flush=True)
    return [_record(n_nodes, row) for row in rows]


def _table(n_nodes: int, rows: Sequence[Row], sizes: Sequence[int]) -> str:
    cells = [[f"one way (us), {n_nodes} node{'s'[:n_nodes - 1]}", "p50", "p99", "gloo p50", "gloo p99", "gloo / ours",
              "GB/s", "CPU us", "gloo CPU us", "wrong"]]
    for nbytes in sizes:
        ours, gloo = find(rows, "bpsfast", nbytes), find(rows, "gloo", nbytes)
        assert ours is not None
        theirs = [f"{value * 5e5:.1f}" for value in (gloo.median_s, gloo.percentile_s(99))] if gloo else ["-", "-"]
        cells.append([str(nbytes), f"{ours.median_s * 5e5:.1f}", f"{ours.percentile_s(99) * 5e5:.1f}", *theirs,
                      f"{gloo.median_s / ours.median_s:.2f}" if gloo else "-",
                      f"{2 * nbytes / ours.median_s / 1e9:.2f}",
                      f"{ours.median_cpu_s * 5e5:.0f}", f"{gloo.median_cpu_s * 5e5:.0f}" if gloo else "-",
                      str(sum(row.n_wrong for row in (ours, gloo) if row))])
    return table.plain(cells)


def _record(n_nodes: int, row: Row) -> dict[str, Any]:
    """Return the row for the result file; seconds of round trips."""
    return {
        "section": VARIANT,
        "chosen": {"contestant": row.name, "nbytes": row.nbytes, "n_ranks": 2, "n_nodes": n_nodes,
                   "n_per_round": row.n_per_round, "n_warmup": row.n_warmup},
        "measured": {"median_s": row.median_s, "n_wrong": row.n_wrong, "cpu_busy": row.cpu_busy, "cpu_s": row.cpu_s,
                     "handover_ns": row.handover_ns,
                     **{f"p{percent}_s": row.percentile_s(percent) for percent in table.PERCENTILES},
                     "samples_s": row.samples_s},
    }
