"""``python -m bpsfast.bench.training NAME``: one rank of a job that another launcher has started; rank 0 prints."""
from __future__ import annotations

import statistics
import time

import click

from bpsfast.base import exit_codes
from bpsfast.bench import training
from bpsfast.bench.training import backends
from bpsfast.bench.training.models import MODELS, SIZES


@click.command()
@click.argument("model", type=click.Choice(list(MODELS)))
@click.option("--backend", type=click.Choice(list(backends.BACKENDS)), default="bpsfast", show_default=True)
@click.option("--size", type=click.Choice(SIZES), default="small", show_default=True)
@click.option("--batch", type=click.IntRange(1), help="Samples of a rank in a step.  [default: the model's own]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda for full models]")
@click.option("--data", metavar="PATH", help="A real set: an .npz file or a folder of images.  [default: synthetic]")
@click.option("--warmup", "n_warmup", type=click.IntRange(0), default=10, show_default=True, help="Steps before.")
@click.option("--steps", "n_steps", type=click.IntRange(1), default=10, show_default=True, help="Steps of a round.")
@click.option("--rounds", "n_rounds", type=click.IntRange(1), default=10, show_default=True, help="Each is told.")
@exit_codes.exit_on_error
def main(n_warmup: int, n_steps: int, n_rounds: int, **options: str | int | None) -> None:
    """Train MODEL and print the speed of one rank and of all. The number of ranks is in the launcher's environment."""
    chosen = training.settled({name: value for name, value in options.items() if value is not None})
    backends.check(chosen["backend"])
    from bpsfast.bench.training.rank import TrainingRank

    rank = TrainingRank(**chosen)
    for _ in range(n_warmup):
        rank.step()
    times_s = []
    for number in range(n_rounds):
        rank.barrier()
        begin = time.perf_counter()
        for _ in range(n_steps):
            rank.step()
        times_s.append((time.perf_counter() - begin) / n_steps)
        if not rank.rank:
            click.echo(f"round {number}: {training.speed(chosen, times_s[-1], rank.size).text()}")
    if not rank.rank:
        click.echo(training.speed(chosen, statistics.median(times_s), rank.size).text())
    rank.close()


if __name__ == "__main__":
    main()
