"""``bpsfast perf bw`` and ``perf lat`` measure bandwidth and latency between two machines, as perftest does."""
from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from typing import Any

import click

from ...base import exit_codes, output, settings
from ...orchestration.errors import BpsError, ConfigError
from ..perf import perf_plan
from . import options as shared

_SERVER_WAIT_S, _CLIENT_WAIT_S = 300.0, 10.0

_EXAMPLES = """

    \b
    bpsfast perf {verb}                              on one machine: listens
    bpsfast perf {verb} HOST                         on the other one
    bpsfast perf {verb} -H HOST                      the other started over ssh
    bpsfast perf {verb} HOST -d mlx5_0 -x 3 -a       this device, GID; all sizes
    bpsfast perf {verb} HOST --op write              as ib_write_{verb}
    bpsfast perf {verb} HOST --transport tcp --json  the TCP streams of jobs
"""


@click.group(cls=shared.FullHelpGroup)
def command() -> None:
    """Measure bandwidth or latency between two machines, with the options and columns of perftest.

    \b
    bpsfast perf bw                 on one machine
    bpsfast perf bw HOST            on the other one
    bpsfast perf lat -H HOST        the other one started over ssh
    """


def _options(function: Callable) -> Callable:
    """Add the options that both commands share."""
    return exit_codes.exit_on_error(shared.with_options(function, [
        click.argument("host", required=False),
        shared.hosts_option,
        shared.ssh_options,
        click.option("-p", "--port", "control_port", type=click.IntRange(1, 65535), help="TCP port of the server "
                     "[default: 18515; with -H a free port]."),
        click.option("--transport", type=click.Choice(["rdma", "tcp", "shm"]), help="Transport [default: rdma]."),
        click.option("--op", "operation", type=click.Choice(["write_imm", "write", "send", "read"]),
                     help="RDMA operation; jobs use write_imm [default: write_imm]."),
        click.option("--verbs", "providers", metavar="NAME[,NAME]", help="Implementation of RDMA verbs; "
                     "native,pyverbs measures both in turns [default: the setting verbs]."),
        click.option("-d", "--ib-dev", "device", metavar="DEV", help="RDMA device of this side [default: the one on "
                     "the route]."),
        click.option("-i", "--ib-port", "port", type=click.IntRange(1, 255), help="Port of that device."),
        click.option("-x", "--gid-index", type=click.IntRange(0), help="Row of its GID table (`bpsfast gids`)."),
        click.option("-s", "--size", "nbytes", type=click.IntRange(1), metavar="BYTES", help="Size of a message."),
        click.option("-a", "--all", "all_sizes", is_flag=True, help="All sizes from 2 bytes to 8 MiB."),
        click.option("-n", "--iters", "iterations", type=click.IntRange(1), help="Messages on each queue pair."),
        click.option("-m", "--mtu", type=int, metavar="BYTES", help="RDMA path MTU [default: the smaller port's]."),
        click.option("-t", "--tx-depth", "depth", type=click.IntRange(1), help="Messages in flight on each queue pair "
                     "[default: 128; tcp and shm 16]."),
        click.option("-r", "--rx-depth", "receive_depth", type=click.IntRange(1), help="Receive requests kept posted "
                     "[default: 512]."),
        click.option("-I", "--inline_size", "inline_nbytes", type=click.IntRange(0), metavar="BYTES",
                     help="Copy messages up to this size into the work request."),
        click.option("-u", "--qp-timeout", "ack_timeout", type=click.IntRange(1, 31), metavar="N",
                     help="Resend what is not acknowledged within 4 us * 2^N [default: 14]."),
        click.option("-e", "--events", is_flag=True, help="Block until a completion arrives, instead of polling."),
        click.option("--wait", "wait_s", type=click.FloatRange(0, min_open=True), help="Seconds to wait for the other "
                     "side to connect [default: server 300, client 10]."),
        click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), help="Give up after this many "
                     "seconds without progress [default: 30]."),
        shared.set_option,
        output.options(tabular=True),
    ]))


@command.command("bw", help="Measure bandwidth; without HOST, serve one client." + _EXAMPLES.format(verb="bw"))
@click.option("-D", "--duration", "duration_s", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
              help="Measure for this long instead of -n messages.")
@click.option("-q", "--qp", "pairs", type=click.IntRange(1), help="Queue pairs, or tcp streams [default: 1].")
@click.option("-b", "--bidirectional", "both_ways", is_flag=True, help="Send both ways at once and show the sum.")
@click.option("--reversed", is_flag=True, help="The server sends.")
@click.option("-Q", "--cq-mod", "moderation", type=click.IntRange(1), help="Request a completion every N sends "
              "[default: 100 below 8 KiB, else 1].")
@_options
def bandwidth(**options: Any) -> None:
    """Measure bandwidth."""
    _run("bw", options)


@command.command("lat", help="Measure latency (one way; of reads, the round trip); without HOST, serve one client."
                 + _EXAMPLES.format(verb="lat"))
@_options
def latency(**options: Any) -> None:
    """Measure latency."""
    _run("lat", options)


