"""``bpsfast trace`` merges and summarizes the traces of a job that ran with ``trace_dir``."""
from __future__ import annotations

from pathlib import Path

import click

from ...base import exit_codes, output
from ..trace import job_trace
from ..trace.summary import summarise
from .options import FullHelpGroup


@click.group(cls=FullHelpGroup)
def command() -> None:
    """Merge the traces of a job's processes, or summarize where the time of a step went.

    \b
    BPSFAST_TRACE_DIR=out bpsfast run -n 4 --nodes 2 -- python train.py
    bpsfast trace summary out
    bpsfast trace merge out -o trace.json
    """


@command.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("-o", "--output", "path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="The merged trace.  [default: DIR/trace.json]")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON document.")
@exit_codes.exit_on_error
def merge(folder: Path, path: Path | None, as_json: bool) -> None:
    """Merge the files in a job's trace_dir into one trace, on the scheduler's clock.

    Open it in ui.perfetto.dev. Arrows lead from a rank's gradient through its sums to the result; priority inversions
    are marked. If the job ran on several machines, copy all files to DIR first.

    \b
    bpsfast trace merge out -o trace.json
    """
    path = path or folder / "trace.json"
    job = job_trace.load(folder)
    n_events = job_trace.dump(job, path)
    clocks = summarise(job).clocks_line
    words = f"{path}: {n_events} events of {len(job.processes)} processes. Open it in ui.perfetto.dev\n{clocks}"
    output.show(output.OutputOptions(as_json), lambda: words,
                {"path": str(path), "events": n_events, "processes": len(job.processes), "clocks": clocks})


@command.command()
@click.argument("place", metavar="DIR|FILE", type=click.Path(path_type=Path))
@output.options()
@exit_codes.exit_on_error
def summary(place: Path, form: output.OutputOptions) -> None:
    """Summarize in five lines where the time of a step went.

    Reads a job's trace_dir, or the file that `bpsfast trace merge` wrote. Times are per step; computing, copying and
    waiting are means over the ranks.

    \b
    bpsfast trace summary out
    bpsfast trace summary trace.json --json
    """
    found = summarise(job_trace.load(place) if place.is_dir() else job_trace.reload(place))
    output.show(form, lambda: "\n".join(found.lines()), found.data())
