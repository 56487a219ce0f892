"""Compares the numbers of the READMEs with the result files, or replaces them: `python -m bpsfast.bench.claims`.

Each claim is some words of a page with fields in them, and a function that computes the fields from `bench/results`.
Without options the command prints the differences; with ``--write``, as at the end of ``make results``, it replaces the
numbers. The words around them must be read again when a number has changed.
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

from bpsfast.base import exit_codes
from bpsfast.bench import drawn
from bpsfast.bench.autotune import Run
from bpsfast.bench.helpers import Training
from bpsfast.bench.push_pull import paired
from bpsfast.orchestration.errors import ConfigError

_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")
_NUMBER = r"([-+]?\d+(?:,\d{3})*(?:\.\d+)?)"
Records = list[Mapping[str, Any]]
Numbers = dict[str, float]


class Claim(NamedTuple):
    """Words of a README; their fields are computed by `numbers` from the rows of a result file."""

    file: str
    words: str
    numbers: Callable[[Records], Numbers]

    def pattern(self) -> re.Pattern[str]:
        """Return an expression that finds the words with any numbers, and any line breaks; numbers are its groups."""
        parts = re.split(_FIELD.pattern, self.words)[::3]
        return re.compile(_NUMBER.join(r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in parts))

    def measured(self, results: Path) -> list[str]:
        """Return the fields as they are to be written; raise `ConfigError` if *results* has no such file."""
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
    return format(0.0, format_.replace("+", "")) if float(text.replace(",", "")) == 0 else text  # zero has no sign


def eight_and_eight(rows: Records) -> Numbers:
    """Return by how much eight workers with eight helpers are above the optimum, in percent."""
    return {"above": 100 * _optimum_time(rows, "optimal", 8) - 100}


def naive(rows: Records) -> Numbers:
    """Return by how much BytePS's rule is faster, at most, with as many helpers as workers, in percent."""
    return {"faster": max(100 * _optimum_time(rows, "optimal", n) / _optimum_time(rows, "ps", n) - 100
                          for n in (2, 4, 8))}


def _optimum_time(rows: Records, contestant: str, n: int) -> float:
    [time] = [float(row["measured"]["time"]) for row in rows if row["chosen"]["contestant"] == contestant
              and row["chosen"]["n_workers"] == row["chosen"]["n_helpers"] == n]
    return time


def beside_mpi(rows: Records) -> Numbers:
    """Return the least and the greatest times of the best MPI library, and of gloo, divided by ours, by size ranges."""
    ranges = {"small": (0, 64 << 10), "middle": (64 << 10, 32 << 20), "large": (32 << 20, 1 << 40)}
    found: dict[str, dict[int, list[float]]] = {name: {} for name in ("numpy", "torch", "gloo")}
    for (_, nbytes), medians in paired.samples_us(rows).items():
        best = paired.best_mpi_us(medians)
        for name, ours, theirs in (("numpy", medians["numpy"], best), ("torch", medians["torch"], best),
                                   ("gloo", medians["backend"], medians["gloo"])):
            found[name].setdefault(nbytes, []).append(paired.interval(ours, theirs)[0])
    numbers: Numbers = {}
    for name, of in found.items():
        for part, (above, to) in ranges.items():
            ratios = [min(each) for nbytes, each in of.items() if above < nbytes <= to]
            numbers |= {f"{name}_{part}_least": min(ratios), f"{name}_{part}_most": max(ratios)}
    return numbers


def ddp(rows: Records) -> Numbers:
    """Return the time of a DistributedDataParallel step with gloo, divided by ours."""
    medians = {(row["chosen"]["operation"], row["chosen"]["contestant"]): row["measured"]["median_s"]
               for row in rows if row["section"] == "step"}
    return {name: medians[f"{name}-bound", "gloo"] / medians[f"{name}-bound", "bpsfast"]
            for name in ("comm", "compute")}


def schedule(rows: Records) -> Numbers:
    """Return step times of other methods divided by that of priority without a barrier, measured and simulated."""
    step = {row["chosen"]["way"]: (row["measured"]["median_s"], row["simulated"]["step_s"]) for row in rows}
    ours = step["priority, crossing"]
    return {f"{name}{kind}": step[way][at] / ours[at] for name, way in (("fifo", "fifo"), ("ddp", "DDP gloo"))
            for at, kind in enumerate(("", "_simulated"))}


