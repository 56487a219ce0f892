"""``bpsfast tune rdma`` finds better RDMA settings; ``bpsfast tune -- COMMAND`` tunes a job while it trains."""
from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from ...base import exit_codes, output
from .options import FullHelpGroup, overrides, set_option

_LISTENER_WAIT_S, _DRIVER_WAIT_S = 600.0, 10.0


class _Group(FullHelpGroup):
    """A group that takes everything behind ``--`` as a job to tune, not as a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args and args[0] not in self.commands:
            args = ["job", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Group)
def command() -> None:
    """Find better settings by measuring, within a time budget: of RDMA, or (tune -- COMMAND) of a training job.

    \b
    bpsfast tune -- bpsfast run -n 4 --nodes 2 -- python train.py
    bpsfast tune rdma                   on one machine, then on another:
    bpsfast tune rdma HOST --budget 2m
    """


@command.command("job", context_settings={"allow_interspersed_args": False})
@output.options()
@click.argument("program", required=True, nargs=-1, type=click.UNPROCESSED)
@exit_codes.exit_on_error
def job(program: tuple[str, ...], form: output.OutputOptions) -> None:
    """Run PROGRAM, which starts a job, and tune partition, fusion, credit and streams while it trains.

    No step is wasted: the weights are bitwise those of a run without tuning. Later jobs with the same model and cluster
    use the result if they have the setting autotune.

    \b
    bpsfast tune -- bpsfast run -n 4 --nodes 2 -- python train.py
    bpsfast tune --json -o found.json -- torchrun ... train.py
    BPSFAST_AUTOTUNE=1 torchrun ... train.py        on machines without rank 0
    """
    from ...base.process_identity import folder_prefix
    from ...trainer import tuning_trials

    with tempfile.TemporaryDirectory(prefix=folder_prefix("tune")) as folder:
        report = Path(folder) / "report.json"
        variables = {"BPSFAST_AUTOTUNE": "1", "BPSFAST_AUTOTUNE_REPORT": str(report)}
        try:
            code = subprocess.run(program, env={**os.environ, **variables}, check=False).returncode
        except OSError as exc:
            raise click.UsageError(f"{program[0]} cannot be started: {exc.strerror}") from exc
        result = tuning_trials.read(report)
    if result is None:
        click.echo("bpsfast tune: nothing was measured: the program trained no model with bpsfast on several ranks for "
                   "at least a dozen steps", err=True)
        sys.exit(code or 1)
    output.show(form, lambda: _table(result), tuning_trials.plain(result))
    sys.exit(code)


def _table(result: Any) -> str:
    """Return the trials and the choice as text."""
    rows = [["partition", "fusion", "credit", "streams", "step [ms]", "steps", "why"]]
    for point, step_s, n_steps, reason in result.trials:
        shown = "not possible" if step_s is None else f"{1e3 * step_s:.2f}"
        rows.append([*(f"{number:,}" for number in point), shown, str(n_steps),
                     reason + (" <- chosen" if point == result.chosen else "")])
    end = "" if result.is_over else "\nthe program ended before the search: train for 60 steps or more"
    shown = output.columns(rows, right=(0, 1, 2, 3, 4, 5))
    return f"{shown}\nchosen after {result.n_steps} steps: {result.chosen}{end}"


class _Duration(click.ParamType):
    """Seconds: 90, 90s, 2m."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m)?", str(value))
        if not match or float(match[1]) <= 0:
            self.fail(f"{value!r}: expected seconds such as 90 or 90s, or minutes such as 2m", param, ctx)
        return float(match[1]) * (60 if match[2] == "m" else 1)


class _Numbers(click.ParamType):
    """Comma-separated numbers up to a limit."""

    name = "numbers"

    def __init__(self, most: int) -> None:
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = value.split(",")
        if not all(word.isdecimal() and int(word) <= self._most for word in words):
            self.fail(f"{value!r}: expected numbers from 0 to {self._most}, with commas", param, ctx)
        return tuple(map(int, words))


@command.command("rdma")
@click.argument("hosts", nargs=-1, metavar="[HOST[:PORT]]...")
@click.option("-p", "--port", type=click.IntRange(1, 65535), help="TCP port of the other side [default: 18530].")
@click.option("-d", "--ib-dev", "device", metavar="DEV", help="RDMA device of this side [default: the one on the "
              "route; all are tried].")
@click.option("-x", "--gid-index", type=click.IntRange(0), help="Row of its GID table.")
@click.option("--budget", "budget_s", type=_Duration(), default="120s", show_default=True,
              help="Total time to measure: 90s, 2m.")
@click.option("--goal", type=click.Choice(["one-way", "two-way", "incast"]), help="Traffic to optimize "
              "[default: two-way]. All are shown; incast (many hosts write to this one at once) needs several hosts.")
@click.option("--only", metavar="NAME,...", help="Try only these settings.")
@click.option("--traffic-class", "traffic_classes", type=_Numbers(255), default=(), metavar="N,...",
              help="Traffic classes (DSCP * 4) to try; the switches must know them.")
@click.option("--service-level", "service_levels", type=_Numbers(15), default=(), metavar="N,...",
              help="Service levels to try.")
@click.option("--profile", metavar="FILE", help="Profile to start from and to change [default: the setting "
              "profile].")
@click.option("--apply", "applies", is_flag=True, help="Write the better settings to the profile.")
@click.option("--undo", "undoes", is_flag=True, help="Restore the profile as it was before the last --apply.")
@click.option("--seed", type=int, default=0, help="Seed of the order of trials [default: 0].")
@click.option("--wait", "wait_s", type=click.FloatRange(0, min_open=True), help="Seconds to wait for the other side "
              "[default: 600 when listening, else 10].")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True,
              help="Give up after this many seconds without progress.")
