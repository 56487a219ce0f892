"""The command line: the group ``bpsfast`` with its small commands; larger ones have a file each in `tools.commands`.

A command reads its options, calls one function, and turns an error into one line and an exit code
(`base.exit_codes`).
"""
from __future__ import annotations

import gc
import os
import sys
from typing import Any

import click

from ._version import __version__
from .base import logs, output, settings
from .base.exit_codes import exit_on_error
from .orchestration.errors import ConfigError
from .tools.commands import LazyGroup, info
from .tools.commands.options import overrides, set_option

_COUNT = click.IntRange(1)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(version)s")
def cli() -> None:
    """Sum gradients on spare CPUs and NICs.

    \b
    bpsfast run -n 4 -- python train.py     four ranks on this machine
    bpsfast info                            what is installed and works
    bpsfast doctor                          why RDMA does not work
    bpsfast COMMAND --help                  options and examples of each
    """
    logs.set_identity("tool")


@cli.command()
@click.option("--scheduler", metavar="HOST:PORT,...", help="Address to listen on, or a list: see above.")
@click.option("--index", "scheduler_index", type=click.IntRange(0), help="Which address of the list to listen on, from "
              "0 on.  [default: the first one of this machine]")
@click.option("--num-nodes", type=click.IntRange(1), help="Number of machines with ranks to wait for.")
@click.option("--num-helpers", type=click.IntRange(0), help="Number of helpers (machines without ranks) to wait for.")
@click.option("--max-helpers", type=click.IntRange(0), help="Most helpers at a time, including those "
              "that join later.  [default: --num-helpers]")
@click.option("--starter-fd", type=int, hidden=True)
@click.option("--settings-fd", type=int, hidden=True)
@set_option
@exit_on_error
def scheduler(starter_fd: int | None, settings_fd: int | None, assignments: tuple[str, ...],
              **options: Any) -> None:
    """Run the job's scheduler.

    It ends when all ranks have left the job. If it is killed, start it again at the same address. If --scheduler is a
    list, the same for all processes of the job, a scheduler on the machine of a further address takes over when the one
    before is lost with its machine.

    \b
    export BPSFAST_JOB_KEY=$(openssl rand -hex 32)   the same on all machines
    bpsfast scheduler --scheduler 10.0.0.1:7700 --num-nodes 2 --num-helpers 1
    bpsfast node --scheduler 10.0.0.1:7700 --local-size 4    on two machines
    bpsfast node --scheduler 10.0.0.1:7700 --helper          on a third one
    """
    from .launch import daemons, spare_daemons

    logs.set_identity("scheduler")
    if settings_fd is not None and starter_fd is not None and not spare_daemons.take_settings(
            settings_fd, starter_fd, "orchestration.failover.scheduler"):
        return
    loaded = settings.load(overrides(assignments, **options))
    if starter_fd is not None:
        daemons.watch_starter(starter_fd, loaded)
    sys.exit(daemons.run_scheduler(loaded))


@cli.command()
@click.option("--scheduler", metavar="HOST:PORT,...", help="Address of the scheduler, or a list of them.")
@click.option("--local-size", type=click.IntRange(0), help="Number of ranks on this machine; 0 makes it a helper.")
@click.option("--helper", is_flag=True, help="Run without ranks: only sum for other machines.")
@click.option("--cores", type=_COUNT, help="Use at most this many CPUs (the idlest of one NUMA node, or of --cpus).")
@click.option("--cpus", metavar="LIST", help="CPUs that --cores are taken from, such as 4-7.")
@click.option("--nic-rate", "nic_limit", type=click.FloatRange(0, min_open=True), metavar="GBPS",
              help="Send, and receive, at most this many Gbit/s.")
