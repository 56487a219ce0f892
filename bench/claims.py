"""``python -m bpsfast.bench.claims``: the README's numbers are those of its result files.

Each claim is some words of the README with fields in them, and how the fields follow from `bench/results`. Without
options it says what is different; with ``--write``, as at the end of ``make results``, numbers are replaced where they
stand. Words around them are nobody's but ours: they are to be read again when a number has changed.
"""
from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from bpsfast.bench import drawn
from bpsfast.bench.helpers import Training
from bpsfast.commands import exits
from bpsfast.orchestration.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")
_NUMBER = r"([-+]?\d+(?:\.\d+)?)"
Records = list[Mapping[str, Any]]
Numbers = dict[str, float]


class Claim(NamedTuple):
    """`words` of the README, whose fields are `numbers` of the rows of a result file."""

    file: str
    words: str
    numbers: Callable[[Records], Numbers]

    def pattern(self) -> re.Pattern[str]:
        """Return what finds the words, however their lines are broken, with any numbers in its groups."""
        parts = re.split(_FIELD.pattern, self.words)[::3]
        return re.compile(_NUMBER.join(r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in parts))

    def measured(self, results: Path) -> list[str]:
        """Return the fields as they are to be written.

        Raises
        ------
        ConfigError
            If there is no such file in *results*.
        """
        path = results / self.file
        if path.suffix == ".json":
            if not path.exists():
                raise ConfigError(f"{path} is missing: `make results` writes it")
            rows: Records = [json.loads(path.read_text(encoding="utf-8"))]
        else:
            rows = list(drawn.records(path))
        numbers = self.numbers(rows)
        return [_written(numbers[name], format_) for name, format_ in _FIELD.findall(self.words)]


def _written(value: float, format_: str) -> str:
    text = format(value, format_)
    return format(0.0, format_) if float(text) == 0 else text  # neither -0.00 nor -0


def _eight_and_eight(rows: Records) -> Numbers:
    return {"above": 100 * _time(rows, "optimal", 8) - 100}


def _naive(rows: Records) -> Numbers:
    return {"faster": max(100 * _time(rows, "optimal", n) / _time(rows, "ps", n) - 100 for n in (2, 4, 8))}


def _time(rows: Records, contestant: str, n: int) -> float:
    [time] = [float(row["measured"]["time"]) for row in rows if row["chosen"]["contestant"] == contestant
              and row["chosen"]["n_workers"] == row["chosen"]["n_helpers"] == n]
    return time


