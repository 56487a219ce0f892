"""The benchmarks that `bench suite` runs, their options, and what this machine lacks for them."""
from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bpsfast.launch.namespaces import netns
from bpsfast.orchestration.errors import BpsError


def _needs_torch() -> str | None:
    return None if importlib.util.find_spec("torch") else "torch is not installed"


def _needs_nothing() -> str | None:
    return None


@dataclass(frozen=True)
class Piece:
    """One bench: its module's ``run``, options other than quick and json_path, and why it cannot run here, or None."""

    name: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    lacking: Callable[[], str | None] = _needs_nothing


#: In the order of the issue's names; what they are called here where that differs is in bench/README.md.
PIECES = (
    Piece("kernels", "kernels"),
    Piece("summation", "paper.summation"),
    Piece("post", "post"),
    Piece("push_pull", "push_pull", {"compare": "gloo"}),
    Piece("push_pull_nodes", "push_pull", {"n_nodes": 2, "compare": "gloo", "sizes": "64K,1M,16M,64M"}),
    Piece("saturation", "paper.saturation", {"curves": "size", "compare": "gloo"}),
    Piece("ddp", "ddp", lacking=_needs_torch),
    Piece("model", "training", {"model": "resnet50", "backend": "bpsfast,gloo"}, lacking=_needs_torch),
    Piece("codecs", "codecs"),
    Piece("optimum", "paper.optimum", {"sets": "equal", "workers": "4"}, lacking=netns.missing),
    Piece("schedule", "schedule", lacking=lambda: _needs_torch() or netns.missing()),
)


@dataclass
class Outcome:
    """Result of a piece: its records and its output; `state` is "done", or why there are no records."""

    name: str
    state: str = "done"
    is_failed: bool = False
    took_s: float = 0.0
    text: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)


def run(piece: Piece, quick: bool, folder: Path) -> Outcome:
    """Run one bench, which prints as usual, and writes ``NAME.jsonl`` into *folder*; an error becomes the state."""
    lacking = piece.lacking()
    if lacking is not None:
        return Outcome(piece.name, f"not here: {lacking}")
    module = importlib.import_module(f"bpsfast.bench.{piece.module}")
    is_document = piece.module == "kernels"  # it writes one JSON document
    path = str(folder / f"{piece.name}.{'json' if is_document else 'jsonl'}")
    tee, began = _Tee(), time.monotonic()
    outcome = Outcome(piece.name)
    try:
        with contextlib.redirect_stdout(tee):
            found = module.run({**piece.options, "quick": quick, "json_path": path})
        outcome.records = [{"measured": each} for each in found["rows"]] if is_document else found[1:]
    except (BpsError, OSError) as exc:
        first, *more = f"{type(exc).__name__}: {exc}".splitlines()
        outcome.state, outcome.is_failed = " ".join([first, *more[-1:]]), True
        if more:  # a rank's traceback, whose last line has the error
            print("\n".join([first, *more]), file=tee)
    outcome.took_s, outcome.text = time.monotonic() - began, tee.getvalue()
    return outcome


class _Tee(io.StringIO):
    """Keeps the output and prints it."""

    def __init__(self) -> None:
        super().__init__()
        self._further = sys.stdout

    def write(self, text: str) -> int:
        self._further.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._further.flush()
