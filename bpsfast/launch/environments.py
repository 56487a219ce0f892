"""Read a rank's role from its launcher's variables, with a class for each: bpsfast, torchrun, BytePS, MPI, Kubernetes.

Slurm, whose lists of nodes need a parser, is in `slurm`. `roles` decides between those that are present.
"""
from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import ClassVar

import msgspec

from ..base import process_identity
from ..base.addresses import is_loopback
from ..base.job_key import given_key, local_key, node_id_or_default
from ..base.settings import Settings
from ..orchestration.errors import ConfigError
from ..orchestration.host_lookup import format_address
from .process_role import (
    Environ,
    Environment,
    ProcessRole,
    agrees,
    are_set,
    are_unset,
    check_range,
    fields_of_job,
    fields_of_local_job,
    integer,
    scheduler_port,
)

#: Torch's default port of the store.
_MASTER_PORT = "29500"
#: The scheduler's port of pod 0 unless MASTER_PORT is set: every pod has ports of its own.
POD_PORT = 7700
#: How often the search for an ancestor process starts again because one on the way has ended.
_N_ANCESTOR_WALKS = 10


class Explicit(Environment):
    """BPSFAST_RANK and others, set by ``bpsfast run`` or by hand. Scheduler and nodes already run."""

    name = "bpsfast"
    _marks = ("BPSFAST_RANK", "BPSFAST_SIZE", "BPSFAST_LOCAL_RANK")
    _needed = (*_marks, "BPSFAST_LOCAL_SIZE", "BPSFAST_SCHEDULER")

    def marks(self, settings: Settings, environ: Environ) -> list[str]:
        marks = super().marks(settings, environ)
        if marks == ["BPSFAST_SIZE"] and environ.get("JOB_COMPLETION_INDEX"):
            return []  # the size of a Kubernetes Job, which Kubernetes does not tell
        return ["rank"] if not marks and settings.rank >= 0 else marks  # given on the command line

    def missing(self, settings: Settings, environ: Environ) -> list[str]:
        values = msgspec.structs.asdict(settings)
        return [name for name in self._needed if values[name.removeprefix("BPSFAST_").lower()] in (-1, "")]

    def role(self, settings: Settings, environ: Environ) -> ProcessRole:
        check_range("BPSFAST_RANK", settings.rank, "BPSFAST_SIZE", settings.size)
        check_range("BPSFAST_LOCAL_RANK", settings.local_rank, "BPSFAST_LOCAL_SIZE", settings.local_size)
        return ProcessRole(launcher="bpsfast", role="rank", rank=settings.rank, size=settings.size,
                           local_rank=settings.local_rank, local_size=settings.local_size,
                           **fields_of_job(settings, settings.scheduler))