def _peers(rows: Records) -> Numbers:
    gloo, mpi, in_place = drawn.times_ours(rows).values()
    slower = [nbytes for nbytes in in_place if in_place[nbytes] >= mpi[nbytes]]
    return {"least": min(gloo.values()), "most": max(gloo.values()), "mpi": max(1 / mpi[nbytes] for nbytes in mpi),
            "at_kb": min(mpi, key=mpi.__getitem__) // 1024,
            "from_kb": min(nbytes for nbytes in in_place if nbytes > max(slower, default=0)) // 1024}


def _ddp(rows: Records) -> Numbers:
    medians = {(row["chosen"]["operation"], row["chosen"]["contestant"]): row["measured"]["median_s"]
               for row in rows if row["section"] == "step"}
    return {name: medians[f"{name}-bound", "gloo"] / medians[f"{name}-bound", "bpsfast"]
            for name in ("comm", "compute")}


def _schedule(rows: Records) -> Numbers:
    step = {row["chosen"]["way"]: (row["measured"]["median_s"], row["simulated"]["step_s"]) for row in rows}
    ours = step["priority, crossing"]
    return {f"{name}{kind}": step[way][at] / ours[at] for name, way in (("fifo", "fifo"), ("ddp", "DDP gloo"))
            for at, kind in enumerate(("", "_simulated"))}


def _helpers(rows: Records) -> Numbers:
    calm, disturbed = (Training(**row) for row in rows if "at_s" in row)
    return {"times": max(disturbed.steps_s) / statistics.median(calm.steps_s)}


def _by_codec(of: Callable[[Mapping[str, Any]], Numbers],
              machines: str | None = None) -> Callable[[Records], Numbers]:
    def numbers(rows: Records) -> Numbers:
        return {f"{row['chosen']['codec'].partition(':')[0]}{name}": value for row in rows
                if machines in (None, row["section"]) and row["chosen"]["codec"].endswith("error_feedback")
                for name, value in of(row["measured"]).items()}

    return numbers


def _points(measured: Mapping[str, Any]) -> Numbers:
    points = measured["points"]
    return {"": statistics.fmean(points), "_error": statistics.stdev(points) / len(points) ** 0.5}


def _rows(rows: Records) -> Numbers:
    shares = [nbytes / row["measured"]["nbytes"] for row in rows if row["section"] == "rows"
              for nbytes in row["measured"]["sent_nbytes"]]
    return {"share": 100 * statistics.median(shares)}


def _autotune(rows: Records) -> Numbers:
    small, large = (row["measured"]["excess"] for row in rows if row["section"] == "tuned")
    return {"small": 100 * small, "large": 100 * large}


def _neighbour(rows: Records) -> Numbers:
    change = {row["chosen"]["load"]: row["measured"]["change_median"] for row in rows
              if row["chosen"]["contestant"] == "quota"}
    return {"half": 100 * change[0.5], "full": 100 * change[1.0]}


def _ladder(rows: Records) -> Numbers:
    medians = {(row["chosen"]["model"], row["chosen"]["rung"]): row["measured"]["median_s"] for row in rows
               if row["section"] == "ladder"}
    return _range(medians[model, "vanilla"] / medians[model, "ours"] for model, rung in medians if rung == "ours")


def _frameworks(rows: Records) -> Numbers:
    medians = {(row["workload"], row["row"]): row["median_s"] for row in rows}
    found: Numbers = {}
    for prefix, workload in (("large_", "64 MB"), ("small_", "161 small tensors")):
        changes = _range(100 * (median / medians[workload, "numpy"] - 1) for (of, row), median in medians.items()
                         if of == workload and not row.startswith("numpy"))
        found |= {prefix + name: value for name, value in changes.items()}
    return found


def _range(values: Iterable[float]) -> Numbers:
    found = list(values)
    return {"least": min(found), "most": max(found)}


def _expr3(rows: Records) -> Numbers:
    errors = [abs(cell["error"]) for cell in rows[0]["cells"] if (cell["figure"], cell["at"]) == ("15/16", "256 GPUs")]
    return {"points": 100 * statistics.fmean(errors)}


#: In the README's order.
CLAIMS = (
    Claim("push_pull_one_machine.jsonl", "MPI is faster below {from_kb:.0f} KB", _peers),
    Claim("optimum_full.jsonl", "Eight workers and as many helpers are {above:.1f} % above the optimum",
          _eight_and_eight),
    Claim("optimum_full.jsonl", "as many helpers as workers ({faster:.1f} % faster at most)", _naive),
    Claim("push_pull_one_machine.jsonl", "gloo takes {least:.1f} to {most:.0f} times as long as", _peers),
    Claim("push_pull_one_machine.jsonl", "Open MPI is faster, by up to {mpi:.0f} times for {at_kb:.0f} KB", _peers),
    Claim("push_pull_one_machine.jsonl", "ours is the faster one from {from_kb:.0f} KB on", _peers),
    Claim("ddp.jsonl", "makes {comm:.1f} times gloo's steps where communication bounds it, and "
          "{compute:.2f} times where", _ddp),
    Claim("schedule.jsonl", "a step in 1/{fifo:.2f} of `fifo`'s time and 1/{ddp:.2f} of DistributedDataParallel's over "
          "gloo; the simulator says 1/{fifo_simulated:.2f} and 1/{ddp_simulated:.2f}", _schedule),
    Claim("helpers.jsonl", "step is {times:.1f} times a median one", _helpers),
    Claim("compressed.jsonl", "{topk:.1f} (`topk` 1 %), {onebit:.1f} (`onebit`), {int8:.1f} (`int8`)",
          _by_codec(lambda measured: {"": measured["speed"]}, "4 machines")),
    Claim("accuracy.jsonl", "{topk:.2f} +- {topk_error:.2f}, {onebit:.2f} +- {onebit_error:.2f}, {int8:.2f} +- "
          "{int8_error:.2f}", _by_codec(_points)),
    Claim("rows.jsonl", "share of the dense bytes | {share:.2f} %", _rows),
    Claim("autotune.jsonl", "distance to the best of a grid | {small:+.1f} %, {large:+.1f} %", _autotune),
    Claim("neighbour.jsonl", "{half:+.1f} % at half load, {full:+.1f} % at full", _neighbour),
    Claim("ladder.jsonl", "all left out: times of ours | {least:.0f} to {most:.0f}", _ladder),
    Claim("frameworks.jsonl", "{large_least:+.0f} to {large_most:+.0f} %; {small_most:+.0f} to {small_least:+.0f} %",
          _frameworks),
    Claim("expr3.json", "mean absolute error | {points:.1f} points", _expr3),
)


class Difference(NamedTuple):
    """A claim whose numbers in the text are not those of its file."""

    claim: Claim
    said: list[str]
    measured: list[str]

    def __str__(self) -> str:
        return (f"{self.claim.file}: {', '.join(self.measured)} where the README says {', '.join(self.said)} "
                f"({self.claim.words!r})")


def differences(text: str, results: Path = drawn.RESULTS) -> Iterator[Difference]:
    """Yield the claims that *text* makes with other numbers than the files in *results*.

    Raises
    ------
    ConfigError
        A claim's words do not stand in *text* once; or its file is missing.
    """
    for claim in CLAIMS:
        found = claim.pattern().findall(text)
        if len(found) != 1:
            raise ConfigError(f"these words stand {len(found)} times in the text, not once: {claim.words!r}; "
                              "bench/claims.py has to say what the text says")
        said = [found[0]] if isinstance(found[0], str) else list(found[0])
        measured = claim.measured(results)
        if said != measured:
            yield Difference(claim, said, measured)


def renewed(text: str, different: Iterable[Difference]) -> str:
    """Return *text* with the numbers that were measured; line breaks stay where they are."""
    for claim, _, measured in different:
        match = claim.pattern().search(text)
        assert match is not None, "it was found there"
        for group in range(len(measured), 0, -1):
            text = text[:match.start(group)] + measured[group - 1] + text[match.end(group):]
    return text


def renew(path: Path = ROOT / "README.md", results: Path = drawn.RESULTS, write: bool = True) -> list[Difference]:
    """Return what *path* says otherwise than *results*, and, if it is to be written, say it there."""
    text = path.read_text(encoding="utf-8")
    found = list(differences(text, results))
    if write and found:
        path.write_text(renewed(text, found), encoding="utf-8")
    return found


@click.command()
@click.option("--write", is_flag=True, help="Replace the numbers; read the words around them again.")
@exits.errors_in_words
def main(write: bool) -> None:
    """Say which numbers of the README are not those of its result files. Exit code 1 if there are any."""
    found = renew(write=write)
    for each in found:
        click.echo(str(each))
    click.echo(f"{len(CLAIMS) - len(found)} of {len(CLAIMS)} claims are those of their files"
               + (", the others are now" if write and found else ""))
    if found and not write:
        sys.exit(exits.FAILED)


if __name__ == "__main__":
    main()
