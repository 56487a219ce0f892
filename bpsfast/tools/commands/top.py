"""``bpsfast top`` shows a running job by the metrics of its nodes."""
from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TextIO

import click
import msgspec

from ...base import exit_codes, settings
from ..top import scrape, screen, watch
from ..top.sample import Sample
from ..top.watch import MetricsAddress, Watch
from .options import overrides, set_option

#: Default port of nodes, in the range of Prometheus exporters.
_DEFAULT_PORT = 9400
_LEAST_INTERVAL_S = 0.2
_ANY = ("0.0.0.0", "::", "")
#: Number of remarks on the screen.
_N_REMARKS = 4


@click.command()
@click.argument("places", metavar="[HOST[:PORT]]...", nargs=-1)
@click.option("-i", "--interval", "interval_s", type=click.FloatRange(_LEAST_INTERVAL_S), default=1.0,
              show_default=True, metavar="S", help="Seconds between two samples.")
@click.option("--once", is_flag=True, help="Show one sample and exit.")
@click.option("-n", "--samples", "n_samples", type=click.IntRange(1), metavar="N", help="Exit after N samples.")
@click.option("--wait", "wait_s", type=click.FloatRange(0), default=0.0, metavar="S",
              help="Wait up to S seconds for the job to start, and after its end for the next job at the same "
                   "address (as an elastic job has after a loss).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line and sample.")
@click.option("--plain", is_flag=True, help="Print plain tables one after the other, on a terminal, too.")
@set_option
@exit_codes.exit_on_error
def command(places: tuple[str, ...], interval_s: float, once: bool, n_samples: int | None, wait_s: float, as_json: bool,
            plain: bool, assignments: tuple[str, ...]) -> None:
    """Watch a running job: traffic, sums and queue of each node; steps, stalls and lag of each rank; lost nodes.

    Start the job with BPSFAST_METRICS_PORT=9400. This command scrapes that port (or --set metrics_port=N) and the
    following ones, which further nodes of a host use, on this machine or on each HOST. HOST:PORT is a single node. Each
    sample costs one request to each node.

    Exit code 0 when the job has ended, 1 if there is no job or a node with ranks was lost, 4 if nodes do not answer.

    \b
    BPSFAST_METRICS_PORT=9400 bpsfast run -n 4 -- python train.py
    bpsfast top                     in another terminal
    bpsfast top gpu01 gpu02 cpu01   of a job with BPSFAST_METRICS_HOST=0.0.0.0
    bpsfast top --once --json | jq '.ranks[] | {rank, lag_s}'
    bpsfast top --json --interval 10 >job.jsonl
    """
    if once and n_samples:
        raise click.UsageError("--once is --samples 1: give one of them")
    if as_json and plain:
        raise click.UsageError("--json and --plain: choose one")
    loaded = settings.load(overrides(assignments))
    scrape.check()
    host = "127.0.0.1" if loaded.metrics_host in _ANY else loaded.metrics_host
    port = loaded.metrics_port or _DEFAULT_PORT
    chosen = [metrics_address(text, port) for text in places] or [watch.MetricsAddress(host, port)]
    with watch.Watch(chosen) as job:
        job.find(wait_s)
        samples = itertools.islice(sampled(job, interval_s, wait_s), 1 if once else n_samples)
        try:
            n_shown, last = _show(samples, as_json, plain or once)
        except KeyboardInterrupt:
            sys.exit(exit_codes.OK)
    _end(job, n_shown, last, ended=n_shown < (1 if once else n_samples or sys.maxsize))


def metrics_address(text: str, port: int) -> MetricsAddress:
    """Parse HOST or HOST:PORT."""
    if text.count(":") == 1 or text.startswith("["):
        host, number = settings.parse_address(text, "HOST:PORT")
        return MetricsAddress(host, number, is_one=True)
    return MetricsAddress(text, port)


def sampled(job: Watch, interval_s: float, wait_s: float = 0.0) -> Iterator[Sample]:
    """Yield a sample every *interval_s* seconds until no node has listened for *wait_s* seconds."""
    next_s = time.monotonic()
    while True:
        next_s = max(next_s + interval_s, time.monotonic())
        time.sleep(max(0.0, next_s - time.monotonic()))
        sample = job.sample()
        if sample is not None:
            yield sample
        elif not wait_s or not job.find_next(wait_s):
            return


def _show(samples: Iterator[Sample], as_json: bool, plain: bool) -> tuple[int, Sample | None]:
    """Show every sample; return their number and the last one."""
    if not as_json and not plain and sys.stdout.isatty() and _has_rich():
        return _live(samples, sys.stdout)
    number, sample = 0, None
    for number, sample in enumerate(samples, start=1):
        click.echo(msgspec.json.encode(sample).decode() if as_json else ("\n" if number > 1 else "") + screen.text(
            sample, shutil.get_terminal_size((120, 24)).columns))
    return number, sample


def _live(samples: Iterator[Sample], out: TextIO) -> tuple[int, Sample | None]:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=out)
    number, sample = 0, None
    remarks: deque[str] = deque(maxlen=_N_REMARKS)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for sample in samples:
            number += 1
            remarks += sample.remarks
            size = console.size
            live.update(screen.picture(sample, size.width, size.height, remarks), refresh=True)
    if sample is not None:  # leave the last sample on the shell's screen
        console.print(screen.picture(sample, console.size.width, sys.maxsize, remarks))
    return number, sample


def _has_rich() -> bool:
    import importlib.util

    if importlib.util.find_spec("rich") is not None:
        return True
    click.echo("bpsfast: showing plain tables because rich is not installed: pip install 'bpsfast[cli]'", err=True)
    return False


def _end(job: Watch, n_shown: int, last: Sample | None, ended: bool) -> None:
    """Print how the job ended, and exit with the code for it."""
    if ended:
        click.echo(f"bpsfast: the job has ended: no node listens any more, after {n_shown} samples; its launcher "
                   "prints how it ended", err=True)
    if job.missed:
        names = ", ".join(f"node {node}" for node in sorted(job.missed))
        click.echo(f"bpsfast: lost {names} with ranks while other nodes went on", err=True)
        sys.exit(exit_codes.FAILED)
    if last is not None and all(node.state == "silent" for node in last.nodes):
        click.echo("bpsfast: the nodes of the job listen but do not answer; they may be stopped", err=True)
        sys.exit(exit_codes.TIMEOUT)