def breakdown(rows: Records) -> Numbers:
    """Return the speed with each part of the design over all-reduce, and the simulator's largest error, in %."""
    step = {row["chosen"]["part"]: (row["measured"]["median_s"], row["simulated"]["step_s"])
            for row in rows if row["section"] == "packets"}
    all_reduce, split, priority, crossing = (step[part][0] for part in (
        "all-reduce, FIFO", "+ optimal split", "+ priority and credit", "+ cross-barrier"))
    return {"split": all_reduce / split, "priority": all_reduce / priority, "crossing": all_reduce / crossing,
            "off": max(100 * abs(simulated / measured - 1) for measured, simulated in step.values())}


def helpers(rows: Records) -> Numbers:
    """Return the longest step while helpers are lost and added, divided by the median step."""
    calm, disturbed = (Training(**row) for row in rows if "at_s" in row)
    return {"times": max(disturbed.steps_s()) / statistics.median(calm.steps_s())}


def codec(name: str) -> Callable[[Records], Numbers]:
    """Return a function: shares of memcpy's speed on float32, and the time to encode 4 MB."""
    def numbers(rows: Records) -> Numbers:
        by = {row["chosen"]["contestant"]: row for row in rows
              if (row["chosen"]["codec"], row["chosen"]["dtype"]) == (name, "float32")}
        found = {field: by[way]["measured"]["of_memcpy"] for field, way in
                 (("encode", "encode"), ("fed", "encode, error feedback"), ("decode", "decode"))}
        time_s = by["encode"]["measured"]["median_s"]
        return found | {"ms": 1e3 * time_s, "gbits": 8e-9 * by["encode"]["chosen"]["nbytes"] / time_s}

    return numbers


def compressed(name: str) -> Callable[[Records], Numbers]:
    """Return a function: figures of a step with codec *name*, by the number of machines."""
    def numbers(rows: Records) -> Numbers:
        found: Numbers = {}
        for row in rows:
            if row["chosen"]["codec"] == name:
                n, measured = row["chosen"]["n_machines"], row["measured"]
                found |= {f"ms{n}": 1e3 * measured["median_s"], f"speed{n}": measured["speed"],
                          f"expected{n}": 1e3 * measured["expected_s"],
                          f"sent{n}": statistics.median(map(max, measured["sent_nbytes"])) / 1e6,
                          f"above{n}": 100 * measured["median_s"] / measured["expected_s"] - 100}
        return found

    return numbers


def speeds(rows: Records) -> Numbers:
    """Return by codec with error feedback: the speed on four machines over uncompressed training."""
    return {_short(row): row["measured"]["speed"] for row in rows
            if row["section"] == "4 machines" and row["chosen"]["codec"].endswith("error_feedback")}


def accuracies(rows: Records) -> Numbers:
    """By codec with error feedback: points of accuracy won, the standard error, and by which its bytes are fewer."""
    found: Numbers = {}
    [uncompressed] = (row["measured"] for row in rows if row["chosen"]["codec"] == "uncompressed")
    for row in rows:
        points, sent = row["measured"]["points"], row["measured"]["sent_nbytes"]
        if row["chosen"]["codec"].endswith("error_feedback"):
            name = _short(row)
            found |= {name: statistics.fmean(points), f"{name}_error": statistics.stdev(points) / len(points) ** 0.5,
                      f"{name}_fewer": statistics.median(uncompressed["sent_nbytes"]) / statistics.median(sent)}
    return found | {"uncompressed": 100 * statistics.fmean(uncompressed["accuracy"])}


def _short(row: Mapping[str, Any]) -> str:
    return str(row["chosen"]["codec"]).partition(":")[0]


def of_table(rows: Records) -> Numbers:
    """Return what a machine sends of a table's rows, rank 0's step time, and its node's memory."""
    both = [row["measured"] for row in rows if row["section"] == "rows"]
    [first] = [row["measured"] for row in rows if row["section"] == "rows" and row["chosen"]["rank"] == 0]
    shares = [nbytes / measured["nbytes"] for measured in both for nbytes in measured["sent_nbytes"]]
    return {"share": 100 * statistics.median(shares), "mb": statistics.median(first["sent_nbytes"]) / 1e6,
            "ms": 1e3 * statistics.median(first["samples_s"]),
            "memory": first["memory_nbytes"]["memory_segments"] / 1e6}


