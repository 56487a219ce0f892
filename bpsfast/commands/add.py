"""``bpsfast add``: more workers for an elastic job that runs."""
from __future__ import annotations

import sys
from pathlib import Path

import click

from .exits import FAILED, errors_in_words


@click.command(help="Add workers to the job whose FILE `bpsfast run --elastic --control FILE` has made. They join "
                    "after a commit of the program.")
@click.option("-n", "count", type=click.IntRange(1), default=1, show_default=True, help="How many.")
@click.argument("control", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@errors_in_words
def command(count: int, control: Path) -> None:
    """Add workers to a running job."""
    from ..launch import elastic_job

    added = elastic_job.add(control, count)
    click.echo(f"{added.count} workers are started" if added.count != 1 else "1 worker is started")
    if added.count < count:
        click.echo(f"bpsfast: not {count}: {added.reason}", err=True)
        sys.exit(FAILED)
