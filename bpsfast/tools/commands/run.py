"""``bpsfast run`` starts a job on this machine or on several hosts; ``bpsfast add`` adds workers to an elastic one."""
from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...base import logs, output, settings
from ...base.exit_codes import FAILED, WORDS_OF_RUN, exit_on_error
from ...orchestration.errors import ConfigError
from .options import hosts_of, job_options, overrides, set_option, take_plan, take_ssh, variables_of

if TYPE_CHECKING:
    from ...launch.elastic_job import HostsPlan
    from ...launch.processes import Command

_COUNT = click.IntRange(1)
_SIMULATED = ("n_nodes", "ranks", "n_helpers", "netns", "rate")
_FOLDER = click.Path(file_okay=False, path_type=Path)

_EXAMPLES = """

    \b
    bpsfast run -n 4 -- python train.py                  four ranks here
    bpsfast run -H gpu01:2,gpu02:2 -- python train.py    on two hosts, by ssh
    bpsfast run --hostfile FILE --helpers-on cpu01 -- python train.py
    bpsfast run -n 4 --elastic --lost-worker wait -- python train.py
    bpsfast run --elastic --host-discovery-script ./hosts -- python train.py
"""
_ELASTIC = {"lost_worker": "--lost-worker", "min_ranks": "--min-ranks", "max_ranks": "--max-ranks",
            "within_s": "--within", "max_replaced": "--max-replaced", "control": "--control",
            "script": "--host-discovery-script", "slots": "--slots", "cooldown_s": "--blacklist-cooldown"}
#: Those that concern hosts.
_OF_HOSTS = ("script", "slots", "cooldown_s")


