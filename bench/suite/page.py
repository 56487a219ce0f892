"""The report of `bench suite` as one self-contained HTML file: verdicts, plots, and the output of each benchmark."""
from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bpsfast.bench.harness import plots
from bpsfast.bench.push_pull import cliffs
from bpsfast.bench.suite.pieces import Outcome
from bpsfast.bench.suite.verdicts import Verdict

_STYLE = ("body{font-family:sans-serif;max-width:70em;margin:2em auto;padding:0 1em}td,th{text-align:left;"
          "padding:.2em .8em;vertical-align:top;border-bottom:1px solid #ddd}pre{background:#f6f6f6;padding:.8em;"
          "overflow-x:auto}img{max-width:100%}.good{color:#161}.bad{color:#a11}")
_PANELS: tuple[tuple[str, Callable[[cliffs.Point], float]], ...] = (
    ("goodput, Gbit/s", lambda point: 8 * point.nbytes / point.median_s / 1e9),
    ("99th percentile of a turn, us", lambda point: point.p99_s * 1e6),
    ("CPU seconds per GB", lambda point: point.cpu_s / point.nbytes * 1e9),
)
_MARKS = {True: ("good", "yes"), False: ("bad", "no"), None: ("", "")}


def page(title: str, machine: Mapping[str, Any], found: Sequence[Verdict], outcomes: Sequence[Outcome]) -> str:
    """Return the file's text; without matplotlib it has a note in place of the plots."""
    lines = ["<!DOCTYPE html>", f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
             f"<style>{_STYLE}</style></head><body>", f"<h1>{html.escape(title)}</h1>",
             f"<p>{html.escape(describe(machine))}</p>", "<h2>Verdict</h2>"]
    lines += _table(("", "good", ""), [(verdict.question, *_mark(verdict), verdict.answer) for verdict in found])
    lines.append("<h2>Curves</h2>")
    lacking = plots.missing()
    lines += [f"<p>{html.escape(lacking)}</p>"] if lacking else _plots(outcomes)
    lines.append("<h2>Benches</h2>")
    took = [f"{each.took_s:.0f}\N{NO-BREAK SPACE}s" if each.took_s else "" for each in outcomes]
    lines += _table(("bench", "", "state"), [(each.name, "", s, each.state) for each, s in zip(outcomes, took)])
    for outcome in outcomes:
        if outcome.text:
            lines += [f"<details><summary>{html.escape(outcome.name)}</summary>",
                      f"<pre>{html.escape(outcome.text)}</pre></details>"]
    return "\n".join([*lines, "</body></html>"]) + "\n"


def describe(machine: Mapping[str, Any]) -> str:
    """Return a description of a machine in one line."""
    return (f"{machine['cpu']}, {machine['n_threads']} threads ({machine['n_usable']} usable), "
            f"{machine['memory_nbytes'] / 2**30:.0f} GiB, load average {machine['load_average'][0]:.1f}, bpsfast "
            f"{machine['versions'].get('bpsfast', '?')}")


def _mark(verdict: Verdict) -> tuple[str, str]:
    return _MARKS[verdict.is_good]


def _table(head: Sequence[str], rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """Return a table; the second cell of each row is the CSS class of the third."""
    lines = ["<table><tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    for first, name, second, third in rows:
        lines.append(f'<tr><td>{html.escape(first)}</td><td class="{name}">{html.escape(second)}</td>'
                     f"<td>{html.escape(third)}</td></tr>")
    return [*lines, "</table>"]


def _plots(outcomes: Sequence[Outcome]) -> list[str]:
    lines = []
    for outcome in outcomes:
        curves = cliffs.curves((record for record in outcome.records if "section" in record), ours=False)
        for section in dict.fromkeys(name.partition(": ")[0] for name in curves):
            chosen = {name.partition(": ")[2]: points for name, points in curves.items()
                      if name.partition(": ")[0] == section}
            lines.append(f"<h3>{html.escape(outcome.name)}, {html.escape(section)}</h3>")
            for title, value in _PANELS:
                with plots.figure(4.6, 3.4) as (made, [panel]):
                    draw(panel, title, value, chosen)
                    lines.append(plots.inline(made, f"{title}, by size: {', '.join(chosen)}"))
    return lines


def draw(panel: Any, title: str, value: Callable[[cliffs.Point], float], curves: Mapping[str, Sequence[cliffs.Point]]
         ) -> None:
    """Draw *value* of each curve's points over sizes."""
    for name, points in curves.items():
        panel.plot([point.nbytes for point in points], [value(point) for point in points], ".-", label=name)
    panel.set(xscale="log", yscale="log", xlabel="bytes", title=title)
    panel.legend(fontsize=7)
