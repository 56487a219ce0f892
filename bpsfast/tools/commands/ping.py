"""``bpsfast ping`` tests which hosts reach each other, over TCP and between all RDMA ports."""
from __future__ import annotations

import contextlib
import secrets
import sys
from pathlib import Path
from typing import Any

import click

from ...base import exit_codes, output
from ...orchestration.host_lookup import format_address
from . import options as shared


@click.command()
@click.argument("hosts", nargs=-1, metavar="[HOST[:PORT]]...")
@click.option("--listen", is_flag=True, help="Answer other hosts until Ctrl-C.")
@click.option("--all", "matrix", is_flag=True, help="Let each host ping every other one, and show the matrix.")
@click.option("--hostfile", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="More hosts, one per line, as the hostfile of `bpsfast run`.")
@shared.hosts_option
@shared.ssh_options
@click.option("-p", "--port", type=click.IntRange(1, 65535), help="TCP port of the other side [default: 18520; with -H "
              "a free port].")
@click.option("-d", "--ib-dev", "device", metavar="DEV", help="Use only this RDMA device of this host.")
@click.option("-x", "--gid-index", type=click.IntRange(0), help="Use this row of the GID table.")
@click.option("--wait", "wait_s", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True,
              help="Seconds to wait for a host to answer.")
@shared.verbs_option
@shared.set_option
@output.options()
@exit_codes.exit_on_error
def command(hosts: tuple[str, ...], listen: bool, matrix: bool, hostfile: Path | None, port: int | None,
            device: str | None, gid_index: int | None, wait_s: float, verbs: str | None, assignments: tuple[str, ...],
            form: output.OutputOptions, hosts_text: str | None, **ssh_options: Any) -> None:
    """Test whether hosts can be reached over TCP, and from every RDMA port of this host to every port of theirs.

    Exit code 1 if a host cannot be reached, or if none of its RDMA ports can.

    \b
    bpsfast ping --listen              on each host
    bpsfast ping gpu01 gpu02           from here to each
    bpsfast ping --all gpu01 gpu02     from each to each
    bpsfast ping --all -H gpu01,gpu02  the same, the other side started over ssh
    """
    from ...base import settings
    from ...base.job_key import given_key
    from ...launch import host_list
    from ...launch.remote_listeners import RemoteListeners
    from ...orchestration import security
    from ..perf import control, ping

    loaded = settings.load(shared.overrides(assignments, rdma_devices=f"={device}" if device else None,
                                            rdma_gid_index=gid_index, verbs=verbs))
    there = shared.hosts_of(hosts_text, None)
    typed = shared.given_ssh_options(ssh_options)
    if typed and not there:
        raise click.UsageError(f"{', '.join(typed)}: there are no hosts; name them with -H")
    names = [*hosts]
    if hostfile is not None:  # as for `bpsfast run`, without slots and users
        listed = [host.name.rpartition("@")[2] for host in host_list.read(hostfile)]
        names += [f"[{name}]" if ":" in name else name for name in listed]
    if listen + bool(names) + bool(there) != 1:
        raise click.UsageError("give hosts to ping, or --listen, or -H for hosts on which to start the other side")
    default_port = port or ping.DEFAULT_PORT
    if listen:
        place = control.listen_address(loaded, loaded.node_host)
        with control.listen(default_port, place.host) as sock:
            click.echo(f"bpsfast ping: listening on port {default_port}{place.remark}", err=True)
            try:
                ping.serve(sock, place.secret, loaded)
            except KeyboardInterrupt:
                sys.exit(130)
        return
    with contextlib.ExitStack() as stack:
        where = [control.host_and_port(name, default_port) for name in names]
        if there:
            drawn = given_key(loaded) or secrets.token_hex(32)
            key = security.job_key(drawn, "")
            ssh = shared.take_ssh(ssh_options)
            started = stack.enter_context(RemoteListeners(there, ssh, ["ping", "--listen"], drawn, port))
            where = started.addresses
        else:
            key = control.secret_for(loaded, [host for host, _ in where]).key
        if matrix:
            found = [ping.ask_to_reach(source, target, key, wait_s) for source in where for target in where
                     if source != target]
        else:
            found = [ping.reach(*target, key, loaded, wait_s) for target in where]
        if there and any(each["error"] for each in found):
            started.check()
    output.show(form, lambda: text(found, where if matrix else []), found)
    if not all(map(reached, found)):
        sys.exit(exit_codes.FAILED)


def reached(found: dict[str, Any]) -> bool:
    """Tell whether the host answered, and also over RDMA if both sides have ports for it."""
    return found["error"] is None and (not found["pairs"] or any(not pair["error"] for pair in found["pairs"]))


def text(found: list[dict[str, Any]], where: list[tuple[str, int]]) -> str:
    """Return the results as text; with *where*, start with the matrix."""
    lines = [matrix_of(found, where), ""] if where else []
    for each in found:
        source = f"{each['source']} -> " if "source" in each else ""
        name = f"{source}{format_address(each['host'], each['port'])}"
        if each["error"]:
            lines.append(f"{name}  NOT REACHED  {each['error']}")
            continue
        lines.append(f"{name}  tcp {_time(each['tcp']['median_s'])}")
        for pair in each["pairs"]:
            verdict = f"NO  {pair['error']}" if pair["error"] else (
                f"ok  MTU {pair['mtu']}  {_time(pair['median_s'])} (least {_time(pair['min_s'])})")
            lines.append(f"  {_rail(pair['own'])} -> {_rail(pair['peer'])}  {verdict}")
        for side, rejected in each["rejected"].items():
            lines += [f"  {port} {side} is not tried: {reason}" for port, reason in rejected.items()]
        if not each["pairs"]:
            lines.append("  no RDMA: no port that can be used on both sides")
    return "\n".join(lines)


def matrix_of(found: list[dict[str, Any]], where: list[tuple[str, int]]) -> str:
    """Return a table of which host reaches which, and over how many pairs of RDMA ports."""
    cells = {(each["source"], format_address(each['host'], each['port'])): _summary(each) for each in found}
    names = [format_address(host, port) for host, port in where]
    return output.columns([("from \\ to", *names),
                           *((source, *(cells.get((source, target), "-") for target in names)) for source in names)])


def _summary(found: dict[str, Any]) -> str:
    if found["error"]:
        return "NO"
    good = [pair["median_s"] for pair in found["pairs"] if not pair["error"]]
    if good:
        return f"rdma {_time(min(good))} ({len(good)}/{len(found['pairs'])})"
    return f"tcp {_time(found['tcp']['median_s'])}{', NO rdma' if found['pairs'] else ''}"


def _rail(rail: dict[str, Any]) -> str:
    gid = f" GID {rail['gid_index']} {rail['gid']}" if rail["gid"] else ""
    return f"{rail['device']}/{rail['port']}{gid}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
