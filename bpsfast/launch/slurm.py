"""Read this rank's place in the job from Slurm's environment variables, and expand their lists of nodes and tasks.

``srun`` starts the ranks; each gets its number, its node's, and the step's list of nodes. Only tasks of a step are
ranks. A batch script has SLURM_PROCID=0 too, and the SLURM_NTASKS that its steps will get, but is no task: it has no
step id, or that of one of Slurm's own steps (batch, interactive, extern), which are very large.

The scheduler is on the first node of the *step*'s list, which may be a part of the job's; SLURM_LAUNCH_NODE_IPADDR is
where srun runs. Task 0 need not be on the first node (``--distribution=arbitrary``), so it is the first task of that
node, not rank 0, that starts the scheduler.
"""
from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..base.byteps_variables import whole_number
from ..base.job_key import node_id_or_default
from ..base.settings import Settings
from ..orchestration.errors import ConfigError
from ..orchestration.host_lookup import format_address
from .process_role import (
    Environ,
    Environment,
    ProcessRole,
    are_set,
    are_unset,
    check_range,
    fields_of_job,
    fields_of_local_job,
    integer,
    scheduler_port,
)

_T = TypeVar("_T")
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
#: Slurm itself has no more nodes than this.
_MOST_NODES = 1 << 16
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


class Slurm(Environment):
    """Variables of a task of a Slurm step."""

    name = "slurm"
    level = 2

    def marks(self, settings: Settings, environ: Environ) -> list[str]:
        return are_set(("SLURM_PROCID", *_STEP_ID), environ) if _is_task(environ) else []

    def missing(self, settings: Settings, environ: Environ) -> list[str]:
        return are_unset(_NEEDED, environ) + [names[0] for names in _ANY_OF if not _first(names, environ)]

    def role(self, settings: Settings, environ: Environ) -> ProcessRole:
        number = {name: integer(name, environ) for name in _NEEDED}
        rank, local_rank, index = (number[name] for name in _NEEDED)
        n_tasks = next(name for name in _N_TASKS if environ.get(name))
        size = integer(n_tasks, environ)
        check_range("SLURM_PROCID", rank, n_tasks, size)
        nodes, counts = _parsed(_NODES, expand_nodes, environ), _parsed(_TASKS_PER_NODE, tasks_per_node, environ)
        if len(nodes) != len(counts) or sum(counts) != size:
            raise ConfigError(f"Slurm's variables contradict each other: {_shown(_NODES, environ)} are {len(nodes)} "
                              f"nodes, {_shown(_TASKS_PER_NODE, environ)} are {sum(counts)} tasks on {len(counts)} "
                              f"nodes, and {n_tasks} = {size}. Some may be left of another step")
        check_range("SLURM_NODEID", index, "the number of nodes", len(nodes))
        check_range("SLURM_LOCALID", local_rank, f"the tasks of {nodes[index]}", counts[index])
        here = environ.get("SLURMD_NODENAME", nodes[index])
        if here != nodes[index]:
            raise ConfigError(f"SLURM_NODEID = {index} of {_shown(_NODES, environ)} is {nodes[index]}, but this is "
                              f"SLURMD_NODENAME = {here}: some of these variables are left of another job or step "
                              "(sbatch within srun?)")
        number_of_job, step = _first(_JOB_ID, environ), _first(_STEP_ID, environ)
        if len(nodes) == 1 and not settings.scheduler and not settings.expects_helpers:
            fields = fields_of_local_job(settings, f"slurm|{number_of_job}|{step}|{nodes[0]}", size)
        else:
            port = scheduler_port(whole_number("SLURM_JOB_ID", number_of_job) * _STEPS_APART + int(step))
            fields = fields_of_job(settings, settings.scheduler or format_address(nodes[0], port))
        fields["node_id"] = node_id_or_default(settings, f"slurm-{number_of_job}.{step}-{index}")
        first = local_rank == 0
        return ProcessRole(launcher="slurm", role="rank", rank=rank, size=size, local_rank=local_rank,
                           local_size=counts[index], **(fields | {"node_index": index, "num_nodes": len(nodes)}),
                           starts_node=first, starts_scheduler=first and index == 0)


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


def _parsed(names: tuple[str, ...], parse: Callable[[str], list[_T]], environ: Environ) -> list[_T]:
    """Return the list in the first of the variables *names* that is set."""
    try:
        return parse(_first(names, environ))
    except ValueError as exc:
        raise ConfigError(f"{_shown(names, environ)} cannot be read: {exc}") from None


def _first(names: tuple[str, ...], environ: Environ) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _shown(names: tuple[str, ...], environ: Environ) -> str:
    return next(f"{name} = {environ[name]}" for name in names if environ.get(name))


def expand_nodes(text: str) -> list[str]:
    """Return the names in *text*, in its order.

    A name may have several brackets, each a list of numbers and ranges; a number has as many digits as the first of its
    range is written with.

    Raises `ValueError` where *text* is no such list; the message says what is wrong.
    """
    names: list[str] = []
    for item in _items(text):
        pieces = re.split(r"\[([^][]*)\]", item)  # text, range, text, ..., text
        if any("[" in piece or "]" in piece for piece in pieces[::2]):
            raise ValueError(f"brackets do not match in {item!r}")
        choices = [[piece] if i % 2 == 0 else _numbers(piece) for i, piece in enumerate(pieces)]
        n_names = len(names)
        for choice in choices:
            n_names = max(1, n_names - len(names)) * len(choice) + len(names)
        if n_names > _MOST_NODES:
            raise ValueError(f"{item!r} stands for more than {_MOST_NODES} nodes")
        names += map("".join, itertools.product(*choices))
    return names


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node.

    Raises `ValueError` where *text* is no such list.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is no number of tasks such as 4 or 4(x2)")
        n_nodes = int(match[2] or 1)
        if len(counts) + n_nodes > _MOST_NODES:
            raise ValueError(f"{item!r} stands for more than {_MOST_NODES} nodes")
        counts += [int(match[1])] * n_nodes
    return counts


def _items(text: str) -> Iterator[str]:
    """Split at commas that are in no bracket."""
    item, is_inside = "", False
    for letter in text + ",":
        if letter == "," and not is_inside:
            if not item:
                raise ValueError("a name is empty")
            yield item
            item = ""
            continue
        is_inside = letter == "[" or (is_inside and letter != "]")
        item += letter
    if is_inside:
        raise ValueError(f"a bracket is not closed in {item[:-1]!r}")


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise ValueError(f"{piece!r} is no number and no range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {piece} ends before it begins")
        if last - first >= _MOST_NODES:
            raise ValueError(f"the range {piece} stands for more than {_MOST_NODES} nodes")
        found += (f"{number:0{len(match[1])}d}" for number in range(first, last + 1))
    return found


SLURM = Slurm()