@set_option
@output.options()
@exit_codes.exit_on_error
def rdma(hosts: tuple[str, ...], port: int | None, applies: bool, undoes: bool, profile: str | None,
         form: output.OutputOptions, **options: Any) -> None:
    """Tune RDMA settings between this machine and HOSTs; without HOST, wait to be measured by another machine.

    Trials alternate with the current settings. Settings that are better by more than the noise are shown, and written
    only with --apply.

    \b
    bpsfast tune rdma                                   listens, on the others
    bpsfast tune rdma HOST --budget 2m                  tries, on one of them
    bpsfast tune rdma HOST --apply --profile job.toml   keeps what is better
    bpsfast tune rdma --undo --profile job.toml         takes that back
    """
    from ...base import profile as profiles, settings
    from ..perf import control
    from ..tune import testbed

    device = options.pop("device")
    chosen = overrides(options.pop("assignments"), rdma_devices=f"={device}" if device else None,
                       rdma_gid_index=options.pop("gid_index"),
                       profile=profile if profile and Path(profile).exists() else None)
    loaded, origins = settings.load(chosen), settings.load_with_origins(chosen)[1]
    file = profile or loaded.profile
    if (applies or undoes) and not file:
        raise click.UsageError("--apply and --undo need a profile: name it with --profile FILE or BPSFAST_PROFILE")
    if undoes:
        if hosts or applies:
            raise click.UsageError("--undo measures nothing: give it without hosts and --apply")
        change = profiles.undo(file)
        output.show(form, lambda: undone(change), {"profile": change._asdict()})
        return
    default_port = port or testbed.DEFAULT_PORT
    if hosts:
        if applies:
            profiles.writable(file)
        where = [control.host_and_port(name, default_port) for name in hosts]
        options["only"] = _names(options["only"])
        key = control.secret_for(loaded, [host for host, _ in where]).key
        _drive(form, where, key, loaded, origins, file if applies else "", options)
    elif applies:
        raise click.UsageError("--apply: nothing was measured; name the host to measure with")
    else:
        _listen(default_port, loaded, options["wait_s"])


def _listen(port: int, loaded: Any, wait_s: float | None) -> None:
    from ...hardware.host import Host
    from ...hardware.rdma_route import choose
    from ..perf import control
    from ..tune.testbed import TuneServer

    choose(Host(), loaded).require()
    place = control.listen_address(loaded, loaded.node_host)
    with control.listen(port, place.host) as listener:
        click.echo(f"bpsfast tune rdma: listening on port {port}{place.remark}", err=True)
        server = TuneServer(listener, place.secret.key, loaded,
                            lambda words: click.echo(f"bpsfast tune rdma: {words}", err=True))
        try:
            server.serve(wait_s or _LISTENER_WAIT_S)
        except KeyboardInterrupt:
            sys.exit(130)


def _drive(form: output.OutputOptions, where: list[tuple[str, int]], key: bytes, loaded: Any, origins: dict[str, str],
           file: str, options: dict[str, Any]) -> None:
    from ...orchestration.errors import BpsError
    from ..tune import tuning_run as report
    from ..tune.testbed import TuneTestbed
    from ..tune.tuning_run import TuningRun

    def say(text: str) -> None:
        """Show progress on standard output, or on standard error if that holds the result."""
        click.echo(text, err=form.as_json or form.path is not None)

    machines = TuneTestbed(where, key, loaded, options["wait_s"] or _DRIVER_WAIT_S, options["timeout_s"])
    try:
        session = TuningRun(machines, where[0][0], loaded, options["goal"], options["budget_s"], options["timeout_s"],
                            options["traffic_classes"], options["service_levels"], options["only"])
        say(report.head(session))
        outcome = session.search(lambda tried: say(report.step(tried)), options["seed"])
        try:
            machines.ask("end")
        except BpsError as exc:  # the measurements are valid
            click.echo(f"bpsfast: {exc}: end the other side there", err=True)
    except KeyboardInterrupt:
        click.echo("bpsfast: interrupted; nothing was changed", err=True)
        sys.exit(130)
    reading = report.network(loaded, origins)
    change, words = _write(outcome, origins, file)
    output.show(form, lambda: report.text(session, outcome, reading, words),
                report.data(session, outcome, reading, change))


def _write(outcome: Any, origins: dict[str, str], file: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Write the better settings to the profile if asked to; return the change for JSON, and as text."""
    from ...base import profile as profiles
    from ..tune.search import describe

    found = describe(outcome.best, outcome.start)
    if not found:
        return None, ["nothing was changed" + (f": {file} is as it was" if file else "")]
    if not file:
        return None, ["nothing was changed: --apply --profile FILE writes this into a profile"]
    change = profiles.apply(file, found, f"tune rdma: {outcome.words}")
    words = [f"written to {change.path}; `bpsfast tune rdma --undo --profile {file}` undoes it",
             f"jobs read it with BPSFAST_PROFILE={change.path}; all machines of a job need the same profile"]
    words += [f"{name} is set by {origins[name]}, which overrides the profile: remove it there"
              for name in found if origins[name] not in ("default", f"profile {file}")]
    return change._asdict(), words


def _names(text: str | None) -> tuple[str, ...]:
    """Return the settings that --only names; empty: all."""
    from ..tune.tunables import NAMES

    names = tuple(name.strip() for name in text.split(",")) if text else ()
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise click.UsageError(f"--only: {', '.join(unknown)} cannot be tuned; supported: {', '.join(NAMES)}")
    return names


def undone(change: Any) -> str:
    """Return the effect of `--undo` as text."""
    what = "removed, as there was none before" if change.removed else "restored to its state before"
    return f"{change.path}: {what} {change.date} ({change.reason})"
