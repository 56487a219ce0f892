"""``bpsfast bench autotune``: how near tuning during training comes to the best settings from deliberately bad ones.

Two machines and a helper (network namespaces, shaped links) train the network of `program` with every point of a grid,
then with autotune from each bad start. Then the chosen point and the grid's best are measured again in turns, because
the minimum of many noisy medians is biased. Weights must be the same in all runs, bit for bit.
"""
from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bpsfast.base.process_identity import folder_prefix
from bpsfast.bench.harness import job_output, table
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.orchestration.errors import ConfigError, PeerLostError

STARTS = (64_000, 65_536_000)
#: (partition_bytes, credit_bytes, tcp_streams)
GRID = ((64_000, 4_096_000, 2), (64_000, 16_777_216, 2), (256_000, 4_096_000, 2), (256_000, 16_777_216, 1),
        (256_000, 16_777_216, 2), (256_000, 16_777_216, 4), (1_024_000, 16_777_216, 1), (1_024_000, 16_777_216, 2),
        (1_024_000, 16_777_216, 4), (4_096_000, 16_777_216, 2), (16_384_000, 16_777_216, 2),
        (65_536_000, 16_777_216, 2))
#: Their names in a point of tuning.
_SETTINGS = {"partition_nbytes": "partition_bytes", "fusion_nbytes": "fusion_bytes", "credit_nbytes": "credit_bytes",
             "n_streams": "tcp_streams"}
_WIDTH = 1024
_LINKS = ("--helpers", "1", "--netns", "--rate", "1gbit")
#: Steps of a tuned run (of which 60 tune), and of others, whose first ones do not count.
_N_TUNED, _N_STEPS, _N_COLD = 70, 14, 4
_TIMEOUT_S = 170.0


class Run(NamedTuple):
    """One training: a checksum of its weights, rank 0's step times, and the result of tuning."""

    weights: str
    times_s: list[float]
    found: dict[str, Any]

    @property
    def slowest_s(self) -> float:
        """Return the slowest step that counts."""
        return max(self.times_s[_N_COLD:])

    @property
    def median_s(self) -> float:
        """Return the median of the steps that count."""
        return statistics.median(self.times_s[_N_COLD:])


class Found(NamedTuple):
    """Results from one start: the tuned run; `again`: medians of the chosen point and of the grid's best, in turns."""

    start: int
    tuned: Run
    best: tuple[int, int, int]
    again: list[dict[str, float]]

    @property
    def excess(self) -> float:
        """Return by how much the chosen point is slower than the grid's best."""
        chosen, best = (statistics.median(each[name] for each in self.again) for name in ("chosen", "best"))
        return chosen / best - 1


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print a table, and return (and write) the records.

    *options*, each of which may be missing or None: starts ("64000,65536000": values of partition_bytes), n_rounds (3)
    of the comparison, json_path. Raises `ConfigError` if one makes no sense, `LackingError` if network namespaces or
    torch are missing.
    """
    given = BenchRun("autotune", options)
    starts = _starts(given.get("starts"))
    given.require_links()
    with tempfile.TemporaryDirectory(prefix=folder_prefix("bench")) as name:
        folder = Path(name)
        default = train(folder, _N_STEPS)
        grid = {point: train(folder, _N_STEPS, **_settings(point)) for point in GRID}
        best = min(grid, key=lambda point: grid[point].median_s)
        found = []
        for start in starts:
            tuned = train(folder, _N_TUNED, tune=True, partition_bytes=start)
            chosen = {_SETTINGS[name]: value for name, value in tuned.found["chosen"].items()}
            rivals = {"chosen": chosen, "best": _settings(best)}
            again = [{name: train(folder, _N_STEPS, **settings).median_s for name, settings in rivals.items()}
                     for _ in range(given.rounds(3, quick=3))]
            found.append(Found(start, tuned, best, again))
    print(report(default, grid, found), flush=True)
    return given.finish(_records(default, grid, found))


def train(folder: Path, n_steps: int, tune: bool = False, place: Sequence[str] = _LINKS, width: int = _WIDTH,
          crosses: bool = False, **settings: object) -> Run:
    """Train *n_steps* with these settings in *folder*; with *tune*, without earlier tuning results.

    *place*: options of `bpsfast run` for the machines; *width*: of a layer; *crosses*: no barrier between steps. Raises
    `PeerLostError` or `StallError` if the training fails or does not end.
    """
    outcome = folder / "found.json"
    bpsfast = [sys.executable, "-m", "bpsfast"]
    command = [*bpsfast, "run", "-n", "2", "--nodes", "2", *place, "--",
               sys.executable, "-m", "bpsfast.bench.autotune.program"]
    if tune:
        command = [*bpsfast, "tune", "--json", "-o", str(outcome), "--", *command]
    variables = {f"BPSFAST_{name.upper()}": str(value) for name, value in settings.items()}
    environ = {**os.environ, **variables, "WIDTH": str(width), "STEPS": str(n_steps),
               "CROSSES": str(int(crosses)), "XDG_CACHE_HOME": str(folder / "cache")}
    first, second = job_output.run(command, f"training with {settings}", 2, _TIMEOUT_S, env=environ)
    if first["weights"] != second["weights"]:
        raise PeerLostError(f"the ranks' weights differ after training with {settings}")
    return Run(first["weights"], first["times_s"], json.loads(outcome.read_text()) if tune else {})


def _settings(point: tuple[int, int, int]) -> dict[str, Any]:
    return dict(zip(("partition_bytes", "credit_bytes", "tcp_streams"), point))


def report(default: Run, grid: Mapping[tuple[int, int, int], Run], found: list[Found]) -> str:
    """Return the tables of the grid and of each start."""
    rows = [["partition", "credit", "streams", "step s", "x default"]]
    rows += [[*map(str, point), f"{each.median_s:.4f}", f"{each.median_s / default.median_s:.2f}"]
             for point, each in grid.items()]
    lines = [f"# a grid without tuning; the defaults take {default.median_s:.4f} s a step", table.plain(rows)]
    for each in found:
        lines.append(
            f"# from partitions of {each.start}: {each.tuned.found['chosen']} after {each.tuned.found['n_steps']} "
            f"steps, {100 * each.excess:+.1f} % beside the best of the grid {each.best}; slowest step "
            f"{each.tuned.slowest_s / default.median_s:.2f} times the defaults'")
    same = len({each.weights for each in grid.values()} | {default.weights}) == 1
    lines.append(f"# weights of all untuned runs: {'the same, bit for bit' if same else 'DIFFER'}")
    return "\n".join(lines)


def _starts(text: str | None) -> tuple[int, ...]:
    if text is None:
        return STARTS
    words = text.split(",")
    if not all(word.isdecimal() and int(word) >= 4096 for word in words):
        raise ConfigError(f"--starts {text!r}: expected partition sizes in bytes, 4096 or more, such as 64000,65536000")
    return tuple(map(int, words))


def _records(default: Run, grid: Mapping[tuple[int, int, int], Run], found: list[Found]) -> list[dict[str, Any]]:
    untuned = [{"section": "grid", "chosen": {"point": point},
                "measured": {"samples_s": each.times_s, "median_s": each.median_s, "weights": each.weights}}
               for point, each in [(None, default), *grid.items()]]
    return untuned + [{"section": "tuned", "chosen": {"start": each.start, "best": each.best},
                       "measured": {"samples_s": each.tuned.times_s, "found": each.tuned.found, "again_s": each.again,
                                    "excess": each.excess}} for each in found]
