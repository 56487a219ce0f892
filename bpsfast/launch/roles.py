"""Detect the role of this process from the environment: its rank and machine, and the daemons it starts.

    launcher      variables                                     starts the node      starts the scheduler
    bpsfast       BPSFAST_RANK/SIZE/LOCAL_RANK/LOCAL_SIZE       already runs         already runs
    torchrun      RANK, WORLD_SIZE, LOCAL_RANK, ...             local rank 0         global rank 0
    dmlc          DMLC_*, BYTEPS_LOCAL_RANK/LOCAL_SIZE          local rank 0         DMLC_ROLE=scheduler (*)
    Horovod       HOROVOD_RANK/SIZE/LOCAL_RANK/LOCAL_SIZE       local rank 0         global rank 0
    Open MPI      OMPI_COMM_WORLD_RANK/SIZE/LOCAL_RANK/...      local rank 0         global rank 0
    PMI           PMI_RANK/SIZE, MPI_LOCALRANKID/LOCALNRANKS    local rank 0         global rank 0
    slurm         SLURM_PROCID, SLURM_STEP_*, ...               local task 0         the first task of the first node
    kubernetes    RANK or JOB_COMPLETION_INDEX, WORLD_SIZE      each pod             pod 0
    single        none                                          the rank             the rank

(*) In a local job, local rank 0. That is BytePS's rule: one worker machine and no BYTEPS_FORCE_DISTRIBUTED.

Launchers run inside each other; the innermost one has started the ranks:

    inside                             in                                             is
    torchrun, bpsfast, dmlc, Horovod   Open MPI or PMI, slurm, kubernetes             one of them on each machine
    Open MPI, PMI                      slurm, kubernetes                              mpirun in an allocation or pod
    slurm                              kubernetes                                     a cluster in pods

All others are on one level, and two of one level must agree: torchrun, bpsfast, dmlc and Horovod; Open MPI and PMI.
An incomplete set is an error that names all variables found, unless it only repeats a complete set of its own or an
outer level: scripts write RANK from SLURM_PROCID or OMPI_COMM_WORLD_RANK, and Slurm itself sets PMI_RANK (by PMIx all
of MPI's variables). ``bpsfast run`` sets torchrun's variables beside its own, and programs may change or remove them.

Under BytePS's variables a DMLC_ROLE=server process on a machine with ranks *is* its node: whichever of the two starts
first takes the machine's local socket, and the other one attaches.
"""
from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping

import msgspec

from ..base.addresses import configured_host
from ..base.job_key import given_key
from ..base.settings import Settings
from ..orchestration import security
from ..orchestration.errors import ConfigError
from . import slurm
from .environments import BYTEPS, EXPLICIT, HOROVOD, KUBERNETES, OPEN_MPI, PMI, TORCHRUN
from .process_role import Environment, ProcessRole
from .slurm import SLURM

_log = logging.getLogger("bpsfast.roles")

_ENVIRONMENTS: tuple[Environment, ...] = (EXPLICIT, TORCHRUN, BYTEPS, SLURM, OPEN_MPI, PMI, HOROVOD, KUBERNETES)
#: Stands for the key in a role that is only compared, so that no key is derived and no warning logged.
_NO_KEY = "00" * 32
#: Launcher -> how to complete its set of variables.
_ADVICE = {
    "slurm": "srun sets them all; they may be left of another step",
    "kubernetes": "Set them in the pods' template",
}


def detect(settings: Settings, environ: Mapping[str, str] | None = None) -> ProcessRole:
    """Return the role of this process.

    Raises `ConfigError` for an incomplete set of variables, or for two sets that disagree; the text names the variables
    and how they are set. Also if the settings name no interface of this machine.
    """
    environ = os.environ if environ is None else environ
    configured_host(settings)  # an early error: at a node it would end all ranks
    present = [each for each in _ENVIRONMENTS if each.marks(settings, environ)]
    complete = [each for each in present if not each.missing(settings, environ)]
    inside = present
    while inside:
        innermost = min(each.level for each in inside)
        around = next((each for each in complete if each.level > innermost), None)
        own = [each for each in inside if each.level == innermost
               and not (around and _repeats(each, each in complete, around, settings, environ))]
        whole = [each for each in own if each in complete]
        for each in own:
            if each not in whole and not (whole and _repeats(each, False, whole[0], settings, environ)):
                raise ConfigError(_incomplete_text(each, present, settings, environ))
        if own:
            return _agreed(whole, settings, environ)
        inside = [each for each in inside if each.level > innermost]
    return _single(settings, environ)


def _repeats(inner: Environment, is_complete: bool, around: Environment, settings: Settings,
             environ: Mapping[str, str]) -> bool:
    """Tell whether *inner*, incomplete or a complete set of MPI, only repeats what *around* describes."""
    if is_complete and inner.level == 0:
        return False
    try:
        described = around.role(msgspec.structs.replace(settings, job_key=_NO_KEY), environ)
    except ConfigError:
        if is_complete:
            return False
        raise
    return inner.repeats(described, environ)


def _agreed(whole: list[Environment], settings: Settings, environ: Mapping[str, str]) -> ProcessRole:
    """Return the role of the first of *whole*; raise `ConfigError` if another one disagrees."""
    roles = [each.role(settings, environ) for each in whole]
    for environment, other in zip(whole[1:], roles[1:]):
        for field in ("role", "rank", "size", "local_rank", "local_size"):
            mine, theirs = getattr(roles[0], field), getattr(other, field)
            if mine != theirs and -1 not in (mine, theirs):
                marks = [", ".join(each.marks(settings, environ)) for each in (whole[0], environment)]
                raise ConfigError(
                    f"two launchers disagree about {field}: {whole[0].name} ({marks[0]}) says {mine}, "
                    f"{environment.name} ({marks[1]}) says {theirs}. Unset the variables of one of them")
    return roles[0]


def _incomplete_text(half: Environment, present: list[Environment], settings: Settings,
                     environ: Mapping[str, str]) -> str:
    missing = half.missing(settings, environ)
    text = f"{', '.join(half.marks(settings, environ))} set, but {', '.join(missing)} not"
    others = [f"{', '.join(each.marks(settings, environ))} ({each.name})" for each in present if each is not half]
    if others:
        text += f", and variables of another launcher as well: {'; '.join(others)}. Unset those of one launcher"
    elif half is BYTEPS and set(missing) & {"BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE"}:
        text += ". Start the ranks by `bpsfast dmlc -- command` (as by bpslaunch), or set them for each rank"
    else:
        text += ". " + _ADVICE.get(half.name, "Set them, or start the program by `bpsfast run`")
    return f"cannot tell which rank this process is: {text}"


def _single(settings: Settings, environ: Mapping[str, str]) -> ProcessRole:
    if settings.scheduler:
        raise ConfigError(
            f"BPSFAST_SCHEDULER = {settings.scheduler} says that this process belongs to a job, but nothing says which "
            "rank it is: set BPSFAST_RANK, BPSFAST_SIZE, BPSFAST_LOCAL_RANK and BPSFAST_LOCAL_SIZE, or start it by "
            "`bpsfast run`")
    alone = slurm.no_task(environ)
    if alone:
        _log.warning("%s", alone)
    given = given_key(settings)
    key = security.job_key(given, "") if given else secrets.token_bytes(32)
    return ProcessRole(launcher="single", role="rank", rank=0, size=1, local_rank=0, local_size=1, num_nodes=1,
                       node_id=f"single-{os.getpid()}-{secrets.token_hex(4)}", scheduler=("127.0.0.1", 0),
                       starts_node=True, starts_scheduler=True, job_key=key)
