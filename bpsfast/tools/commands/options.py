"""The options that several commands share: settings, hosts, recorded machines; and the help page of groups."""
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...orchestration.errors import ConfigError

if TYPE_CHECKING:
    from ...launch import ssh_job
    from ...launch.host_list import Host
    from ...launch.ssh import Ssh


def _names(context: click.Context, option: click.Parameter, incomplete: str) -> list[str]:
    from ...base.settings import table

    return [f"{row.name}=" for row in table() if row.name.startswith(incomplete.replace("-", "_"))]


#: Adds the option ``--set``; its values arrive as the parameter *assignments*, see `overrides`.
set_option = click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", shell_complete=_names,
    help="Set a setting, such as --set partition_bytes=1M (`bpsfast env` lists them).")
#: Adds the option ``--verbs``; it arrives as the parameter *verbs*, None if not given.
verbs_option = click.option("--verbs", type=click.Choice(["native", "pyverbs"]), metavar="native|pyverbs",
                            help="Implementation of RDMA verbs to use (native).")
#: Adds the option ``--root``; it arrives as the parameter *root*, None for this machine.
root_option = click.option("--root", type=click.Path(), metavar="DIR", help="Examine the machine recorded in DIR (its "
                           "/sys, /proc, /dev) instead of this one.")
#: Adds the option ``-H``; it arrives as the parameter *hosts_text*.
hosts_option = click.option("-H", "--hosts", "hosts_text", metavar="HOST[:N],...",
                            help="Hosts and the number of ranks on each; other hosts are reached by ssh.")


def overrides(assignments: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Return the settings of the command line: *assignments* NAME=VALUE, overridden by the *options* that are given."""
    given: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: expected NAME=VALUE")
        name = name.strip().lower().replace("-", "_")
        if name == "job_key":
            raise ConfigError("--set job_key: every user of this machine can read command lines; set BPSFAST_JOB_KEY, "
                              "or use --set job_key_file=PATH")
        given[name] = value
    return given | {name: value for name, value in options.items() if value is not None}


_JOB = {"helpers_on": "--helpers-on", "scheduler_host": "--scheduler-host", "assigned": "-x"}
_SSH = ("ssh_port", "identity_file", "ssh_options", "remote_python", "remote_dir")


def ssh_options(function: Callable) -> Callable:
    """Add the options of ssh and of the processes that it starts; `take_ssh` reads them."""
    return with_options(function, [
        click.option("--ssh-port", type=click.IntRange(1, 65535), help="Port of sshd on all hosts."),
        click.option("--identity-file", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
                     help="Private key for ssh."),
        click.option("--ssh-option", "ssh_options", multiple=True, metavar="NAME=VALUE",
                     help="Option for ssh, as after its -o."),
        click.option("--remote-python", metavar="PATH", help="Python with bpsfast on the hosts.  [default: the path "
                     "of this one]"),
        click.option("--remote-dir", metavar="PATH", help="Working directory on the hosts.  [default: this one]"),
    ])


def job_options(function: Callable) -> Callable:
    """Add the options of commands that start a job on hosts; `take_plan` reads them."""
    return with_options(function, [
        hosts_option,
        click.option("--hostfile", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
                     help="File with hosts instead of -H, one per line: `host slots=N` or host:N; repeats add up."),
        click.option("--helpers-on", metavar="HOST,...", help="Hosts without ranks that only sum."),
        click.option("--scheduler-host", metavar="ADDRESS", help="Address of the first host, where the scheduler "
                     "runs, that all hosts can reach.  [default: detected]"),
        ssh_options,
        click.option("-x", "assigned", multiple=True, metavar="NAME[=VALUE]",
                     help="Environment variable for processes on hosts."),
    ])


def with_options(function: Callable, options: Sequence[Callable[[Any], Any]]) -> Callable:
    """Add *options* to a command; its help page lists them in this order."""
    for option in reversed(options):
        function = option(function)
    return function


def take_plan(options: dict[str, Any], simulated: Sequence[str]) -> ssh_job.SshPlan | None:
    """Pop the options of `job_options` from *options*; return what runs on which host, None if no host is named.

    *simulated*: names of the options for simulated machines, which exclude hosts. ``n_ranks`` stays in *options*.
    Raises `ConfigError` if the options contradict each other.
    """
    from ...launch import host_list, ssh_job

    hosts = hosts_of(options.pop("hosts_text"), options.pop("hostfile"))
    typed = given_ssh_options(options)
    ssh = take_ssh(options)
    given = {name: options.pop(name) for name in _JOB}
    if not hosts:
        wrong = [*(_JOB[name] for name, value in given.items() if value), *typed]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: there are no hosts; name them with -H or --hostfile")
        return None
    wrong = [f"--{name.removeprefix('n_')}" for name in simulated if options[name]]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} simulates machines on this host, but -H or --hostfile name real hosts: "
                          "use only one of them (for helpers on hosts use --helpers-on)")
    ranks_on = host_list.assign(hosts, options["n_ranks"])
    helpers = host_list.helpers(given["helpers_on"], ranks_on) if given["helpers_on"] else []
    return ssh_job.SshPlan(hosts=ranks_on, helpers=helpers, ssh=ssh, scheduler_host=given["scheduler_host"] or "",
                           variables=ssh_job.variables(given["assigned"]))


def take_ssh(options: dict[str, Any]) -> Ssh:
    """Pop the options of `ssh_options` from *options*."""
    from ...launch.ssh import Ssh

    port, identity_file, more, python, directory = (options.pop(name) for name in _SSH)
    path = [os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return Ssh(port=port, identity_file=identity_file and os.path.abspath(identity_file), options=more,
               python=python or sys.executable, directory=directory or os.getcwd(), python_path=os.pathsep.join(path))


def variables_of(options: dict[str, Any]) -> dict[str, str]:
    """Pop the variables of ``-x`` from *options*; raise `ConfigError` for those that the launcher sets."""
    from ...launch import ssh_job

    return ssh_job.variables(options.pop("assigned"))


def given_ssh_options(options: Mapping[str, Any]) -> list[str]:
    """Return the names, as typed, of the options of `ssh_options` that are given."""
    typed = {"ssh_options": "--ssh-option"}
    return [typed.get(name, "--" + name.replace("_", "-")) for name in _SSH if options.get(name)]


def hosts_of(text: str | None, hostfile: Path | None) -> list[Host]:
    """Return the hosts of -H or --hostfile, this one marked; raise `ConfigError` for both or an invalid list."""
    from ...launch import host_list

    if text is not None and hostfile is not None:
        raise ConfigError(f"-H {text} and --hostfile {hostfile} both name hosts: use only one of them")
    if text is not None:
        return host_list.with_own(host_list.parse(text))
    return [] if hostfile is None else host_list.with_own(host_list.read(hostfile))


class FullHelpGroup(click.Group):
    """A group whose help page shows the whole first sentence of each command; click cuts it at the end of a line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=200))
                                for name in self.list_commands(ctx)])
