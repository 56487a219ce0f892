"""Pods that are one rank each: an Indexed Job with a headless Service, or Kubeflow's PyTorchJob without torchrun.

PyTorchJob sets RANK to the *pod's* number and WORLD_SIZE to the number of ranks, and no LOCAL_RANK; torchrun inside
(as Kubeflow's Trainer v2 has it) sets all and comes first. An Indexed Job sets JOB_COMPLETION_INDEX; how many pods
there are the user says. Its pods are called job-0, job-1, ... in the domain of their Service.
"""
from __future__ import annotations

import socket

from ...base.settings import Settings
from ...orchestration.errors import ConfigError
from ..process_role import (
    ProcessRole,
    check_range,
    format_address,
    integer,
    is_loopback,
    job,
    local_job,
    node_id_or_default,
    scheduler_port,
)
from .environment import Environ, Environment, are_set

#: Where pod 0's scheduler listens unless MASTER_PORT says otherwise: every pod has ports of its own.
PORT = 7700
_INDEX = "JOB_COMPLETION_INDEX"


def _marks(settings: Settings, environ: Environ) -> list[str]:
    marks = are_set(("RANK", _INDEX), environ)
    return [*marks, "KUBERNETES_SERVICE_HOST"] if marks and environ.get("KUBERNETES_SERVICE_HOST") else []


def _missing(settings: Settings, environ: Environ) -> list[str]:
    missing = [] if environ.get("WORLD_SIZE") or settings.size >= 0 else ["WORLD_SIZE (the number of pods)"]
    if not settings.scheduler and not environ.get("MASTER_ADDR") and not environ.get(_INDEX):
        missing += ["MASTER_ADDR"]
    return missing


def _place(settings: Settings, environ: Environ) -> ProcessRole:
    name = "RANK" if environ.get("RANK") else _INDEX
    rank = integer(name, environ)
    if environ.get(_INDEX, str(rank)) != str(rank):
        raise ConfigError(f"RANK = {rank} and {_INDEX} = {environ[_INDEX]} disagree about which rank this pod is: each "
                          "is one. For several ranks in a pod start them by torchrun, or `bpsfast run`")
    size = integer("WORLD_SIZE", environ) if environ.get("WORLD_SIZE") else settings.size
    check_range(name, rank, "WORLD_SIZE", size)
    per_pod = environ.get("PET_NPROC_PER_NODE", "")
    if per_pod.isdecimal() and int(per_pod) > 1:  # "auto", PyTorchJob's default, is for torchrun alone
        raise ConfigError(f"PET_NPROC_PER_NODE = {per_pod} asks for more than one rank in each pod, and RANK = {rank} "
                          "is the pod's number: start the ranks by torchrun, for which PyTorchJob has set PET_*")
    scheduler = settings.scheduler or _scheduler(rank, size, environ)
    is_alone = size == 1 and not settings.scheduler and not settings.expects_helpers
    fields = local_job(settings, scheduler, size) if is_alone else job(settings, scheduler)
    # pods with the host's network see each other's local sockets
    fields["node_id"] = node_id_or_default(settings, f"pod-{rank} of {scheduler}")
    return ProcessRole(launcher="kubernetes", role="rank", rank=rank, size=size, local_rank=0, local_size=1,
                 **(fields | {"node_index": rank, "num_nodes": size}), starts_node=True, starts_scheduler=rank == 0)


def _scheduler(rank: int, size: int, environ: Environ) -> str:
    master = environ.get("MASTER_ADDR", "")
    if master:
        if size > 1 and is_loopback(master) and rank == 0:  # what PyTorchJob tells the master; the others are told this
            master = environ.get("HOSTNAME", master)
        port = scheduler_port(integer("MASTER_PORT", environ)) if environ.get("MASTER_PORT") else PORT
        return format_address(master, port)
    if size == 1:
        return format_address("127.0.0.1", PORT)
    name, _, domain = (environ.get("HOSTNAME") or socket.gethostname()).partition(".")
    job_name, _, index = name.rpartition("-")
    domain = domain or socket.getfqdn(name).partition(".")[2]
    if index != str(rank) or not domain:
        raise ConfigError(
            f"{_INDEX} = {rank}, but this pod's name {name!r} in the domain {domain!r} does not tell how pod 0 is "
            "reached: give the pods a headless Service (`subdomain: SERVICE` in their template), or set MASTER_ADDR to "
            "pod 0's name, or BPSFAST_SCHEDULER to that and a port")
    return format_address(f"{job_name}-0.{domain}", PORT)


KUBERNETES = Environment("kubernetes", 3, _marks, _missing, _place)