@click.option("--max-bytes", metavar="BYTES", help="Most memory for gradients, such as 4G.")
@click.option("--nice", is_flag=True, default=None, help="Run only when no other program wants the CPU.")
@click.option("--starter-fd", type=int, hidden=True)
@click.option("--settings-fd", type=int, hidden=True)
@set_option
@exit_on_error
def node(starter_fd: int | None, settings_fd: int | None, helper: bool, assignments: tuple[str, ...],
         **options: Any) -> None:
    """Run this machine's node, or a helper if the machine has no ranks.

    On a busy machine, limit a helper by --cores, --nic-rate and --max-bytes; it is given only as much work as fits.

    \b
    bpsfast node --scheduler 10.0.0.1:7700 --local-size 4
    bpsfast node --scheduler 10.0.0.1:7700 --helper --cores 2 --nic-rate 5
    """
    gc.disable()  # collections while modules load take 5 % of a node's start, and modules are never freed
    from .launch import daemons, spare_daemons
    from .node import main as control

    gc.freeze()
    gc.enable()
    logs.set_identity("helper" if helper else "node")
    if settings_fd is not None and starter_fd is not None and not spare_daemons.take_settings(settings_fd, starter_fd):
        return
    if helper:
        if options["local_size"]:
            raise ConfigError(f"--helper has no ranks, --local-size {options['local_size']} has: give one of them")
        options["local_size"] = 0
    loaded = settings.load(overrides(assignments, **options))
    if starter_fd is not None:
        daemons.watch_starter(starter_fd, loaded)
    sys.exit(control.run_node(loaded, is_awaited=starter_fd is not None))


@cli.command(context_settings={"allow_interspersed_args": False})
@set_option
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
@exit_on_error
def dmlc(assignments: tuple[str, ...], program: tuple[str, ...]) -> None:
    """Run what BytePS's variables ask for, as bpslaunch did: scheduler, server, or the ranks of PROGRAM.

    \b
    export DMLC_NUM_WORKER=2 DMLC_NUM_SERVER=1
    export DMLC_PS_ROOT_URI=10.0.0.1 DMLC_PS_ROOT_PORT=7700
    DMLC_ROLE=scheduler bpsfast dmlc
    DMLC_ROLE=server bpsfast dmlc
    DMLC_ROLE=worker DMLC_WORKER_ID=0 bpsfast dmlc -- python train.py
    """
    from .launch import local_job as launch

    def run_node(loaded: settings.Settings) -> int:
        from .node import main as control

        return control.run_node(loaded)

    sys.exit(launch.dmlc(program, settings.load(overrides(assignments)), run_node))


@cli.command(hidden=True)
@exit_on_error
def agent() -> None:
    """Run processes for a launcher on another host, by messages on standard input and output."""
    from .launch import remote_agent

    sys.exit(remote_agent.main())


@cli.command()
@set_option
@output.options()
@exit_on_error
def env(assignments: tuple[str, ...], form: output.OutputOptions) -> None:
    """Show every setting: its variable, current value, where the value comes from, and what it means.

    \b
    bpsfast env
    bpsfast env --set partition_bytes=1M --json
    """
    found = info.setting_rows(*settings.load_with_origins(overrides(assignments)))
    output.show(form, lambda: info.settings_text(found), found)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def version(as_json: bool) -> None:
    """Show the version.

    \b
    bpsfast version --json
    """
    output.show(output.OutputOptions(as_json), lambda: __version__, {"version": __version__})


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that lets SHELL complete commands, options and settings (--set).

    \b
    eval "$(bpsfast completion bash)"   in ~/.bashrc; bash 4.4 or newer
    eval "$(bpsfast completion zsh)"    in ~/.zshrc, after compinit
    bpsfast completion fish >~/.config/fish/completions/bpsfast.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None, "of the shells that click knows"
    click.echo(found(cli, {}, "bpsfast", "_BPSFAST_COMPLETE").source())


def main() -> None:
    """Run the command line; without a command, run ``bpsfast dmlc`` if ``DMLC_ROLE`` is server or scheduler."""
    arguments = sys.argv[1:]
    if not arguments and os.environ.get("DMLC_ROLE") in ("server", "scheduler"):
        arguments = ["dmlc"]
    cli(args=arguments, prog_name="bpsfast")
