"""Results of tuning by model and cluster: one JSON file each, in the user's cache."""
from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from .tuning_point import TuningPoint
from .tuning_trials import Trial

log = logging.getLogger("bpsfast.tuner")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found, or has found so far: `chosen` the best point, `trials` all that were tried, in order."""

    chosen: TuningPoint
    trials: tuple[Trial, ...]
    n_steps: int
    is_over: bool


def folder(setting: str) -> Path:
    """Return where results lie: *setting*, or ``bpsfast/tuned`` in the user's cache."""
    if setting:
        return Path(setting).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bpsfast" / "tuned"


def key(tensors: Sequence[tuple[str, tuple[int, ...], str]], cluster: Any) -> str:
    """Return the name of the result for *tensors* (name, shape, dtype) on *cluster*, of what JSON can say."""
    text = json.dumps([tensors, cluster], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def read(path: Path) -> Result | None:
    """Return the result in *path*; None if there is no such file, or it holds something else (which the log says)."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as exc:
        log.warning("no result of tuning can be read from %s (%s): the search begins anew", path, exc)
        return None


def write(path: Path, result: Result) -> None:
    """Put *result* into *path*, whole or not at all; a failure is said in the log, and harms nobody."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(msgspec.json.format(msgspec.json.encode(result), indent=2))
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as exc:
        log.warning("the result of tuning cannot be written to %s: %s", path, exc)


def plain(result: Result) -> dict[str, Any]:
    """Return *result* as JSON has it, with names instead of places."""
    return {
        "chosen": result.chosen._asdict(), "n_steps": result.n_steps, "is_over": result.is_over,
        "trials": [{**trial._asdict(), "point": trial.point._asdict()} for trial in result.trials],
    }