def tuned(rows: Records) -> Numbers:
    """Return how far tuning ends from the grid's best, in %, by start; and the slowest step over the defaults'."""
    [defaults] = [row["measured"] for row in rows if row["section"] == "grid" and row["chosen"]["point"] is None]
    small, large = (row["measured"] for row in rows if row["section"] == "tuned")
    slowest_s = max(Run("", each["samples_s"], {}).slowest_s for each in (small, large))
    return {"small": 100 * small["excess"], "large": 100 * large["excess"], "slowest": slowest_s / defaults["median_s"]}


def neighbour(rows: Records) -> Numbers:
    """Return by helper and load of the other job: how much longer its steps are, in %, and Gbit/s served."""
    found: Numbers = {}
    for row in rows:
        name, measured = f"{row['chosen']['contestant']}{100 * row['chosen']['load']:.0f}", row["measured"]
        found |= {f"{name}_served": measured["served_gbps"], f"{name}_median": 100 * measured["change_median"],
                  f"{name}_p95": 100 * measured["change_p95"]}
    return found


def ladder(rows: Records) -> Numbers:
    """Return the range over models of all mistakes together: step times divided by ours, and by tcp's."""
    medians = _ladder_medians(rows)
    models = {model for model, _ in medians}
    by_ours, by_tcp = ([medians[model, "vanilla"] / medians[model, other] for model in models]
                       for other in ("ours", "tcp"))
    return _range(by_ours) | {f"tcp_{name}": value for name, value in _range(by_tcp).items()}


def of_rung(name: str) -> Callable[[Records], Numbers]:
    """Return a function: a mistake's step time divided by ours, by model."""
    def numbers(rows: Records) -> Numbers:
        medians = _ladder_medians(rows)
        return {model.partition("-")[0]: medians[model, name] / medians[model, "ours"]
                for model, each in medians if each == name}

    return numbers


def _ladder_medians(rows: Records) -> dict[tuple[str, str], float]:
    return {(row["chosen"]["model"], row["chosen"]["rung"]): row["measured"]["median_s"] for row in rows
            if row["section"] == "ladder"}


def frameworks(rows: Records) -> Numbers:
    """Return how much longer (and, *less*, shorter) adapters take than NumPy's arrays, in percent."""
    medians = {(row["workload"], row["row"]): row["median_s"] for row in rows}
    found: Numbers = {}
    for prefix, workload in (("large_", "64 MB"), ("small_", "161 small tensors")):
        changes = _range(100 * (median / medians[workload, "numpy"] - 1) for (of, row), median in medians.items()
                         if of == workload and not row.startswith("numpy"))
        found |= {prefix + name: value for name, value in changes.items()}
    return found | {"least_less": -found["small_most"], "most_less": -found["small_least"]}


def expr3(rows: Records) -> Numbers:
    """Return the simulator's mean error against the paper on 256 GPUs, in points."""
    errors = [abs(cell["error"]) for cell in rows[0]["cells"] if (cell["figure"], cell["at"]) == ("15/16", "256 GPUs")]
    return {"points": 100 * statistics.fmean(errors)}


def _range(values: Iterable[float]) -> Numbers:
    found = list(values)
    return {"least": min(found), "most": max(found)}


