"""``bpsfast run``: a whole job on this machine, with scheduler, nodes, ranks and helpers, from one command.

`plan` decides which processes run with which environment; ``--dry-run`` prints that for starting them by hand. The
`supervisor` runs them. Ranks get torchrun's variables, too, so a program of torch.distributed runs unchanged with any
backend.

``bpsfast dmlc`` acts by BytePS's variables, as bpslaunch did.
"""
from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ..base import logs
from ..base.addresses import configured_host
from ..base.job_key import given_key
from ..base.settings import Settings, environment, format_addresses
from ..orchestration.errors import ConfigError
from . import roles
from .daemons import N_RESTARTS, clean_environment, reserve_master_port, reserve_port, run_scheduler
from .environments import is_local_byteps_job
from .namespaces.cluster import Cluster, Machine
from .namespaces.faulty_link import FaultyLink
from .output import Output
from .processes import Command, Kind, thread_defaults
from .supervisor import GRACE_S, Limits, Supervisor

_KEY = "BPSFAST_JOB_KEY"
_LOOPBACK = "127.0.0.1"
_NETNS_PORT, _NETNS_MASTER_PORT = 7700, 29500  # in a new namespace every port is free


class JobShape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a job: the number of `ranks` of each node in node order, and of helpers."""

    ranks: tuple[int, ...]
    n_helpers: int = 0

    @property
    def machines(self) -> list[str]:
        """The machines' names: nodes in order, then helpers."""
        return [f"node{i}" for i in range(len(self.ranks))] + [f"helper{i}" for i in range(self.n_helpers)]


def shape_of(n_ranks: int, n_nodes: int, n_helpers: int, ranks: str | None = None) -> JobShape:
    """Return the shape of *n_ranks* spread evenly over *n_nodes*, the first nodes one more; or as *ranks* ("2,3") says.

    Raises `ConfigError` if a node would have no rank.
    """
    if ranks is not None:
        parts = ranks.split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise ConfigError(f"--ranks {ranks}: expected the ranks of each node, each at least 1, such as 2,3")
        return JobShape(ranks=tuple(int(part) for part in parts), n_helpers=n_helpers)
    if not 1 <= n_nodes <= n_ranks:
        raise ConfigError(f"{n_ranks} ranks cannot be spread over {n_nodes} nodes: each needs one (see --helpers)")
    share, more = divmod(n_ranks, n_nodes)
    return JobShape(ranks=tuple(share + (i < more) for i in range(n_nodes)), n_helpers=n_helpers)


def plan(shape: JobShape, program: Sequence[str], settings: Settings, environ: Mapping[str, str],
         scheduler: tuple[str, int], key: str, cluster: Cluster | FaultyLink | None = None, python: str = "",
         master_port: int = 0, next_schedulers: Sequence[tuple[str, int]] = ()) -> list[Command]:
    """Return the job's commands in the order of starting: scheduler, nodes, helpers, ranks.

    The address of the *scheduler* and the job's *key* (hex) are in every environment and in no command line. *cluster*
    has machines to start on, named as `JobShape.machines`; None: all on this one, over loopback. If *python* is given,
    the processes run on other hosts (`ssh_job`), daemons by this interpreter: the environments are added to those of
    the hosts, and each node finds its own address. *master_port* is free on rank 0's machine, where the scheduler runs
    unless there is a *cluster*; 0: not known yet. *next_schedulers*: where another scheduler may take over
    (`next_scheduler`).
    """
    base = clean_environment(environ)
    job = msgspec.structs.replace(
        settings, scheduler=format_addresses([scheduler, *next_schedulers]), scheduler_index=-1, job_key=key,
        job_key_file="", num_nodes=len(shape.ranks), num_helpers=shape.n_helpers, num_servers=-1,
        size=sum(shape.ranks), rank=-1, local_rank=-1, local_size=-1, node_index=-1)
    first = msgspec.structs.replace(job, scheduler_index=0 if next_schedulers else -1)
    commands = [_daemon("scheduler", "scheduler", first, base, cluster.hub if cluster else None, python)]
    master = (cluster[shape.machines[0]].address if cluster else scheduler[0], master_port)
    ranks: list[Command] = []
    for index, (name, n_local) in enumerate(zip(shape.machines, [*shape.ranks, *[0] * shape.n_helpers])):
        machine = cluster[name] if cluster else None
        host = machine.address if machine else job.node_host or ("" if python else scheduler[0])
        node_id = f"{name} of {job.scheduler}"  # differs from other jobs of the same key
        here = msgspec.structs.replace(job, node_id=node_id, node_index=index, local_size=n_local, node_host=host,
                                       advertise=job.advertise if python else "")
        title = f"node {index}" if n_local else f"helper {index - len(shape.ranks)}"
        kind = Kind.DAEMON if n_local else Kind.HELPER
        commands.append(_daemon("node", title, here, base, machine, python, kind, index if n_local else -1))
        for local_rank in range(n_local):
            mine = msgspec.structs.replace(here, rank=len(ranks), local_rank=local_rank)
            variables = {**({} if python else thread_defaults(mine.size)), **base, **_torch_variables(mine, master),
                         **environment(mine)}
            ranks.append(Command(f"rank {len(ranks)}", Kind.RANK, tuple(program), variables,
                                 machine.via() if machine else (), node=index))
    return commands + ranks


