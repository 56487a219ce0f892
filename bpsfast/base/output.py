"""The output of `bpsfast` commands: the options that they share, and tables as text, JSON or CSV.

Tables are plain text that needs no package and suits a log. Colors appear only on a terminal (click strips them
elsewhere; ``NO_COLOR`` and ``--no-color`` turn them off).
"""
from __future__ import annotations

import csv
import functools
import io
import json
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click
import msgspec


class OutputOptions(NamedTuple):
    """The values of the shared options; `path` None is standard output, `color` None: colors on a terminal."""

    as_json: bool = False
    as_csv: bool = False
    path: str | None = None
    color: bool | None = None


def options(*, tabular: bool = False) -> Callable[[Callable], Callable]:
    """Add ``--json``, ``-o``, ``--no-color`` and, if *tabular*, ``--csv``; their values are the parameter *form*."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def with_form(*, as_json: bool, path: str | None, no_color: bool, as_csv: bool = False, **values: Any) -> Any:
            if as_json and as_csv:
                raise click.UsageError("--json and --csv: choose one")
            color = False if no_color or os.environ.get("NO_COLOR") else None
            return function(form=OutputOptions(as_json, as_csv, path, color), **values)

        decorated = click.option("--no-color", is_flag=True, help="Print without colors on a terminal, too.")(with_form)
        decorated = click.option("-o", "--output", "path", type=click.Path(dir_okay=False), metavar="FILE",
                                 help="Write to FILE instead of standard output.")(decorated)
        if tabular:
            decorated = click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")(decorated)
        return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(decorated)

    return decorate


def show(chosen: OutputOptions, text: Callable[[], str], data: Any, rows: Sequence[Sequence[Any]] = ()) -> None:
    """Print a result in the form that the options ask for.

    *text* returns the text, and is called only for text output. *data* is the JSON data: structs, dicts, lists,
    numbers, text, None; infinite and undefined numbers become null. *rows* are the CSV rows, head first.
    """
    if chosen.as_json:
        content = json.dumps(_finite(msgspec.to_builtins(data)), indent=2)
    elif chosen.as_csv:
        sheet = io.StringIO()
        csv.writer(sheet, lineterminator="\n").writerows(rows)
        content = sheet.getvalue().rstrip("\n")
    else:
        content = text()
    if chosen.path is None:
        click.echo(content, color=chosen.color)
        return
    with open(chosen.path, "w", encoding="utf-8") as file:
        file.write(click.unstyle(content) + "\n")


def terminal_width() -> int | None:
    """Return the width of standard output, None if it is not a terminal; then lines are not wrapped."""
    if not sys.stdout.isatty():
        return None
    import shutil  # daemons import this module, and print no tables

    return shutil.get_terminal_size().columns


def hanging(head: str, words: str) -> list[str]:
    """Return *head* and *words* as one line; on a terminal wrapped, with *words* aligned."""
    width, indent = terminal_width(), len(click.unstyle(head))
    if width is None or width < indent + 20:
        return [f"{head}{words}".rstrip()]
    first, *more = textwrap.wrap(words, width - indent, break_on_hyphens=False, break_long_words=False) or [""]
    return [f"{head}{first}".rstrip(), *(" " * indent + line for line in more)]


def fitting(lines: Sequence[str]) -> list[str]:
    """Return *lines*, wrapped on a terminal."""
    width = terminal_width()
    return [part for line in lines for part in (hanging("", line) if width and len(line) > width else [line])]


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return left-aligned columns, right-aligned for the indices in *right*; the first row is the head."""
    widths = [max(len(click.unstyle(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths)):
            padding = " " * (width - len(click.unstyle(cell)))
            cells.append(padding + cell if i in right else cell + padding)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return `columns`; on a terminal that is too narrow, each row as a block: its first cell, then heads and cells."""
    whole, width = columns(rows, right), terminal_width()
    if width is None or max(len(click.unstyle(line)) for line in whole.splitlines()) <= width:
        return whole
    heads, indent = rows[0], max(len(row[0]) for row in rows[1:]) + 2 if len(rows) > 1 else 0
    lines: list[str] = []
    for row in rows[1:]:
        lines.append(row[0].ljust(indent))
        for head, cell in zip(heads[1:], row[1:]):
            if not cell:
                continue
            words = f"{click.style(head, dim=True)} {cell}"
            used = len(click.unstyle(lines[-1]).rstrip()) if lines[-1].strip() else 0
            if used > indent - 2 and used + 2 + len(click.unstyle(words)) > width and lines[-1].rstrip() != row[0]:
                lines.append(" " * indent)
            lines[-1] += words + "  "
    return "\n".join(line.rstrip() for line in lines)


def size(nbytes: int | None) -> str:
    """Return "64 KiB", "8 MiB", "1.5 GiB"; None is "unlimited"."""
    if nbytes is None:
        return "unlimited"
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} bytes"


def _finite(data: Any) -> Any:
    """Return *data* with None for every number that JSON cannot represent."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and (data != data or data in (float("inf"), float("-inf"))) else data