def _run(verb: str, options: dict[str, Any]) -> None:
    """Measure as *options* say; with -H, start the other side first."""
    from ...base.job_key import given_key
    from ...launch.remote_listeners import RemoteListeners

    there, typed = shared.hosts_of(options.pop("hosts_text"), None), shared.given_ssh_options(options)
    ssh = shared.take_ssh(options)
    if not there:
        if typed:
            raise click.UsageError(f"{', '.join(typed)}: there is no host; name it with -H")
        return _measure(verb, options)
    if len(there) > 1 or options["host"] is not None:
        raise click.UsageError("-H: expected one host; the measurement is between this host and that one")
    secret = given_key(settings.load(shared.overrides(options["assignments"]))) or secrets.token_hex(32)
    with RemoteListeners(there, ssh, ["perf", verb], secret, options["control_port"]) as started:
        address, options["control_port"] = started.addresses[0]
        try:
            _measure(verb, options | {"host": address}, secret)
        except BpsError:
            started.check()
            raise


def _measure(verb: str, options: dict[str, Any], secret: str = "") -> None:
    from ...orchestration import security
    from ..perf import control, results
    from ..perf.perf_run import PerfRun

    host, wait_s, form = options.pop("host"), options.pop("wait_s"), options.pop("form")
    control_port = options.pop("control_port") or control.DEFAULT_PORT
    chosen = shared.overrides(options.pop("assignments"), rdma_devices=_device(options),
                              rdma_gid_index=options.pop("gid_index"))
    loaded = settings.load(chosen)
    given = _given(options)
    if host is not None and given.get("transport", "rdma") == "rdma":
        given = {"providers": (loaded.verbs,), **_set(verb, loaded, settings.load_with_origins(chosen)[1]), **given}
    shows_at_once = not (form.as_json or form.as_csv or form.path)
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        if shows_at_once:
            click.echo(text)

    def began() -> None:
        assert run.plan is not None
        say(f"{results.block(run.plan, run.places)}\n{results.head(run.plan)}")

    def show(row: dict[str, Any]) -> None:
        assert run.plan is not None
        say(results.line(run.plan, row))

    if host is None:
        # the client decides what the server's options leave open; those options must be valid
        perf_plan.make(verb, given)
        where = control.listen_address(loaded, loaded.node_host)
        key = where.secret.key
        with control.listen(control_port, where.host) as listener:
            click.echo(f"bpsfast perf {verb}: waiting for a client on port {control_port}{where.remark}", err=True)
            accepted = control.accept(listener, key, wait_s or _SERVER_WAIT_S, given.get("timeout_s", 30.0))
        given["verb"] = verb
        given.pop("timeout_s", None)
        plan = None
    else:
        plan = perf_plan.make(verb, given)
        name, port = control.host_and_port(host, control_port)
        key = security.job_key(secret, "") if secret else control.secret_for(loaded, [name]).key
        accepted = control.connect(name, port, key, wait_s or _CLIENT_WAIT_S, plan.timeout_s)
    try:
        with accepted:
            run = PerfRun(accepted, key, loaded, show)
            if plan is None:
                run.as_server(given, began)
            else:
                run.as_client(plan, began)
    except KeyboardInterrupt:
        click.echo("bpsfast: interrupted; the other side has been told", err=True)
        sys.exit(130)
    except ValueError as exc:
        if isinstance(exc, ConfigError):
            raise
        raise ConfigError(str(exc)) from exc
    assert run.plan is not None
    for text in results.counted(run.rows):
        say(text)
    if not shows_at_once:
        output.show(form, lambda: "\n".join(lines), results.data(run.plan, run.places, run.rows),
                    results.table(run.plan, run.rows))


def _set(verb: str, loaded: Any, origins: dict[str, str]) -> dict[str, Any]:
    """Return the settings for jobs that are not defaults, as fields of the plan; latency uses one queue pair."""
    found = {field: getattr(loaded, name) for name, field in perf_plan.SETTINGS.items()
             if origins[name] != "default" and not (verb == "lat" and field in ("pairs", "moderation"))}
    if "moderation" in found:
        found["moderation"] = min(found["moderation"], loaded.rdma_queue_depth)  # as the transport does
    return found


def _device(options: dict[str, Any]) -> str | None:
    """Return -d and -i in the syntax of the setting rdma_devices."""
    device, port = options.pop("device"), options.pop("port")
    if port is not None and device is None:
        raise click.UsageError("-i needs -d: it is a port of that device")
    return None if device is None else f"={device}" + (f":{port}" if port is not None else "")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the given options by the names of the plan's fields."""
    nbytes, all_sizes, providers = options.pop("nbytes"), options.pop("all_sizes"), options.pop("providers")
    if nbytes is not None and all_sizes:
        raise click.UsageError("-s and -a: choose one")
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    if nbytes is not None or all_sizes:
        given["sizes"] = perf_plan.ALL_SIZES if all_sizes else (nbytes,)
    if providers is not None:
        given["providers"] = tuple(name.strip() for name in providers.split(","))
    return given