def next_scheduler(scheduler: Command, index: int) -> Command:
    """Return the command of the scheduler at the address *index* of the list, in place of the first *scheduler*."""
    return msgspec.structs.replace(scheduler, environ={**scheduler.environ, "BPSFAST_SCHEDULER_INDEX": str(index)})


def fewest_workers(settings: Settings) -> int | None:
    """Return the fewest ranks with which a job goes on after a loss; None if every loss ends it."""
    return settings.min_workers if settings.on_worker_loss == "continue" else None


def run(shape: JobShape, program: Sequence[str], settings: Settings, *, netns: bool = False, rate: str | None = None,
        limits: Limits | None = None, output: Output | None = None, environ: Mapping[str, str] | None = None,
        restarts: int = 0) -> int:
    """Run the job to its end; return its exit code. *restarts*: of lost helpers, in all. Main thread only.

    Raises `ConfigError` if *program* is a script instead of a command, or the settings name no interface of this
    machine.
    """
    check_program(program)
    environ = os.environ if environ is None else environ
    key = given_key(settings) or secrets.token_hex(32)
    if netns:
        with Cluster(shape.machines, rates=rate) as cluster:
            commands = plan(shape, program, settings, environ, (cluster.hub.address, _NETNS_PORT), key, cluster,
                            master_port=_NETNS_MASTER_PORT)
            return Supervisor(commands, limits=limits, output=output, restarts=restarts,
                              min_workers=fewest_workers(settings)).run()
    configured_host(settings)  # not used on the loopback, but a wrong interface is a mistake
    with reserve_port(_LOOPBACK) as reserved, reserve_master_port() as master:
        commands = plan(shape, program, settings, environ, reserved.getsockname(), key,
                        master_port=master.getsockname()[1])
        return Supervisor(commands, limits=limits, output=output, restarts=restarts,
                          min_workers=fewest_workers(settings)).run()


def planned(shape: JobShape, program: Sequence[str], settings: Settings) -> list[Command]:
    """Return the commands that `run` would start, with only the variables that it adds."""
    check_program(program)
    key = given_key(settings) or secrets.token_hex(32)
    with reserve_port(_LOOPBACK) as reserved, reserve_master_port() as master:
        return plan(shape, program, settings, {}, reserved.getsockname(), key, master_port=master.getsockname()[1])


