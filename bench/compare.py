"""``bpsfast compare``: compares two result files of a benchmark, row by row."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bpsfast.base import exit_codes, output

if TYPE_CHECKING:
    from .harness.result_file import ResultFile
    from .regression import Regression

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
#: If the cores of a run are at least this many times as far apart as in another run, they share no cache.
_FAR = 2.5
_COLORS = {"slower": "red", "faster": "green"}


@click.command()
@click.argument("before_path", metavar="A", type=_FILE)
@click.argument("after_path", metavar="B", type=_FILE)
@click.option("--confidence", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.95,
              show_default=True, help="Confidence level of the intervals.")
@click.option("--threshold", type=click.FloatRange(0), default=0.05, show_default=True,
              help="Ignore changes up to this share.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the bootstrap.")
@click.option("--fail-on-slower", is_flag=True, help="Exit with code 1 if a row is slower.")
@click.option("--any-bench", is_flag=True, help="Allow files of different benchmarks; rows are matched by name.")
@click.option("--any-machine", is_flag=True, help="Allow files of different machines.")
@output.options(tabular=True)
@exit_codes.exit_on_error
def command(before_path: Path, after_path: Path, confidence: float, threshold: float, seed: int, fail_on_slower: bool,
            any_bench: bool, any_machine: bool, form: output.OutputOptions) -> None:
    """Show which rows of result file B are slower than in A, with confidence intervals.

    \b
    bpsfast bench push_pull --json before.jsonl      (then change something)
    bpsfast bench push_pull --json after.jsonl
    bpsfast compare before.jsonl after.jsonl --fail-on-slower

    The ratio is the median time of B divided by that of A; its interval is a bootstrap over rounds. "unclear" means
    that the interval contains both a change and no change, or that a file has fewer than three rounds (as --quick may
    have). Other load on the machine also makes two runs differ.
    """
    from . import regression
    from .harness import result_file

    before, after = result_file.read(before_path), result_file.read(after_path)
    regression.check(before, after, any_bench, any_machine)
    found = regression.compare(before.series, after.series, confidence, threshold, seed)
    head = ["row", "before_s", "after_s", "ratio", "low", "high", "verdict"]
    output.show(form, lambda: _text(before, after, found), {"before": before.path, "after": after.path,
                                                            "confidence": confidence, **found.data()},
                [head, *([row.name, row.before_s, row.after_s, row.ratio, row.low, row.high, row.verdict]
                         for row in found.rows)])
    if fail_on_slower and any(row.verdict == regression.SLOWER for row in found.rows):
        raise SystemExit(exit_codes.FAILED)


def _text(before: ResultFile, after: ResultFile, found: Regression) -> str:
    cells = [["row", "A", "B", "B / A", "from", "to", ""]]
    for name, row in zip(_without_common([row.name for row in found.rows]), found.rows):
        cells.append([name, _time(row.before_s), _time(row.after_s), f"{row.ratio:.3f}",
                      f"{row.low:.3f}", f"{row.high:.3f}", click.style(row.verdict, fg=_COLORS.get(row.verdict))])
    lines = [output.table(cells, right=range(1, 6)), ""]
    verdicts = [row.verdict for row in found.rows]
    lines.append(", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts)))
    for names, file in ((found.only_before, "A"), (found.only_after, "B")):
        if names:
            lines.append(f"only in {file}: {len(names)} rows, such as {names[0]}")
    loads = [float(file.machine.get("load_average", [0.0])[0]) for file in (before, after)]
    lines.append(f"load average at the end: A {loads[0]:.1f}, B {loads[1]:.1f}")
    handover_ns = [float(file.machine.get("handover_ns") or 0.0) for file in (before, after)]
    if all(handover_ns):
        far = max(handover_ns) > _FAR * min(handover_ns)
        lines.append(f"a cache line between cores at the end: A {handover_ns[0]:.0f} ns, B {handover_ns[1]:.0f} ns"
                     + ("; they share a cache in one only, so compare within one run (bpsfast explain RD21)" if far
                        else ""))
    return "\n".join(lines)


def _without_common(names: list[str]) -> list[str]:
    """Return *names* without the parts that are common to all of them."""
    parts = [name.split(", ") for name in names]
    common = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    return [", ".join(part for part in each if part not in common) or name for each, name in zip(parts, names)]


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"
