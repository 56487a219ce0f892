"""``bpsfast run -H``: a job whose nodes are other hosts, started and watched from here over one ssh for each host.

The scheduler runs on the first host: hosts that train together reach each other, but not always the launcher's machine.
If it is lost with its host, and the job goes on, another one is started on the next host of a list that all nodes know.
Secrets, such as the job's key, go through ssh's standard input.
"""
from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ..base.addresses import is_loopback
from ..base.job_key import given_key
from ..base.settings import Settings
from ..orchestration.errors import ConfigError
from ..orchestration.host_lookup import format_address
from . import local_job
from .daemons import clean_environment
from .host_list import Host
from .output import Output
from .processes import Command
from .remote_hosts import SILENCE_S, RemoteHosts
from .ssh import Ssh
from .supervisor import Limits, SpareScheduler, Supervisor


class SshPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where to run a job. `hosts` have ranks, in node order, `helpers` have none. `variables` are for every process."""

    hosts: Sequence[Host]
    helpers: Sequence[Host] = ()
    ssh: Ssh
    variables: Mapping[str, str] = {}
    scheduler_host: str = ""

    @property
    def all_hosts(self) -> list[Host]:
        """All hosts in node order."""
        return [*self.hosts, *self.helpers]

    @property
    def shape(self) -> local_job.JobShape:
        """The job's shape."""
        return local_job.JobShape(ranks=tuple(host.slots for host in self.hosts), n_helpers=len(self.helpers))


def run(plan: SshPlan, program: Sequence[str], settings: Settings, *, limits: Limits | None = None,
        output: Output | None = None, restarts: int = 0) -> int:
    """Run *program* as the ranks of a job to its end; return its exit code. *restarts*: of lost helpers, in all. Main
    thread only.

    Raises `BpsError` if a host cannot be used; nothing was started on any host.
    """
    _check(plan, program, settings)
    output = output or Output()
    with RemoteHosts(plan.all_hosts, plan.ssh, output) as remote:
        remote.connect()
        scheduler = remote.scheduler_address(plan.scheduler_host)
        spare_hosts = [] if is_loopback(scheduler[0]) else remote.spare_addresses()
        if spare_hosts and (warning := late_takeover(settings)):
            output.say(warning)
        commands = _commands(plan, program, settings, scheduler, given_key(settings) or secrets.token_hex(32),
                             remote.master_port(), [address for _, address in spare_hosts])
        hosts = [remote.hosts[number_of(command)] for command in commands]
        spares = [SpareScheduler(local_job.next_scheduler(commands[0], index), host, format_address(*address))
                  for index, (host, address) in enumerate(spare_hosts, 1)]
        return Supervisor(commands, limits=limits, output=output, hosts=hosts, restarts=restarts,
                          min_workers=local_job.fewest_workers(settings), spares=spares).run()


def late_takeover(settings: Settings) -> str:
    """Return a warning if no scheduler can take over in time when the first host falls silent; "" if one can, or if the
    job ends with the host anyway.
    """
    needed_s = SILENCE_S + settings.lease_s
    if local_job.fewest_workers(settings) is None or settings.start_timeout_s >= needed_s:
        return ""
    timeout_s = f"{settings.start_timeout_s:g}"
    return (f"start_timeout_s = {timeout_s} is too short for a job that is to go on when its first host falls silent: "
            f"the launcher notices that after {SILENCE_S:g} s, and nodes end {timeout_s} s after they have heard the "
            f"scheduler. Set it to {needed_s:g} (with lease_s = {settings.lease_s:g}) or more")


def planned(plan: SshPlan, program: Sequence[str], settings: Settings) -> list[tuple[Host, list[Command]]]:
    """Return what `run` would start on each host, without asking any: scheduler address and key are not known yet."""
    _check(plan, program, settings)
    commands = [msgspec.structs.replace(command, environ={
        name: value for name, value in command.environ.items() if name != "BPSFAST_SCHEDULER"})
        for command in _commands(plan, program, settings, ("", 0), "")]
    return [(host, [command for command in commands if number_of(command) == number])
            for number, host in enumerate(plan.all_hosts)]


def dry_run(plan: SshPlan, program: Sequence[str], settings: Settings, show: Callable[[str], None]) -> None:
    """Print what `run` would start on each host, without asking any."""
    for host, commands in planned(plan, program, settings):
        show(f"# {host.name}, in {plan.ssh.directory or os.getcwd()}: {shlex.join(plan.ssh.argv(host))}")
        for command in commands:
            added = [f"{name}={shlex.quote(value)}" for name, value in command.environ.items()]
            show(f"{command.name}: {' '.join([*added, shlex.join(command.argv)])}")


def variables(assignments: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of ``-x NAME=VALUE`` and ``-x NAME`` (with its value here).

    Raises `ConfigError` for a name that is not set here, or by which only the launcher gives a process its role or
    settings.
    """
    environ = os.environ if environ is None else environ
    found = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not clean_environment({name: ""}):
            raise ConfigError(f"-x {assignment}: the launcher gives each process its role; settings reach all hosts "
                              "from here, by --set NAME=VALUE or BPSFAST_NAME")
        if not equals and name not in environ:
            raise ConfigError(f"-x {name}: it is not set here; -x {name}=VALUE gives it a value")
        found[name] = value if equals else environ[name]
    return found


def number_of(command: Command) -> int:
    """Return the number of the host of *command*; the scheduler runs on host 0."""
    return int(command.environ.get("BPSFAST_NODE_INDEX", "0"))


def _commands(plan: SshPlan, program: Sequence[str], settings: Settings, scheduler: tuple[str, int], key: str,
              master_port: int = 0, next_schedulers: Sequence[tuple[str, int]] = ()) -> list[Command]:
    return local_job.plan(plan.shape, program, settings, plan.variables, scheduler, key, python=plan.ssh.python,
                    master_port=master_port, next_schedulers=next_schedulers)


def _check(plan: SshPlan, program: Sequence[str], settings: Settings) -> None:
    local_job.check_program(program)
    for name in ("node_host", "advertise"):
        if getattr(settings, name) and len(plan.all_hosts) > 1:
            raise ConfigError(f"BPSFAST_{name.upper()} = {getattr(settings, name)} is the address of one machine, and "
                              f"there are {len(plan.all_hosts)} hosts: name the network by --set interface=NAME")
