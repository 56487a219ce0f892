"""mpirun of Open MPI, MPICH and Intel MPI, and horovodrun: each rank is told its number, on its machine too.

None of them says which machine is which or where rank 0 is. On one machine everything follows even so; on several the
scheduler's address must be given, and the scheduler counts ranks, not machines, until all are there. (The address in
OMPI_MCA_orte_hnp_uri or PMIX_SERVER_URI is of mpirun's machine, or the loopback, and no rank may be there.) MPI itself
is never used.
"""
from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

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
from .environment import Environ, Environment, are_set, are_unset, says

_MASTER_PORT = "29500"  # torch's default
#: An ancestor may end meanwhile, but not so many of them.
_N_WALKS = 10


class _Variables(NamedTuple):
    """A launcher's variables, and how it is told to hand on one of ours."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    how: str


def _of(name: str, level: int, names: _Variables) -> Environment:
    fields = dict(zip(names, ("rank", "size", "local_rank", "local_size")))
    return Environment(
        name, level, lambda settings, environ: are_set((names.rank, names.local_rank), environ),
        lambda settings, environ: are_unset(names[:4], environ),
        lambda settings, environ: _place(name, names, settings, environ),
        lambda place, environ: says(fields, place, environ))


def _place(launcher: str, names: _Variables, settings: Settings, environ: Environ) -> ProcessRole:
    rank, size, local_rank, local_size = (integer(name, environ) for name in names[:4])
    check_range(names.rank, rank, names.size, size)
    check_range(names.local_rank, local_rank, names.local_size, local_size)
    scheduler = settings.scheduler
    if not scheduler and environ.get("MASTER_ADDR") and (local_size < size or settings.expects_helpers):
        port = integer("MASTER_PORT", {"MASTER_PORT": environ.get("MASTER_PORT") or _MASTER_PORT})
        scheduler = format_address(environ["MASTER_ADDR"], scheduler_port(port))
    if scheduler:
        fields = job(settings, scheduler) | {"node_index": -1, "num_nodes": -1}
        fields["node_id"] = node_id_or_default(settings, f"{launcher} {scheduler}")
    elif local_size < size or settings.expects_helpers:
        raise ConfigError(
            f"rank {rank} is one of {local_size} on this machine and of {size} in the job ({names.local_size}, "
            f"{names.size}), but {launcher} does not tell where rank 0 is: give the address of rank 0's machine and a "
            f"free port, {names.how} (MASTER_ADDR, and MASTER_PORT, will do as well)")
    else:
        starter = _launcher_process(names.rank, launcher)
        fields = local_job(settings, f"{launcher}|{starter}", size)
        fields["node_id"] = node_id_or_default(settings, f"{launcher} {starter}")
    return ProcessRole(launcher=launcher, role="rank", rank=rank, size=size, local_rank=local_rank, local_size=local_size,
                 **fields, starts_node=local_rank == 0, starts_scheduler=rank == 0)


def _launcher_process(mark: str, launcher: str) -> str:
    """Return what names the process that started all ranks of this machine.

    It is the nearest ancestor without the variable *mark* in its environment: scripts may be in between. Its pid and
    start time are those of no other process since boot.
    """
    if os.getppid() == 0:
        raise ConfigError(f"the process that started this rank is not in its container, {_advice(launcher)}")
    for _ in range(_N_WALKS):
        try:
            return _nearest_without(mark)
        except (FileNotFoundError, ProcessLookupError) as exc:  # it has ended, and we have another parent now
            found = exc
    raise ConfigError(f"the process that started this rank cannot be looked at ({found}), {_advice(launcher)}")


def _advice(launcher: str) -> str:
    return (f"and {launcher} tells nothing else that its ranks have in common: give them BPSFAST_SCHEDULER, an address "
            "of this machine")


def _nearest_without(mark: str) -> str:
    pid = os.getppid()
    while pid > 1 and _has_variable(pid, mark):
        pid = int(_status(pid)[1])
    status = _status(pid)
    if status[0] in "ZX":  # its environment went before it did
        raise ProcessLookupError(f"process {pid} has ended")
    return f"{pid}|{status[19]}"


def _has_variable(pid: int, name: str) -> bool:
    try:
        return any(entry.startswith(name.encode() + b"=") for entry in
                   Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:  # another user's: no rank of this job
        return False


def _status(pid: int) -> list[str]:
    """Return /proc/PID/stat after the program's name: state, parent, ..., start time (the 20th)."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


OPEN_MPI = _of("Open MPI", 1, _Variables("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                     "OMPI_COMM_WORLD_LOCAL_SIZE", "`mpirun -x BPSFAST_SCHEDULER=host:port ...`"))
PMI = _of("PMI", 1, _Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
                           "`mpiexec -genv BPSFAST_SCHEDULER host:port ...`"))
HOROVOD = _of("Horovod", 0, _Variables("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
                                   "`BPSFAST_SCHEDULER=host:port horovodrun ...`"))
