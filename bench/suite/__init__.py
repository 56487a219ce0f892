"""``bpsfast bench suite``: runs all benchmarks that this machine can run, and writes one report with a verdict.

Each bench prints its tables and writes its result file as it does alone. The report states the machine's bottleneck,
whether sums were right, how near to the formulas it came, and whether a curve over sizes has a cliff.
"""
from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bpsfast.bench.harness import machine_info, table
from bpsfast.bench.harness.option_lists import parse_names
from bpsfast.bench.suite import page, pieces
from bpsfast.bench.suite.pieces import PIECES, Outcome
from bpsfast.bench.suite.verdicts import Verdict, judge

_WIDTH = 80


def run(options: Mapping[str, Any]) -> bool:
    """Run the benches, write ``report.json`` and ``report.html`` into their folder, and return whether all passed.

    *options*: folder, quick, only ("kernels,post"; None for all). A bad verdict is no failure, because it is about the
    machine; a wrong result, a bench that fails, and a suite that can run nothing are failures. Raises `ConfigError` if
    *only* has a name that is no bench of the suite.
    """
    chosen, folder = _chosen(options.get("only")), Path(options["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    began = time.time()
    outcomes = []
    for piece in chosen:
        print(f"\n== {piece.name}", flush=True)
        outcomes.append(pieces.run(piece, bool(options.get("quick")), folder))
        if outcomes[-1].state != "done":
            print(outcomes[-1].state)
    found, here = judge(outcomes), machine_info.describe()
    title = f"bpsfast bench suite, {time.strftime('%Y-%m-%d %H:%M', time.gmtime(began))} UTC"
    print(f"\n{title}\n{textwrap.fill(page.describe(here), _WIDTH)}\n\n{report(found, outcomes)}")
    document = {"bench": "suite", "format": 1, "options": {"quick": str(bool(options.get("quick")))}, "machine": here,
                "begin_unix_s": began, "end_unix_s": time.time(), "verdicts": [each._asdict() for each in found],
                "benches": [{"name": each.name, "state": each.state, "took_s": each.took_s} for each in outcomes]}
    (folder / "report.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(page.page(title, here, found, outcomes), encoding="utf-8")
    print(f"\nwritten: {folder / 'report.html'}, {folder / 'report.json'}, and each bench's result file")
    return (found[0].is_good is not False and any(outcome.state == "done" for outcome in outcomes)
            and not any(outcome.is_failed for outcome in outcomes))


def _chosen(only: str | None) -> list[pieces.Piece]:
    known = [piece.name for piece in PIECES]
    names = known if only is None else parse_names("--only", only, known)
    return [piece for piece in PIECES if piece.name in names]


def report(found: Sequence[Verdict], outcomes: Sequence[Outcome]) -> str:
    """Return benches and verdicts as text, at most 80 columns wide."""
    width = max(len(outcome.name) for outcome in outcomes)
    lines = [table.plain([["bench", "s"], *([each.name.ljust(width), f"{each.took_s:.0f}"] for each in outcomes
                                            if each.state == "done")])]
    for each in outcomes:
        if each.state != "done":
            lines.append(textwrap.fill(f"{each.name}: {each.state}", _WIDTH, subsequent_indent="  "))
    lines.append("")
    marks = {True: "+", False: "-", None: " "}
    for verdict in found:
        lines.append(textwrap.fill(f"{marks[verdict.is_good]} {verdict.question}: {verdict.answer}", _WIDTH,
                                   subsequent_indent="    "))
    return "\n".join(lines)