#: In the README's order.
_README = (
    Claim("optimum_full.jsonl", "Eight workers and as many helpers are {above:.1f} % above the optimum",
          eight_and_eight),
    Claim("optimum_full.jsonl", "as many helpers as workers ({faster:.1f} % faster at most)", naive),
    Claim("push_pull_one_machine.jsonl", "takes {numpy_small_least:.1f} to {numpy_small_most:.1f} times as long as "
          "`push_pull` of NumPy's arrays up to 64 KB, {numpy_middle_least:.1f} to {numpy_middle_most:.1f} times up to "
          "32 MB, and {numpy_large_least:.2f} to {numpy_large_most:.2f} times beyond", beside_mpi),
    Claim("push_pull_one_machine.jsonl", "for PyTorch's tensors {torch_small_least:.1f} to {torch_small_most:.1f}, "
          "{torch_middle_least:.1f} to {torch_middle_most:.1f} and {torch_large_least:.2f} to {torch_large_most:.2f}",
          beside_mpi),
    Claim("push_pull_one_machine.jsonl", "gloo takes {gloo_small_least:.0f} to {gloo_small_most:.0f} times as long as "
          "the backend bpsfast up to 64 KB, {gloo_middle_least:.1f} to {gloo_middle_most:.0f} times up to 32 MB, and "
          "{gloo_large_least:.1f} to {gloo_large_most:.1f} times beyond", beside_mpi),
    Claim("ddp.jsonl", "makes {comm:.1f} times gloo's steps where communication bounds it, and "
          "{compute:.2f} times where", ddp),
    Claim("schedule.jsonl", "a step in 1/{fifo:.2f} of `fifo`'s time and 1/{ddp:.2f} of DistributedDataParallel's over "
          "gloo; the simulator says 1/{fifo_simulated:.2f} and 1/{ddp_simulated:.2f}", schedule),
    Claim("helpers.jsonl", "step is {times:.1f} times a median one", helpers),
    Claim("compressed.jsonl", "{topk:.1f} (`topk` 1 %), {onebit:.1f} (`onebit`), {int8:.1f} (`int8`)",
          speeds),
    Claim("accuracy.jsonl", "{topk:.2f} +- {topk_error:.2f}, {onebit:.2f} +- {onebit_error:.2f}, {int8:.2f} +- "
          "{int8_error:.2f}", accuracies),
    Claim("rows.jsonl", "share of the dense bytes | {share:.2f} %", of_table),
    Claim("autotune.jsonl", "distance to the best of a grid | {small:+.1f} %, {large:+.1f} %", tuned),
    Claim("neighbour.jsonl", "{quota50_median:+.1f} % at half load, {quota100_median:+.1f} % at full",
          neighbour),
    Claim("ladder.jsonl", "all left out: times of ours | {least:.0f} to {most:.0f}", ladder),
    Claim("frameworks.jsonl", "{large_least:+.0f} to {large_most:+.0f} %; {small_most:+.0f} to {small_least:+.0f} %",
          frameworks),
    Claim("expr3.json", "mean absolute error | {points:.1f} points", expr3),
)


#: Names in the tables -> names in the result files.
_CODECS = {"onebit": "onebit", "topk 1 %": "topk 1%", "topk 10 %": "topk 10%", "randomk 1 %": "randomk 1%",
           "float16": "float16", "int8": "int8", "dithering, 4 levels": "dithering 4"}
_COMPRESSED = {"`topk` 1 %, error feedback": "topk:k=0.01,error_feedback",
               "`randomk` 1 %, error feedback": "randomk:k=0.01,error_feedback", "`onebit`": "onebit",
               "`onebit`, error feedback": "onebit:error_feedback", "`int8`, error feedback": "int8:error_feedback",
               "`float16`": "float16"}
_ACCURACIES = {"topk": "`topk` 1 %", "randomk": "`randomk` 1 %", "onebit": "`onebit`",
               "dithering": "`dithering`, 4 levels", "int8": "`int8`", "float16": "`float16`", "bfloat16": "`bfloat16`"}
_RUNGS = ("register per step", "rendezvous per step", "memcpy at both ends", "loopback through NIC", "unaligned",
          "two SGEs", "no concurrent TX", "vanilla", "tcp", "tcp, shared memory")

