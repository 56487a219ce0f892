"""``bpsfast add``: more workers for an elastic job that runs."""
from __future__ import annotations

import sys
from pathlib import Path

import click

from ...base import output
from ...base.command_errors import FAILED, exit_on_error


@click.command()
@click.option("-n", "count", type=click.IntRange(1), default=1, show_default=True, help="How many.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.argument("control", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@exit_on_error
def add(count: int, control: Path, as_json: bool) -> None:
    """Add workers to the job whose FILE `bpsfast run --elastic --control FILE` has made.

    They join after a commit of the program. Exit code 1 if fewer than asked for are started.

    \b
    bpsfast run -n 2 --elastic --max-ranks 4 --control FILE -- python train.py
    bpsfast add -n 2 FILE           in another terminal
    """
    from ...launch import elastic_job

    added = elastic_job.add(control, count)
    words = f"{added.count} workers are started" if added.count != 1 else "1 worker is started"
    output.show(output.OutputOptions(as_json), lambda: words,
                {"asked": count, "added": added.count, "reason": added.reason if added.count < count else ""})
    if added.count < count:
        click.echo(f"bpsfast: not {count}: {added.reason}", err=True)
        sys.exit(FAILED)
