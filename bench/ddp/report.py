"""The report of `bench ddp`: step rates, whether losses agree, and the time of each collective and of gloo's."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bpsfast.bench.harness import table
from bpsfast.bench.harness.samples import Row, find

Losses = Mapping[str, Sequence[Mapping[str, Sequence[float]]]]


def gain(rows: Sequence[Row], name: str, nbytes: int) -> float:
    """Return gloo's median time divided by ours."""
    gloo, ours = (find([row for row in rows if row.group.name == backend], name, nbytes)
                  for backend in ("gloo", "bpsfast"))
    if gloo is None or ours is None:
        raise KeyError(f"{name} of {nbytes} bytes was not measured")
    return gloo.median_s / ours.median_s


def losses_agree(losses: Losses) -> dict[str, bool]:
    """Return for each model whether both backends give each rank the same losses, bit for bit."""
    gloo, ours = losses["gloo"], losses["bpsfast"]
    return {name: all(a[name] == b[name] for a, b in zip(gloo, ours, strict=True)) for name in gloo[0]}


def text(steps: Sequence[Row], losses: Losses, rows: Sequence[Row]) -> str:
    """Return the tables."""
    agree = losses_agree(losses)
    cells = [["model", "MB", "gloo ms", "bpsfast ms", "times as fast", "losses"]]
    for name, nbytes in _subjects(steps):
        n = len(losses["gloo"][0][name])
        cells.append([name, f"{nbytes / 1e6:.2f}", *_times(steps, name, nbytes, 1e3),
                      f"{n} alike" if agree[name] else "DIFFER"])
    lines = ["# DistributedDataParallel, a step", table.plain(cells)]
    if rows:
        cells = [["collective", "bytes", "gloo us", "bpsfast us", "times as fast", "#wrong"]]
        for name, nbytes in _subjects(rows):
            n_wrong = sum(row.n_wrong for row in rows if (row.name, row.nbytes) == (name, nbytes))
            cells.append([name, str(nbytes), *_times(rows, name, nbytes, 1e6), str(n_wrong)])
        lines += ["", "# Collectives", table.plain(cells)]
    return "\n".join(lines)


def records(steps: Sequence[Row], losses: Losses, rows: Sequence[Row], n_ranks: int) -> list[dict[str, Any]]:
    """Return the rows of the result file."""
    agree = losses_agree(losses)
    found = []
    for row in steps:
        each = table.record("step", row, n_ranks, 1)
        each["measured"] |= {"times_as_fast_as_gloo": gain([*steps], row.name, row.nbytes),
                             "losses_alike": agree[row.name], "losses": losses[row.group.name][0][row.name]}
        found.append(each)
    return found + [table.record("collective", row, n_ranks, 1) for row in rows]


def _subjects(rows: Sequence[Row]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((row.name, row.nbytes) for row in rows))


def _times(rows: Sequence[Row], name: str, nbytes: int, unit: float) -> list[str]:
    shown = [f"{row.median_s * unit:.2f}" for row in rows if (row.name, row.nbytes) == (name, nbytes)]
    return [*shown, f"{gain(rows, name, nbytes):.2f}"]
