"""Makes and saves the plots of benchmarks; only this module uses matplotlib."""
from __future__ import annotations

import base64
import html
import importlib.util
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from bpsfast.orchestration.errors import ConfigError, LackingError


def missing() -> str | None:
    """Return in one line why this environment cannot draw, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install 'bpsfast[plot]')"
    return None


def check(path: str | None = None) -> None:
    """Raise `LackingError` if plots cannot be drawn, `ConfigError` if not into *path*; call it before measuring."""
    lacking = missing()
    if lacking is not None:
        raise LackingError(lacking)
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.lower().removeprefix(".") not in known:
        raise ConfigError(f"--plot {path}: its ending says in which format it is drawn: expected one of "
                          f"{', '.join(known)}")


@contextmanager
def figure(width: float = 7.0, height: float = 4.0, n_panels: int = 1, n_rows: int = 1, **options: Any
           ) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure and its panels, *n_panels* in each row, each *width* x *height* inches; close it at the end.

    *options* are passed to `pyplot.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made, panels = pyplot.subplots(n_rows, n_panels, figsize=(width * n_panels, height * n_rows), layout="constrained",
                                   squeeze=False, **options)
    try:
        yield made, list(panels.flat)
    finally:
        pyplot.close(made)


def save(made: Any, path: str) -> None:
    """Write a figure to *path*, in the format of its suffix."""
    made.savefig(path, dpi=110)


def draw_if_possible(draw: Callable[[Path], None], path: Path) -> None:
    """Call *draw* to write a plot to *path*, and print the path; without matplotlib print only what is missing."""
    lacking = missing()
    if lacking is not None:
        click.echo(lacking, err=True)
    else:
        draw(path)
        click.echo(str(path))


def inline(made: Any, words: str) -> str:
    """Return a figure as an HTML image with inline data; *words* are its description."""
    buffer = io.BytesIO()
    made.savefig(buffer, format="png", dpi=100)
    text = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="{html.escape(words)}" src="data:image/png;base64,{text}">'
