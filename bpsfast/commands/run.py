"""``bpsfast run``: a whole job from one command, on this machine or on several hosts."""
from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from .. import settings
from ..orchestration.errors import ConfigError
from . import host_options
from .assignments import overrides, set_option
from .exits import errors_in_words

_COUNT = click.IntRange(1)
_HERE = {"n_nodes": "--nodes", "ranks": "--ranks", "n_helpers": "--helpers", "netns": "--netns", "rate": "--rate"}
_THERE = {"helpers_on": "--helpers-on", "scheduler_host": "--scheduler-host", "assigned": "-x"}
_FOLDER = click.Path(file_okay=False, path_type=Path)

_EXAMPLES = """

    \b
    bpsfast run -n 4 -- python train.py                               four ranks here
    bpsfast run -H gpu01:2,gpu02:2 -- python train.py                 on two hosts, by ssh
    bpsfast run --hostfile FILE --helpers-on cpu01 -- python train.py
"""


@click.command(context_settings={"allow_interspersed_args": False},
               help="Run PROGRAM as a job of several ranks, here or (-H, --hostfile) on several hosts." + _EXAMPLES)
@click.option("-n", "--num-ranks", "n_ranks", type=_COUNT, help="Ranks in all.  [default: 1; of hosts, all slots]")
@click.option("--nodes", "n_nodes", type=_COUNT, help="Machines to spread them over, played here.  [default: 1]")
@click.option("--ranks", help="Ranks of each node instead, such as 2,3.")
@click.option("--helpers", "n_helpers", type=click.IntRange(0), help="Machines that only sum, played here.")
@click.option("--netns", is_flag=True, help="Each machine in its own network namespace (needs root).")
@click.option("--rate", help="With --netns: rate of each link, both directions, such as 10gbit.")
@host_options.hosts_option
@click.option("--hostfile", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Hosts instead, one a line: `host slots=N` or host:N.")
@click.option("--helpers-on", metavar="HOST,...", help="Hosts without ranks that sum.")
@click.option("--scheduler-host", metavar="ADDRESS", help="Address by which all hosts reach the first one, where the "
              "scheduler runs.  [default: found out]")
@host_options.ssh_options
@click.option("-x", "assigned", multiple=True, metavar="NAME[=VALUE]", help="A variable for processes on hosts.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), help="End the job by then (seconds).")
@click.option("--tee-dir", type=_FOLDER, help="Also write the output of every process here.")
@click.option("--output-filename", "rank_dir", type=_FOLDER, metavar="DIR",
              help="Also write that of each rank to DIR/rank.N/stdout and stderr.")
@click.option("--prefix-output-with-timestamp", "stamped", is_flag=True, help="Head each line by its time, too.")
@click.option("--dry-run", is_flag=True, help="Print the commands and start nothing.")
@set_option
@click.argument("program", required=True, nargs=-1, type=click.UNPROCESSED)
@errors_in_words
def command(**options: Any) -> None:
    """Run a program as a job."""
    from ..launch import hosts as host_lists, job, over_ssh
    from ..launch.output import Output
    from ..launch.supervisor import Limits

    hosts = host_options.hosts_of(options["hosts_text"], options["hostfile"])
    _check_together(options, bool(hosts))
    ssh = host_options.take_ssh(options)
    program, show_only = options["program"], options["dry_run"]
    loaded = settings.load(overrides(options["assignments"]), _without_place(os.environ))
    limits = Limits(job_s=options["timeout_s"])
    output = Output(tee_dir=options["tee_dir"], rank_dir=options["rank_dir"], stamped=options["stamped"])
    with contextlib.closing(output):
        if not hosts:
            shape = job.shape_of(options["n_ranks"] or 1, options["n_nodes"] or 1, options["n_helpers"] or 0,
                                 options["ranks"])
            if show_only:
                return job.dry_run(shape, program, loaded, click.echo)
            sys.exit(job.run(shape, program, loaded, netns=options["netns"], rate=options["rate"], limits=limits,
                             output=output))
        ranks_on = host_lists.assign(hosts, options["n_ranks"])
        helpers = host_lists.helpers(options["helpers_on"], ranks_on) if options["helpers_on"] else []
        plan = over_ssh.Plan(hosts=ranks_on, helpers=helpers, ssh=ssh, scheduler_host=options["scheduler_host"] or "",
                             variables=over_ssh.variables(options["assigned"]))
        if show_only:
            return over_ssh.dry_run(plan, program, loaded, click.echo)
        try:
            sys.exit(over_ssh.run(plan, program, loaded, limits=limits, output=output))
        except KeyboardInterrupt:  # while hosts were looked at; a job that runs ends by `Supervisor`
            click.echo("bpsfast: interrupted before anything was started", err=True)
            sys.exit(130)


def _check_together(options: Mapping[str, Any], has_hosts: bool) -> None:
    """Refuse options of one way to start a job beside those of the other."""
    if options["rate"] is not None and not options["netns"]:
        raise ConfigError("--rate shapes the links of --netns: give both, or neither")
    if has_hosts:
        wrong = [typed for name, typed in _HERE.items() if options[name]]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: machines are played on this one, but -H or --hostfile name real "
                              "ones: give one of them (helpers of hosts: --helpers-on)")
    else:
        wrong = [typed for name, typed in _THERE.items() if options[name]] + host_options.given(options)
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: for which hosts? Name them by -H or --hostfile")


def _without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return *environ* without a place of another job: a launcher gives places, it has none."""
    places = ("rank", "size", "local_rank", "local_size", "node_id", "node_index", "num_nodes", "num_helpers",
              "num_servers", "scheduler")
    aliases = {alias for row in settings.table() if row.name in places for alias in (row.variable, *row.aliases)}
    return {name: value for name, value in environ.items() if name not in aliases}