def dry_run(shape: JobShape, program: Sequence[str], settings: Settings, show: Callable[[str], None]) -> None:
    """Print the commands of the job for starting them by hand, in any order.

    The first line has the job's key, and is needed in every terminal.
    """
    commands = planned(shape, program, settings)
    show(f"export {_KEY}={commands[0].environ[_KEY]}")
    for command in commands:
        variables = [f"{name}={shlex.quote(value)}" for name, value in command.environ.items() if name != _KEY]
        show(f"# {command.name}")
        show(" ".join([*variables, shlex.join(command.argv)]))


def dmlc(program: Sequence[str], settings: Settings, run_node: Callable[[Settings], int]) -> int:
    """Act by ``DMLC_ROLE`` as bpslaunch did: scheduler, server (the machine's node or a helper), or ranks.

    Returns the exit code. In a job on one machine (`environments.is_local_byteps_job`) scheduler and server do nothing.
    """
    role = os.environ.get("DMLC_ROLE", "")
    if role == "worker":
        return _dmlc_worker(program, settings, os.environ)
    if role not in ("scheduler", "server"):
        raise ConfigError(f"DMLC_ROLE = {role!r}: expected scheduler, server or worker")
    role_here = roles.detect(settings)
    if not role_here.job_key:
        print(f"bpsfast: a job on one machine needs no {role}: nothing to do", file=sys.stderr)
        return 0
    filled = role_here.settings(settings)
    return run_scheduler(filled) if role == "scheduler" else run_node(filled)


def _dmlc_worker(program: Sequence[str], settings: Settings, environ: Mapping[str, str]) -> int:
    if not program:
        raise ConfigError("DMLC_ROLE = worker: expected the program to start, `bpsfast dmlc -- python train.py`")
    check_program(program)
    n_local = settings.local_size
    if n_local < 0:
        devices = environ.get("NVIDIA_VISIBLE_DEVICES", "")
        n_local = len(devices.split(",")) if devices and devices not in ("all", "none", "void") else 1
    base = {**thread_defaults(n_local), **environ}
    if is_local_byteps_job(settings, environ):  # no other process joins; a given key may be that of another job
        base[_KEY] = secrets.token_hex(32)
    commands = [
        Command(f"worker {max(0, settings.node_index)} local rank {i}", Kind.RANK, tuple(program),
                base | {"BYTEPS_LOCAL_RANK": str(i), "BYTEPS_LOCAL_SIZE": str(n_local)})
        for i in range(n_local)]
    logs.set_identity("launcher")
    return Supervisor(commands, limits=Limits(grace_s=GRACE_S)).run()


def check_program(program: Sequence[str]) -> None:
    """Raise `ConfigError` if *program* is a script instead of a command."""
    if program[0].endswith(".py") and shutil.which(program[0]) is None:
        raise ConfigError(f"{program[0]} is no command that can be run: start a Python program by python: "
                          f"{shlex.join(['python', *program])}")


def _daemon(role: str, title: str, settings: Settings, base: Mapping[str, str], machine: Machine | None,
            python: str, kind: Kind = Kind.DAEMON, node: int = -1) -> Command:
    environ = {**base, **environment(settings), "PYTHONSAFEPATH": "1"}
    n_restarts = N_RESTARTS if role == "scheduler" else 0  # a node's memory would be lost
    return Command(title, kind, (python or sys.executable, "-m", "bpsfast", role), environ,
                   machine.via() if machine else (), n_restarts, node)


def _torch_variables(rank: Settings, master: tuple[str, int]) -> dict[str, str]:
    """Return the variables that torchrun would set for *rank*; the port of *master* is 0 if it is not known."""
    found = {"RANK": rank.rank, "WORLD_SIZE": rank.size, "LOCAL_RANK": rank.local_rank,
             "LOCAL_WORLD_SIZE": rank.local_size, "GROUP_RANK": rank.node_index, "NODE_RANK": rank.node_index,
             "GROUP_WORLD_SIZE": rank.num_nodes}
    host, port = master
    address = {"MASTER_ADDR": host, "MASTER_PORT": str(port)} if port else {}
    return {name: str(number) for name, number in found.items()} | address
