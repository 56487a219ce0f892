"""Slurm: ``srun`` starts the ranks; each is told its number, its node's, and the step's list of nodes.

Only tasks of a step are ranks. A batch script has SLURM_PROCID=0 too, and the SLURM_NTASKS that its steps will get, but
is no task: it has no step id, or that of one of Slurm's own steps (batch, interactive, extern), which are very large.

The scheduler is on the first node of the *step*'s list, which may be a part of the job's; SLURM_LAUNCH_NODE_IPADDR is
where srun runs. Task 0 need not be on the first node (``--distribution=arbitrary``), so it is the first task of that
node, not rank 0, that starts the scheduler.
"""
from __future__ import annotations

from ...base.settings import Settings
from ...orchestration.errors import ConfigError
from ..process_role import (
    ProcessRole,
    check_range,
    format_address,
    integer,
    job,
    local_job,
    node_id_or_default,
    scheduler_port,
)
from . import node_list
from .environment import Environ, Environment, are_set, are_unset

_NEEDED = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
#: of each the first that is set counts: the step's own, then what older versions call it
_STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")
_JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")
_N_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_ANY_OF = (_JOB_ID, _N_TASKS, _NODES, _TASKS_PER_NODE)
#: Ids from here on are Slurm's own: steps of users count from 0.
_OWN_STEPS = 0xFFFF_FFF0
#: Jobs that follow each other get ports far apart, and so do a job's steps.
_STEPS_APART = 31


def no_task(environ: Environ) -> str | None:
    """Return what to tell the user of a program that runs alone where Slurm has place for several; None otherwise."""
    n_tasks = environ.get("SLURM_NTASKS", "1")
    if _is_task(environ) or not _first(_JOB_ID, environ) or n_tasks in ("", "1"):
        return None
    return ("this program runs alone, as a job of one rank: it was started in Slurm's allocation (SLURM_NTASKS = "
            f"{n_tasks}), but not as a task of it. Start its ranks by `srun python ...`, or torchrun, or `bpsfast run`")


def _is_task(environ: Environ) -> bool:
    step = _first(_STEP_ID, environ)
    return bool(environ.get("SLURM_PROCID")) and step.isdecimal() and int(step) < _OWN_STEPS


def _marks(settings: Settings, environ: Environ) -> list[str]:
    return are_set(("SLURM_PROCID", *_STEP_ID), environ) if _is_task(environ) else []


def _missing(settings: Settings, environ: Environ) -> list[str]:
    return are_unset(_NEEDED, environ) + [names[0] for names in _ANY_OF if not _first(names, environ)]


def _place(settings: Settings, environ: Environ) -> ProcessRole:
    number = {name: integer(name, environ) for name in _NEEDED}
    rank, local_rank, index = (number[name] for name in _NEEDED)
    n_tasks = next(name for name in _N_TASKS if environ.get(name))
    size = integer(n_tasks, environ)
    check_range("SLURM_PROCID", rank, n_tasks, size)
    nodes, counts = _nodes(environ), _counts(environ)
    if len(nodes) != len(counts) or sum(counts) != size:
        raise ConfigError(f"Slurm's variables contradict each other: {_shown(_NODES, environ)} are {len(nodes)} nodes, "
                          f"{_shown(_TASKS_PER_NODE, environ)} are {sum(counts)} tasks on {len(counts)} nodes, and "
                          f"{n_tasks} = {size}. Some may be left of another step")
    check_range("SLURM_NODEID", index, "the number of nodes", len(nodes))
    check_range("SLURM_LOCALID", local_rank, f"the tasks of {nodes[index]}", counts[index])
    here = environ.get("SLURMD_NODENAME", nodes[index])
    if here != nodes[index]:
        raise ConfigError(f"SLURM_NODEID = {index} of {_shown(_NODES, environ)} is {nodes[index]}, but this is "
                          f"SLURMD_NODENAME = {here}: some of these variables are left of another job or step "
                          "(sbatch within srun?)")
    number_of_job, step = _first(_JOB_ID, environ), _first(_STEP_ID, environ)
    if len(nodes) == 1 and not settings.scheduler and not settings.expects_helpers:
        fields = local_job(settings, f"slurm|{number_of_job}|{step}|{nodes[0]}", size)
    else:
        fields = job(settings, settings.scheduler or format_address(nodes[0], _port(number_of_job, step)))
    fields["node_id"] = node_id_or_default(settings, f"slurm-{number_of_job}.{step}-{index}")
    first = local_rank == 0
    return ProcessRole(launcher="slurm", role="rank", rank=rank, size=size, local_rank=local_rank, local_size=counts[index],
                 **(fields | {"node_index": index, "num_nodes": len(nodes)}), starts_node=first,
                 starts_scheduler=first and index == 0)


def _port(number_of_job: str, step: str) -> int:
    try:
        return scheduler_port(int(number_of_job) * _STEPS_APART + int(step))
    except ValueError:
        raise ConfigError(f"SLURM_JOB_ID = {number_of_job!r} is no whole number") from None


def _nodes(environ: Environ) -> list[str]:
    try:
        return node_list.expand(_first(_NODES, environ))
    except ValueError as exc:
        raise ConfigError(f"{_shown(_NODES, environ)} cannot be read: {exc}") from None


def _counts(environ: Environ) -> list[int]:
    try:
        return node_list.tasks_per_node(_first(_TASKS_PER_NODE, environ))
    except ValueError as exc:
        raise ConfigError(f"{_shown(_TASKS_PER_NODE, environ)} cannot be read: {exc}") from None


def _first(names: tuple[str, ...], environ: Environ) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _shown(names: tuple[str, ...], environ: Environ) -> str:
    return next(f"{name} = {environ[name]}" for name in names if environ.get(name))


SLURM = Environment("slurm", 2, _marks, _missing, _place)