_TABLES = (
    *(Claim("codecs.jsonl", f"| {shown} | {{encode:.2f}} | {{fed:.2f}} | {{decode:.2f}} |", codec(name))
      for shown, name in _CODECS.items()),
    Claim("codecs.jsonl", "element by element: {ms:.0f} ms for 4 MB, {gbits:.0f} Gbit/s", codec("dithering 4")),
    Claim("compressed.jsonl", "| uncompressed | {ms2:,.0f} ms | 1 | {expected2:,.0f} ms | {sent2:#.3g} MB | "
          "{ms4:,.0f} ms | 1 | {expected4:,.0f} ms | {sent4:#.3g} MB |", compressed("uncompressed")),
    *(Claim("compressed.jsonl", f"| {shown} | {{ms2:,.0f}} ms | {{speed2:.1f}} | {{expected2:,.0f}} ms | "
            "{sent2:#.3g} MB | {ms4:,.0f} ms | {speed4:.1f} | {expected4:,.0f} ms | {sent4:#.3g} MB |",
            compressed(codec)) for shown, codec in _COMPRESSED.items()),
    Claim("compressed.jsonl", "steps without a codec are {above4:.0f} % above the formula",
          compressed("uncompressed")),
    Claim("rows.jsonl", "{mb:.1f} MB, {share:.2f} % of the dense bytes, in {ms:.0f} ms; its node holds {memory:.0f} MB",
          of_table),
    Claim("frameworks.jsonl", "64 MB take {large_least:.0f} to {large_most:.0f} % longer than NumPy's; 161 tensors of "
          "1 kB, which the adapters hand over as one call, {least_less:.0f} to {most_less:.0f} % less",
          frameworks),
    Claim("schedule.jsonl", "takes a step in 1/{fifo:.2f} of `fifo`'s time (simulated {fifo_simulated:.2f}) and "
          "1/{ddp:.2f} of DDP's", schedule),
    Claim("breakdown.jsonl", "the optimal split makes a step {split:.2f} times as fast as DistributedDataParallel's "
          "over gloo, priority and credit {priority:.2f} times, and without a barrier it is {crossing:.2f} times as "
          "fast. All four are within {off:.1f} % of the simulator", breakdown),
    Claim("accuracy.jsonl", "uncompressed training reaches {uncompressed:.2f} %", accuracies),
    *(Claim("accuracy.jsonl", f"| {shown} | 1/{{{name}_fewer:.1f}} | {{{name}:+.2f}} +- {{{name}_error:.2f}} |",
            accuracies) for name, shown in _ACCURACIES.items()),
    Claim("autotune.jsonl", "it ends at {small:+.1f} % and {large:+.1f} %, and no step took more than {slowest:.2f} "
          "times the defaults'", tuned),
    *(Claim("ladder.jsonl", f"| `{rung}` | {{vgg19:.2f}} | {{resnet50:.2f}} | {{inception:.2f}} |", of_rung(rung))
      for rung in _RUNGS),
    Claim("ladder.jsonl", "Vanilla loses to tcp with all three, by {tcp_least:.0f} to {tcp_most:.0f} times",
          ladder),
    *(Claim("neighbour.jsonl", f"| {load} % | `{helper}` | {{{helper}{load}_served:.3f}} | "
            f"{{{helper}{load}_median:+.1f}} % | {{{helper}{load}_p95:+.0f}} % |", neighbour)
      for load in (50, 100) for helper in ("quota", "free")),
)

ROOT = Path(__file__).resolve().parents[1]
#: By page, whose path begins at the project's folder.
CLAIMS = {"README.md": _README, "bench/README.md": _TABLES}


class Difference(NamedTuple):
    """A claim whose numbers in the text differ from those of its file."""

    claim: Claim
    said: list[str]
    measured: list[str]

    def __str__(self) -> str:
        return (f"{self.claim.file}: {', '.join(self.measured)} where the page says {', '.join(self.said)} "
                f"({self.claim.words!r})")


def differences(text: str, claims: Iterable[Claim], results: Path = drawn.RESULTS) -> Iterator[Difference]:
    """Yield the *claims* that *text* makes with other numbers than the files in *results*.

    Raises `ConfigError` if a claim's words are not in *text* exactly once, or its file is missing.
    """
    for claim in claims:
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


def renew(folder: Path = ROOT, results: Path = drawn.RESULTS, write: bool = True) -> list[tuple[str, Difference]]:
    """Return by page where pages in *folder* differ from *results*; if *write* says so, replace their numbers."""
    found = []
    for page, claims in CLAIMS.items():
        text = (folder / page).read_text(encoding="utf-8")
        different = list(differences(text, claims, results))
        if write and different:
            (folder / page).write_text(renewed(text, different), encoding="utf-8")
        found += [(page, each) for each in different]
    return found


@click.command()
@click.option("--write", is_flag=True, help="Replace the numbers; read the words around them again.")
@exit_codes.exit_on_error
def main(write: bool) -> None:
    """Print which numbers of the READMEs differ from their result files. Exit code 1 if there are any."""
    found = renew(write=write)
    for page, each in found:
        click.echo(f"{page}: {each}")
    n = sum(map(len, CLAIMS.values()))
    click.echo(f"{n - len(found)} of {n} claims are those of their files"
               + (", the others are now" if write and found else ""))
    if found and not write:
        sys.exit(exit_codes.FAILED)


if __name__ == "__main__":
    main()
