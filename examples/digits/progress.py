"""A progress bar with lines printed above it: drawn by rich on a terminal, if it is installed; else the lines alone."""
from __future__ import annotations

import contextlib
from typing import Any


class Progress:
    """Use as a ``with`` block round the work."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._bar: Any = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Progress:
        try:
            from rich import console, progress
        except ModuleNotFoundError:
            return self
        if not console.Console().is_terminal:
            return self
        self._bar = self._stack.enter_context(progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(), transient=True))
        self._task = self._bar.add_task(self._title, total=None)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def show(self, done: int, total: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def print(self, line: str) -> None:
        """Print *line* above the bar."""
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.console.print(line, markup=False, highlight=False)