class Torchrun(Environment):
    """torchrun's variables: an agent on each machine starts the ranks, which share a store on MASTER_ADDR:MASTER_PORT.
    """

    name = "torchrun"
    _marks = ("RANK", "LOCAL_RANK")
    _needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    _FIELDS: ClassVar = {"RANK": "rank", "WORLD_SIZE": "size", "LOCAL_RANK": "local_rank",
                         "LOCAL_WORLD_SIZE": "local_size"}

    def missing(self, settings: Settings, environ: Environ) -> list[str]:
        store = () if settings.scheduler else ("MASTER_ADDR", "MASTER_PORT")
        return are_unset((*self._needed, *store), environ)

    def role(self, settings: Settings, environ: Environ) -> ProcessRole:
        rank, size, local_rank, local_size, group = (integer(name, environ) for name in self._needed)
        check_range("RANK", rank, "WORLD_SIZE", size)
        check_range("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
        store = format_address(environ.get("MASTER_ADDR", ""), integer("MASTER_PORT", environ)) if (
            environ.get("MASTER_PORT")) else ""
        n_groups = integer("GROUP_WORLD_SIZE", environ) if environ.get("GROUP_WORLD_SIZE") else -(-size // local_size)
        if local_size == size and not settings.scheduler and not settings.expects_helpers:
            fields = fields_of_local_job(settings, f"torchrun|{store}", size)
        else:  # two agents of one host are two machines
            fields = fields_of_job(settings, settings.scheduler or format_address(
                environ["MASTER_ADDR"], scheduler_port(integer("MASTER_PORT", environ))))
        fields |= {"node_id": node_id_or_default(settings, f"torchrun {store} group {group}"), "node_index": group,
                   "num_nodes": n_groups}
        return ProcessRole(launcher="torchrun", role="rank", rank=rank, size=size, local_rank=local_rank,
                           local_size=local_size, **fields, starts_node=local_rank == 0, starts_scheduler=rank == 0)

    def repeats(self, role: ProcessRole, environ: Environ) -> bool:
        return agrees(self._FIELDS, role, environ)


class Byteps(Environment):
    """BytePS's variables, set by ``bpsfast dmlc`` (or bpslaunch), or by hand."""

    name = "dmlc"
    _marks = ("DMLC_ROLE", "DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK")

    def missing(self, settings: Settings, environ: Environ) -> list[str]:
        needed = ["DMLC_ROLE", "DMLC_NUM_WORKER"]
        role = environ.get("DMLC_ROLE", "worker")
        if role not in ("worker", "server", "scheduler"):
            raise ConfigError(f"DMLC_ROLE = {role!r}: expected worker, server or scheduler")
        if role == "worker":
            needed += ["DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE"]
        if not is_local_byteps_job(settings, environ):
            needed += ["DMLC_NUM_SERVER"]
            needed += [] if settings.scheduler else ["DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"]
        return are_unset(needed, environ)

    def role(self, settings: Settings, environ: Environ) -> ProcessRole:
        role = environ["DMLC_ROLE"]
        if is_local_byteps_job(settings, environ):
            return self._local_role(settings, role)
        fields = fields_of_job(settings, settings.scheduler)
        if role == "scheduler":
            return ProcessRole(launcher="dmlc", role="scheduler", **fields)
        if role == "server":
            return ProcessRole(launcher="dmlc", role="server", **(fields | {"node_index": -1}))
        check_range("BYTEPS_LOCAL_RANK", settings.local_rank, "BYTEPS_LOCAL_SIZE", settings.local_size)
        rank = integer("BYTEPS_GLOBAL_RANK", environ) if environ.get("BYTEPS_GLOBAL_RANK") else -1
        return ProcessRole(launcher="dmlc", role="rank", rank=rank, local_rank=settings.local_rank,
                           local_size=settings.local_size, **fields, starts_node=settings.local_rank == 0)

    @staticmethod
    def _local_role(settings: Settings, role: str) -> ProcessRole:
        if role != "worker":
            return ProcessRole(launcher="dmlc", role=role, node_id=settings.node_id, scheduler=("127.0.0.1", 0),
                               job_key=b"")
        check_range("BYTEPS_LOCAL_RANK", settings.local_rank, "BYTEPS_LOCAL_SIZE", settings.local_size)
        if given_key(settings) or settings.scheduler:
            key = local_key(settings, f"dmlc|{settings.scheduler}")
        elif settings.local_size == 1:
            key = secrets.token_bytes(32)
        else:
            raise ConfigError(
                f"{settings.local_size} ranks of one machine need something in common to find their node by: set "
                "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, or BPSFAST_JOB_KEY, or start them by `bpsfast dmlc -- command`"
            )
        first = settings.local_rank == 0
        return ProcessRole(launcher="dmlc", role="rank", rank=settings.local_rank, size=settings.local_size,
                           local_rank=settings.local_rank, local_size=settings.local_size, node_index=0,
                           node_id=node_id_or_default(settings, f"worker of {settings.scheduler or 'one machine'}"),
                           num_nodes=1, scheduler=("127.0.0.1", 0), starts_node=first, starts_scheduler=first,
                           job_key=key)


def is_local_byteps_job(settings: Settings, environ: Environ) -> bool:
    """Tell whether BytePS would start neither scheduler nor servers: one worker machine, not forced."""
    return settings.num_nodes <= 1 and environ.get("BYTEPS_FORCE_DISTRIBUTED", "0") in ("", "0")


class Mpi(Environment):
    """Variables of one kind of mpirun, or of horovodrun: each rank gets its number, in the job and on its machine.

    None of them says which machine is which or where rank 0 is. On one machine everything follows even so; on several
    the scheduler's address must be given, and the scheduler counts ranks, not machines, until all are there. (The
    address in OMPI_MCA_orte_hnp_uri or PMIX_SERVER_URI is of mpirun's machine, or the loopback, and no rank may be
    there.) MPI itself is never used.

    *names* are the variables of rank, size, local rank and local size. *how*: an example of passing on a variable.
    """

    def __init__(self, name: str, level: int, names: tuple[str, str, str, str], how: str) -> None:
        self.name, self.level = name, level
        self._needed, self._marks, self._how = names, (names[0], names[2]), how

    def role(self, settings: Settings, environ: Environ) -> ProcessRole:
        rank, size, local_rank, local_size = (integer(name, environ) for name in self._needed)
        check_range(self._needed[0], rank, self._needed[1], size)
        check_range(self._needed[2], local_rank, self._needed[3], local_size)
        scheduler = settings.scheduler
        if not scheduler and environ.get("MASTER_ADDR") and (local_size < size or settings.expects_helpers):
            port = integer("MASTER_PORT", {"MASTER_PORT": environ.get("MASTER_PORT") or _MASTER_PORT})
            scheduler = format_address(environ["MASTER_ADDR"], scheduler_port(port))
        if scheduler:
            fields = fields_of_job(settings, scheduler) | {"node_index": -1, "num_nodes": -1}
            fields["node_id"] = node_id_or_default(settings, f"{self.name} {scheduler}")
        elif local_size < size or settings.expects_helpers:
            raise ConfigError(
                f"rank {rank} is one of {local_size} on this machine and of {size} in the job ({self._needed[3]}, "
                f"{self._needed[1]}), but {self.name} does not tell where rank 0 is: give the address of rank 0's "
                f"machine and a free port, {self._how} (MASTER_ADDR, and MASTER_PORT, will do as well)")
        else:
            launcher = _launcher_process(self._needed[0], self.name)
            fields = fields_of_local_job(settings, f"{self.name}|{launcher}", size)
            fields["node_id"] = node_id_or_default(settings, f"{self.name} {launcher}")
        return ProcessRole(launcher=self.name, role="rank", rank=rank, size=size, local_rank=local_rank,
                           local_size=local_size, **fields, starts_node=local_rank == 0, starts_scheduler=rank == 0)

    def repeats(self, role: ProcessRole, environ: Environ) -> bool:
        return agrees(dict(zip(self._needed, ("rank", "size", "local_rank", "local_size"))), role, environ)


def _launcher_process(mark: str, launcher: str) -> str:
    """Return an identifier of the process that started all ranks of this machine.

    It is the nearest ancestor without the variable *mark* in its environment, as scripts may be in between; its pid and
    start time identify it until the next boot.
    """
    advice = (f"and {launcher} tells nothing else that its ranks have in common: give them BPSFAST_SCHEDULER, an "
              "address of this machine")
    if os.getppid() == 0:
        raise ConfigError(f"the process that started this rank is not in its container, {advice}")
    for _ in range(_N_ANCESTOR_WALKS):
        try:
            return _nearest_ancestor_without(mark)
        except ProcessLookupError as exc:  # it has ended, and this process has another parent now
            found = exc
    raise ConfigError(f"the process that started this rank cannot be looked at ({found}), {advice}")


def _nearest_ancestor_without(mark: str) -> str:
    pid, fields = os.getppid(), []
    while True:
        has_mark = pid > 1 and _has_variable(pid, mark)
        fields = process_identity.stat(pid)
        if not fields or (fields[0] in "ZX" and not has_mark):  # the environment of a zombie is gone
            raise ProcessLookupError(f"process {pid} has ended")
        if not has_mark:
            return f"{pid}|{fields[19]}"
        pid = int(fields[1])


def _has_variable(pid: int, name: str) -> bool:
    try:
        return any(entry.startswith(name.encode() + b"=") for entry in
                   Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:  # another user's: no rank of this job
        return False


class Kubernetes(Environment):
    """Pods that are one rank each: an Indexed Job with a headless Service, or Kubeflow's PyTorchJob without torchrun.

    PyTorchJob sets RANK to the *pod's* number and WORLD_SIZE to the number of ranks, and no LOCAL_RANK; torchrun inside
    (as Kubeflow's Trainer v2 has it) sets all and comes first. An Indexed Job sets JOB_COMPLETION_INDEX; the user says
    how many pods there are. Its pods are called job-0, job-1, ... in the domain of their Service.
    """

    name = "kubernetes"
    level = 3
    _INDEX = "JOB_COMPLETION_INDEX"

    def marks(self, settings: Settings, environ: Environ) -> list[str]:
        marks = are_set(("RANK", self._INDEX), environ)
        return [*marks, "KUBERNETES_SERVICE_HOST"] if marks and environ.get("KUBERNETES_SERVICE_HOST") else []

    def missing(self, settings: Settings, environ: Environ) -> list[str]:
        missing = [] if environ.get("WORLD_SIZE") or settings.size >= 0 else ["WORLD_SIZE (the number of pods)"]
        if not settings.scheduler and not environ.get("MASTER_ADDR") and not environ.get(self._INDEX):
            missing += ["MASTER_ADDR"]
        return missing

    def role(self, settings: Settings, environ: Environ) -> ProcessRole:
        name = "RANK" if environ.get("RANK") else self._INDEX
        rank = integer(name, environ)
        if environ.get(self._INDEX, str(rank)) != str(rank):
            raise ConfigError(f"RANK = {rank} and {self._INDEX} = {environ[self._INDEX]} disagree about which rank "
                              "this pod is: each is one. For several ranks in a pod start them by torchrun, or "
                              "`bpsfast run`")
        size = integer("WORLD_SIZE", environ) if environ.get("WORLD_SIZE") else settings.size
        check_range(name, rank, "WORLD_SIZE", size)
        per_pod = environ.get("PET_NPROC_PER_NODE", "")
        if per_pod.isdecimal() and int(per_pod) > 1:  # "auto", PyTorchJob's default, is for torchrun alone
            raise ConfigError(f"PET_NPROC_PER_NODE = {per_pod} asks for more than one rank in each pod, and RANK = "
                              f"{rank} is the pod's number: start the ranks by torchrun, for which PyTorchJob has set "
                              "PET_*")
        scheduler = settings.scheduler or self._scheduler(rank, size, environ)
        is_alone = size == 1 and not settings.scheduler and not settings.expects_helpers
        fields = fields_of_local_job(settings, scheduler, size) if is_alone else fields_of_job(settings, scheduler)
        # pods with the host's network see each other's local sockets
        fields |= {"node_id": node_id_or_default(settings, f"pod-{rank} of {scheduler}"), "node_index": rank,
                   "num_nodes": size}
        return ProcessRole(launcher="kubernetes", role="rank", rank=rank, size=size, local_rank=0, local_size=1,
                           **fields, starts_node=True, starts_scheduler=rank == 0)

    def _scheduler(self, rank: int, size: int, environ: Environ) -> str:
        master = environ.get("MASTER_ADDR", "")
        if master:
            if size > 1 and is_loopback(master) and rank == 0:  # PyTorchJob tells the master this, the others its name
                master = environ.get("HOSTNAME", master)
            port = scheduler_port(integer("MASTER_PORT", environ)) if environ.get("MASTER_PORT") else POD_PORT
            return format_address(master, port)
        if size == 1:
            return format_address("127.0.0.1", POD_PORT)
        name, _, domain = (environ.get("HOSTNAME") or socket.gethostname()).partition(".")
        job_name, _, index = name.rpartition("-")
        domain = domain or socket.getfqdn(name).partition(".")[2]
        if index != str(rank) or not domain:
            raise ConfigError(
                f"{self._INDEX} = {rank}, but this pod's name {name!r} in the domain {domain!r} does not tell how pod "
                "0 is reached: give the pods a headless Service (`subdomain: SERVICE` in their template), or set "
                "MASTER_ADDR to pod 0's name, or BPSFAST_SCHEDULER to that and a port")
        return format_address(f"{job_name}-0.{domain}", POD_PORT)


EXPLICIT, TORCHRUN, BYTEPS, KUBERNETES = Explicit(), Torchrun(), Byteps(), Kubernetes()
OPEN_MPI = Mpi("Open MPI", 1, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                               "OMPI_COMM_WORLD_LOCAL_SIZE"), "`mpirun -x BPSFAST_SCHEDULER=host:port ...`")
PMI = Mpi("PMI", 1, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
          "`mpiexec -genv BPSFAST_SCHEDULER host:port ...`")
HOROVOD = Mpi("Horovod", 0, ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
              "`BPSFAST_SCHEDULER=host:port horovodrun ...`")
