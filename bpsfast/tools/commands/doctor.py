"""``bpsfast doctor`` finds out why RDMA does not work, on this machine or to a peer, and how to fix it."""
from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from ...base import exit_codes, output, settings
from ...base.addresses import any_host
from ...base.settings import Settings
from ...hardware.host import Host, RecordedKernel, open_host
from ...hardware.kernel import Address
from ...hardware.rdma_route import peer_address
from ...hardware.verbs import provider
from ..doctor import examination, hardware, peer as peer_doctor
from ..doctor.facts import Facts, PeerReport, ask_verbs, recorded_verbs
from ..doctor.peer import DEFAULT_PORT
from ..perf.control import host_and_port, listen_address, secret_for
from .options import overrides, root_option, set_option, verbs_option

#: Longest wait for one ping, of which several may stay unanswered.
_PING_S = 1.0


@click.command()
@click.option("--peer", metavar="HOST[:PORT]", help="Also check the path to HOST, and compare both ends.")
@click.option("--listen", "port", type=click.IntRange(0, 65535), is_flag=False, flag_value=DEFAULT_PORT,
              metavar="[PORT]", help=f"Answer `bpsfast doctor --peer` of other machines on PORT ({DEFAULT_PORT}).")
@click.option("--host", "bind", default="", metavar="ADDRESS",
              help="With --listen: address to listen on.  [default: all; without a job key 127.0.0.1]")
@click.option("--once", is_flag=True, help="With --listen: exit after the first answer.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True,
              metavar="S", help="Longest wait for the peer's doctor, and for the queue pair to it.")
@verbs_option
@root_option
@set_option
@output.options()
@exit_codes.exit_on_error
def command(peer: str | None, port: int | None, bind: str, once: bool, timeout_s: float, verbs: str | None,
            root: str | None, assignments: tuple[str, ...], form: output.OutputOptions) -> None:
    """Find out why RDMA does not work, and print the commands that fix it.

    Every check reports PASS, FAIL, WARN, INFO or SKIP with its reason; the commands that fix a problem follow the list.
    The machine is not changed. Exit code 1 if a check failed, 3 if there is no RDMA device, else 0.

    \b
    bpsfast doctor                        this machine
    bpsfast doctor --listen               on one machine, then on another:
    bpsfast doctor --peer gpu08           both ends, the path, a queue pair
    bpsfast doctor --json -o report.json  for a bug report
    bpsfast explain RD05                  more about one check

    With --peer, both machines need the same BPSFAST_JOB_KEY, or BPSFAST_INSECURE=1.
    """
    machine = open_host(root)
    loaded, origins = settings.load_with_origins(overrides(assignments, verbs=verbs), machine.kernel.environ)
    if port is not None:
        if peer or root or form.as_json:
            raise click.UsageError("--listen cannot be combined with --peer, --root or --json")
        return listen(loaded, origins, bind, port, once, timeout_s)
    facts = gather_facts(machine, loaded, origins, peer, timeout_s)
    findings = examination.examine(facts)
    output.show(form, lambda: examination.text(facts, findings, output.terminal_width()),
                examination.data(facts, findings))
    sys.exit(examination.exit_code(facts, findings))


def gather_facts(host: Any, loaded: Settings, origins: dict[str, str], peer: str | None, timeout_s: float) -> Facts:
    """Return the facts about *host* and, if *peer* is given, about the other end."""
    name, port = host_and_port(peer, DEFAULT_PORT) if peer else ("", DEFAULT_PORT)
    address = peer_address(host, name) if peer else None
    answers = host.kernel.answers if isinstance(host.kernel, RecordedKernel) else None
    report = recorded_verbs(answers.verbs) if answers else ask_verbs(loaded.verbs)
    found = Facts(host, loaded, origins, report, (name, address) if address else None, min(timeout_s, _PING_S))
    if answers is not None:
        if address is not None and answers.peer is not None:
            found.peer_report = msgspec.convert(answers.peer, PeerReport)
        return found
    found.cache_latency = hardware.measure(host)
    if address is not None:
        peer_doctor.ask(found, address, port, secret_for(loaded, [str(address)]).key, timeout_s, _provider(report))
    return found


def listen(loaded: Settings, origins: dict[str, str], bind: str, port: int, once: bool, timeout_s: float) -> None:
    """Answer the doctors of other machines until interrupted; with *once*, only the first one."""
    where = listen_address(loaded, bind)
    host = where.host or any_host()
    report = ask_verbs(loaded.verbs)

    def examine(asker: Address) -> Facts:
        return Facts(Host(), loaded, origins, report, (str(asker), asker), timeout_s)

    with peer_doctor.Listener(host, port, where.secret, examine, _provider(report), timeout_s) as listener:
        click.echo(f"listening on {host} port {listener.port}{where.remark}; on the other machine: "
                   f"bpsfast doctor --peer HOST{'' if listener.port == DEFAULT_PORT else f':{listener.port}'}")
        click.echo(listener.serve())
        while not once:
            click.echo(listener.serve())


def _provider(report: Any) -> Any:
    """Return the verbs module for a test queue pair, None if it does not load or has no device."""
    return None if report.error or not report.devices else provider(report.provider)
