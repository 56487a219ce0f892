"""The tables, verdicts and records of `bench ladder`."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bpsfast.bench.harness import table
from bpsfast.bench.paper.ladder.shares import OURS, TCP, VANILLA, Model
from bpsfast.bench.paper.ladder.worker import Row

_HEAD = ("ms/step", "quartiles", "best", "GB/s", "times ours", "CPU s/GB", "busy s/GB", "#wrong")


def block(model: Model, rows: Sequence[Row]) -> str:
    """Return one model's table."""
    ours = _find(rows, OURS.name).median_s
    lines = [[f"{model}: {rows[0].nbytes / 1e6:.1f} MB, {rows[0].n_parts} partitions", *_HEAD]]
    for row in rows:
        first, third = row.quartiles_s()
        lines.append([row.variant.name, f"{row.median_s * 1e3:.2f}", f"{first * 1e3:.2f}-{third * 1e3:.2f}",
                      f"{min(row.samples_s) * 1e3:.2f}",
                      f"{row.nbytes / row.median_s / 1e9:.3f}", f"{row.median_s / ours:.2f}",
                      f"{row.per_gigabyte(row.cpu_s):.2f}", f"{row.per_gigabyte(row.busy_s):.2f}", str(row.n_wrong)])
    return table.plain(lines)


def verdict(model: Model, rows: Sequence[Row]) -> dict[str, Any]:
    """Return whether `vanilla` is slower than tcp, by how much and how often, and a sentence about it."""
    vanilla, tcp, ours = (_find(rows, variant.name).median_s for variant in (VANILLA, TCP, OURS))
    rounds = list(zip(_find(rows, VANILLA.name).turns_s(), _find(rows, TCP.name).turns_s()))
    best = min(_find(rows, VANILLA.name).samples_s) / min(_find(rows, TCP.name).samples_s)
    n_lost = sum(mine > theirs for mine, theirs in rounds)
    word = "loses to" if vanilla > tcp else "beats"
    return {"vanilla_loses": vanilla > tcp, "vanilla_over_tcp": vanilla / tcp, "ours_over_tcp": ours / tcp,
            "n_rounds_lost": n_lost, "n_rounds": len(rounds), "best_vanilla_over_best_tcp": best,
            "sentence": f"{model}: vanilla {word} tcp here: a step takes {vanilla / tcp:.2f} times as long (longer in "
                        f"{n_lost} of {len(rounds)} rounds, {best:.2f} by the best steps); ours takes "
                        f"{ours / tcp:.2f} times as long as tcp's"}


def records(model: Model, rows: Sequence[Row], n_rounds: int) -> list[dict[str, Any]]:
    """Return the rows and the verdict of one model for the result file; bytes and seconds."""
    chosen = {"model": model.name, "divisor": model.divisor}
    found: list[dict[str, Any]] = []
    for row in rows:
        first, third = row.quartiles_s()
        found.append({
            "section": "ladder",
            "chosen": {**chosen, "rung": row.variant.name, "nbytes": row.nbytes, "n_partitions": row.n_parts,
                       "n_rounds": n_rounds, "n_per_round": row.n_steps},
            "measured": {"median_s": row.median_s, "first_quartile_s": first, "third_quartile_s": third,
                         "best_s": min(row.samples_s),
                         "goodput": row.nbytes / row.median_s, "cpu_s_per_gigabyte": row.per_gigabyte(row.cpu_s),
                         "busy_s_per_gigabyte": row.per_gigabyte(row.busy_s), "n_wrong": row.n_wrong,
                         "counters": row.counters, "samples_s": row.samples_s}})
    return [*found, {"section": "verdict", "chosen": chosen, "measured": verdict(model, rows)}]


def _find(rows: Sequence[Row], name: str) -> Row:
    return next(row for row in rows if row.variant.name == name)
