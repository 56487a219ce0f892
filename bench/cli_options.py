"""Command-line options that several benchmarks of ``bpsfast bench`` share."""
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import click

from bpsfast.bench.harness.result_file import RESULTS


def rounds(what: str, default: int) -> Callable[[Callable], Callable]:
    """Add ``--rounds``, how many turns *what* gets, *default* without it; it arrives as the parameter *n_rounds*."""
    return click.option("--rounds", "n_rounds", type=click.IntRange(1), help=f"Rounds of {what}.  [default: {default}]")


def result(quick: str = "") -> Callable[[Callable], Callable]:
    """Add ``--json`` (or ``--out``), which arrives as the parameter *json_path*, and ``--quick`` if that says what it
    leaves out.
    """

    def decorate(function: Callable) -> Callable:
        if quick:
            function = click.option("--quick", is_flag=True, help=quick)(function)
        return click.option("--json", "--out", "json_path", type=click.Path(dir_okay=False), callback=_result_file,
                            help="Write raw samples to this file.")(function)

    return decorate


def plot() -> Callable[[Callable], Callable]:
    """Add ``--plot``, which arrives as the parameter *plot_path*."""
    return click.option("--plot", "plot_path", type=click.Path(dir_okay=False), callback=_result_file, metavar="FILE",
                        help="Plot the results (.png, .svg, .pdf); needs bpsfast[plot].")


def results_folder(what: str = "results") -> Callable[[Callable], Callable]:
    """Add ``--out``, the folder of *what* is written, which arrives as the parameter *out*."""
    return click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, show_default=True,
                        help=f"Folder of the {what}.")


def load() -> Callable[[Callable], Callable]:
    """Add ``--load``: processes for each core that keep it busy meanwhile."""
    return click.option("--load", type=click.IntRange(0), default=0, show_default=True,
                        help="Processes per core that spin meanwhile.")


def _result_file(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Refuse a result file that cannot be written, before minutes of measuring; a new one is not left there empty."""
    if value is not None:
        path = Path(value)
        try:
            is_new = not os.path.lexists(path)
            path.open("a").close()
            if is_new:
                path.unlink()
        except OSError as exc:
            raise click.BadParameter(f"{value} cannot be written: {exc.strerror}", context, option) from None
    return value
