"""Reads result files of benchmarks: JSON Lines after a manifest, or one JSON document with rows."""
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bpsfast.orchestration.errors import ConfigError

#: Folder of the results that the pages show.
RESULTS = Path(__file__).parents[1] / "results"
#: Chosen values that are not part of a row's name: how it was measured, and calibrated values.
_BESIDE = ("n_per_round", "n_warmup", "n_windows", "n_void", "rate_bits", "compute_s", "n_machines_counted")
#: Fields of the rows' names in kernels.json, which is one document.
_KERNELS = ("case", "dtype", "temperature", "contestant", "nbytes")


@dataclass(frozen=True)
class Series:
    """Seconds of one row in order, in blocks of `n_per_round` that were measured in one turn."""

    samples_s: tuple[float, ...]
    n_per_round: int


@dataclass(frozen=True)
class ResultFile:
    """A run: its bench, machine and options; `series` by name of the row."""

    path: str
    bench: str
    machine: Mapping[str, Any]
    options: Mapping[str, str]
    records: tuple[Mapping[str, Any], ...]
    series: Mapping[str, Series]


def records(path: Path) -> list[dict[str, Any]]:
    """Return the records of the run in *path* (JSON Lines), without its manifest."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def read(path: Path) -> ResultFile:
    """Return the run in *path*; raises `ConfigError` unless it is a result file with raw samples in seconds."""
    try:
        manifest, *records = _documents(path.read_text(encoding="utf-8"))
    except ValueError as exc:  # also for a file that is not text
        raise ConfigError(f"{path} is no result file: {exc}; `bpsfast bench NAME --json FILE` writes one") from None
    bench = manifest.get("bench")
    if not isinstance(bench, str):
        raise ConfigError(f"{path} does not say of which bench it is: its first object has "
                          f"{', '.join(sorted(manifest)) or 'nothing'}, and `bench` is looked for")
    series: dict[str, Series] = {}
    for name, found in _series(records):
        impossible = [sample for sample in found.samples_s if not sample > 0]
        if impossible:
            raise ConfigError(f"{path}: row {name!r} has a sample of {impossible[0]:g} s: a time is above 0, and a "
                              "ratio to this one says nothing; `bpsfast bench NAME --json FILE` measures anew")
        unique, n = name, 2
        while unique in series:  # rows with equal chosen values are numbered
            unique, n = f"{name} #{n}", n + 1
        series[unique] = found
    if not series:
        raise ConfigError(f"{path}, of bench {bench}, has no row with raw samples in seconds (samples_s)")
    return ResultFile(str(path), bench, manifest.get("machine", {}), manifest.get("options", {}), tuple(records),
                      series)


def _documents(text: str) -> list[dict[str, Any]]:
    """Return the manifest, then the records, of either format; raises `ValueError` for other text."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        if not isinstance(whole, dict):
            raise ValueError(f"it holds a {type(whole).__name__}, not objects")
        rows = whole.pop("rows", [])
        if not isinstance(rows, list):
            raise ValueError(f"its rows are a {type(rows).__name__}, not a list")
        found = [whole, *({"section": "", "chosen": {name: row.get(name) for name in _KERNELS}, "measured": row}
                          for row in rows if isinstance(row, dict))]
    if not found or not all(isinstance(each, dict) for each in found):
        raise ValueError("its lines are not objects, or it has none")
    for each in found:
        for part in ("machine", "options", "chosen", "measured"):
            if not isinstance(each.get(part, {}), dict):
                raise ValueError(f"{part} is a {type(each[part]).__name__}, not an object")
    return found


def _series(records: list[dict[str, Any]]) -> Iterator[tuple[str, Series]]:
    for record in records:
        samples, chosen = record.get("measured", {}).get("samples_s"), record.get("chosen", {})
        if isinstance(samples, list) and samples and all(isinstance(each, int | float) for each in samples):
            n = chosen.get("n_per_round")  # in the ladder's file, a list with an item for each turn
            yield name_of(record), Series(tuple(map(float, samples)), n if isinstance(n, int) and n > 0 else 1)


def name_of(record: Mapping[str, Any]) -> str:
    """Return the name of a row: its section and all chosen values."""
    chosen = [f"{_value(value)}" if isinstance(value, str) else f"{name}={_value(value)}"
              for name, value in record.get("chosen", {}).items() if name not in _BESIDE and value is not None]
    return ": ".join(part for part in (str(record.get("section", "")), ", ".join(chosen)) if part)


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