class _Run(click.Command):
    """The command, with the exit codes of a launcher on its help page."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes: that of the process that failed first, or"):
            formatter.write_dl([("128 + N", "signal N ended that process, or the launcher"),
                                *((str(code), words) for code, words in WORDS_OF_RUN.items())])


@click.command(cls=_Run, context_settings={"allow_interspersed_args": False},
               help="Run PROGRAM as a job of several ranks, here or (-H, --hostfile) on several hosts." + _EXAMPLES)
@click.option("-n", "-np", "--num-ranks", "n_ranks", type=_COUNT,
              help="Number of ranks.  [default: 1; with hosts, all slots]")
@click.option("--nodes", "n_nodes", type=_COUNT, help="Number of simulated machines on this host.  [default: 1]")
@click.option("--ranks", help="Ranks of each node, such as 2,3, instead of -n.")
@click.option("--helpers", "n_helpers", type=click.IntRange(0), help="Number of simulated helpers on this host.")
@click.option("--restart-helpers", "restarts", type=click.IntRange(0), default=0, metavar="N",
              help="Restart lost helpers, at most N times in all.")
@click.option("--max-helpers", type=click.IntRange(0), metavar="N",
              help="Most helpers at a time, including those that join later.  [default: the number started]")
@click.option("--netns", is_flag=True, help="Run each machine in its own network namespace (needs root).")
@click.option("--rate", help="With --netns: rate of each link in each direction, such as 10gbit.")
@job_options
@click.option("--elastic", is_flag=True, help="Allow workers to be lost and added; PROGRAM must use bpsfast.elastic.")
@click.option("--lost-worker", type=click.Choice(["abort", "shrink", "wait"]),
              help="If a worker is lost: end the job, go on without it, or replace it.  [default: abort]")
@click.option("--min-ranks", "--min-np", "min_ranks", type=_COUNT,
              help="End the job if fewer ranks are left.  [default: 1]")
@click.option("--max-ranks", "--max-np", "max_ranks", type=_COUNT,
              help="Most ranks, with workers that `bpsfast add` adds, or that further hosts have slots for.  [default: "
              "-n; with hosts and without -n, all slots]")
@click.option("--host-discovery-script", "script", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Program that lists the hosts, `host` or `host:slots` on each line; it is run every "
              "second, and hosts come and go with its list.")
@click.option("--slots", "--slots-per-host", "slots", type=click.IntRange(1, 4096), metavar="N",
              help="Slots of a host that the script lists without a number.  [default: 1]")
@click.option("--blacklist-cooldown", "cooldown_s", type=click.FloatRange(0), metavar="SECONDS",
              help="Time for which a lost host is not used, doubled with each further loss, up to an hour; 0: for the "
              "rest of the job.  [default: 60]")
@click.option("--within", "within_s", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
              help="Longest wait for workers to join the next generation.  [default: 300]")
@click.option("--max-replaced", type=click.IntRange(0), help="Most lost workers to replace.  [default: 10]")
@click.option("--control", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="File to create, by which `bpsfast add` finds the job.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
              help="End the job after this time.")
@click.option("--grace", "grace_s", type=click.FloatRange(0), metavar="SECONDS",
              help="After SIGTERM, which the ranks get first: time for them to end (bpsfast.preempted).  [default: 30]")
@click.option("--tee-dir", type=_FOLDER, help="Also write the output of every process to this folder.")
@click.option("--output-filename", "rank_dir", type=_FOLDER, metavar="DIR",
              help="Also write the output of each rank to DIR/rank.N/stdout and stderr.")
@click.option("--prefix-output-with-timestamp", "stamped", is_flag=True, help="Start each output line with its time.")
@click.option("--dry-run", is_flag=True, help="Print the commands and start nothing.")
@click.option("--json", "as_json", is_flag=True,
              help="With --dry-run: print one JSON document, which includes the job key.")
@set_option
@click.argument("program", required=True, nargs=-1, type=click.UNPROCESSED)
@exit_on_error
def command(**options: Any) -> None:
    """Run a program as a job."""
    from ...launch import elastic_job, local_job, ssh_job
    from ...launch.output import Output
    from ...launch.supervisor import GRACE_S, Limits
    from ...orchestration.elastic.coordinator import ElasticRules

    if options["rate"] is not None and not options["netns"]:
        raise ConfigError("--rate needs --netns: it limits the links between network namespaces")
    if options["as_json"] and not options["dry_run"]:
        raise ConfigError("--json needs --dry-run: the output of a running job is that of its program")
    chosen = _take_elastic(options)
    hosts_plan = None if chosen is None else _take_hosts(options, chosen)
    plan = None if hosts_plan is not None else take_plan(options, _SIMULATED)
    program, show_only = options["program"], options["dry_run"]
    given = overrides(options["assignments"], max_helpers=options["max_helpers"])
    loaded = settings.load(given, _without_place(os.environ))
    logs.set_identity("launcher")
    limits = Limits(job_s=options["timeout_s"],
                    grace_s=GRACE_S if options["grace_s"] is None else options["grace_s"])
    out = Output(tee_dir=options["tee_dir"], rank_dir=options["rank_dir"], stamped=options["stamped"])
    with contextlib.closing(out):
        if hosts_plan is not None and chosen is not None:
            try:
                sys.exit(elastic_job.run_on_hosts(hosts_plan, program, loaded, chosen, options["n_ranks"],
                                                  limits=limits, output=out))
            except KeyboardInterrupt:  # before the job ran; then `Supervisor` ends it
                click.echo("bpsfast: interrupted before anything was started", err=True)
                sys.exit(130)
        if plan is None:
            shape = local_job.shape_of(options["n_ranks"] or 1, options["n_nodes"] or 1, options["n_helpers"] or 0,
                                 options["ranks"])
            if chosen is not None:
                control = chosen.pop("control", None)
                rules = ElasticRules(**{"max_ranks": sum(shape.ranks), **chosen})
                sys.exit(elastic_job.run(shape, program, loaded, rules, limits=limits, output=out, control=control))
            if show_only and options["as_json"]:
                return _show_plan([("", os.getcwd(), [], local_job.planned(shape, program, loaded))])
            if show_only:
                return local_job.dry_run(shape, program, loaded, click.echo)
            sys.exit(local_job.run(shape, program, loaded, netns=options["netns"], rate=options["rate"], limits=limits,
                             output=out, restarts=options["restarts"]))
        if show_only and options["as_json"]:
            folder = plan.ssh.directory or os.getcwd()
            return _show_plan([(host.name, folder, plan.ssh.argv(host), commands)
                               for host, commands in ssh_job.planned(plan, program, loaded)])
        if show_only:
            return ssh_job.dry_run(plan, program, loaded, click.echo)
        try:
            sys.exit(ssh_job.run(plan, program, loaded, limits=limits, output=out, restarts=options["restarts"]))
        except KeyboardInterrupt:  # before the job ran; then `Supervisor` ends it
            click.echo("bpsfast: interrupted before anything was started", err=True)
            sys.exit(130)


def _show_plan(hosts: list[tuple[str, str, list[str], list[Command]]]) -> None:
    """Print as JSON what would be started on each host: name ("" is this one), folder, agent, processes."""
    output.show(output.OutputOptions(as_json=True), str, {"hosts": [{
        "name": name, "folder": folder, "agent": agent,
        "processes": [{"name": command.name, "kind": command.kind.value, "argv": list(command.argv),
                       "environ": dict(command.environ)} for command in commands],
    } for name, folder, agent, commands in hosts]})


def _take_elastic(options: dict[str, Any]) -> dict[str, Any] | None:
    """Pop the options of elastic jobs from *options*; return those that are given, None without ``--elastic``."""
    given = {name: value for name in _ELASTIC if (value := options.pop(name)) is not None}
    if not options.pop("elastic"):
        if given:
            raise ConfigError(f"{', '.join(_ELASTIC[name] for name in given)}: needs --elastic")
        return None
    others = {"netns": "--netns", "n_helpers": "--helpers", "helpers_on": "--helpers-on",
              "max_helpers": "--max-helpers", "scheduler_host": "--scheduler-host", "dry_run": "--dry-run"}
    wrong = [typed for name, typed in others.items() if options.get(name)]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} with --elastic: an elastic job has no helpers, and the ranks of each of "
                          "its jobs choose where the scheduler runs")
    return given


def _take_hosts(options: dict[str, Any], chosen: dict[str, Any]) -> HostsPlan | None:
    """Pop the options of an elastic job's hosts from *options* and *chosen*; return None if it runs on this machine."""
    from ...launch.elastic_job import HostsPlan

    script = chosen.get("script")
    lists = {"-H": options["hosts_text"], "--hostfile": options["hostfile"], _ELASTIC["script"]: script}
    lists = {name: value for name, value in lists.items() if value is not None}
    if len(lists) > 1:
        raise ConfigError(f"{' and '.join(lists)} both name hosts: use only one of them")
    if "slots" in chosen and script is None:
        raise ConfigError("--slots: needs --host-discovery-script; -H and hostfiles have a number for each host")
    if not lists:
        if "cooldown_s" in chosen:
            raise ConfigError("--blacklist-cooldown: there are no hosts; name them with -H, --hostfile or "
                              "--host-discovery-script")
        return None
    if "control" in chosen:
        raise ConfigError("--control: on hosts workers are started by themselves, up to --max-ranks; list further "
                          "hosts by --host-discovery-script")
    wrong = [f"--{name.removeprefix('n_')}" for name in _SIMULATED if options[name]]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} simulates machines on this host, but {next(iter(lists))} names real "
                          "hosts: use only one of them")
    ssh, variables = take_ssh(options), variables_of(options)
    hosts = hosts_of(options.pop("hosts_text"), options.pop("hostfile"))
    given = {name: chosen.pop(name) for name in _OF_HOSTS if name in chosen}
    return HostsPlan(hosts=hosts, ssh=ssh, variables=variables, **given)


def _without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return *environ* without the rank variables of an enclosing job, which are not meant for this one."""
    places = ("rank", "size", "local_rank", "local_size", "node_id", "node_index", "num_nodes", "num_helpers",
              "num_servers", "scheduler", "scheduler_index", "coordinator", "member")
    aliases = {alias for row in settings.table() if row.name in places for alias in (row.variable, *row.aliases)}
    return {name: value for name, value in environ.items() if name not in aliases}


@click.command()
@click.option("-n", "count", type=click.IntRange(1), default=1, show_default=True, help="Number of workers.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("control", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@exit_on_error
def add(count: int, control: Path, as_json: bool) -> None:
    """Add workers to a running elastic job; FILE is that of `bpsfast run --elastic --control FILE`.

    They join at the next commit of the program. Exit code 1 if fewer workers than requested were started.

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
        click.echo(f"bpsfast: {added.count} of {count} workers were started: {added.reason}", err=True)
        sys.exit(FAILED)
