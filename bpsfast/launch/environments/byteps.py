"""BytePS's variables, set by ``bpsfast dmlc`` (or bpslaunch), or by hand."""
from __future__ import annotations

import secrets

from ...base.settings import Settings
from ...orchestration.errors import ConfigError
from ..process_role import ProcessRole, check_range, given_key, integer, job, local_key, node_id_or_default
from .environment import Environ, Environment, are_set, are_unset

_MARKS = ("DMLC_ROLE", "DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK")
_WORKER = ("DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE")


def is_local_job(settings: Settings, environ: Environ) -> bool:
    """Tell whether BytePS would start neither scheduler nor servers: one worker machine, not forced."""
    return settings.num_nodes <= 1 and environ.get("BYTEPS_FORCE_DISTRIBUTED", "0") in ("", "0")


def _missing(settings: Settings, environ: Environ) -> list[str]:
    needed = ["DMLC_ROLE", "DMLC_NUM_WORKER"]
    role = environ.get("DMLC_ROLE", "worker")
    if role not in ("worker", "server", "scheduler"):
        raise ConfigError(f"DMLC_ROLE = {role!r}: expected worker, server or scheduler")
    needed += _WORKER if role == "worker" else ()
    if not is_local_job(settings, environ):
        needed += ["DMLC_NUM_SERVER"]
        needed += [] if settings.scheduler else ["DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"]
    return are_unset(tuple(needed), environ)


def _place(settings: Settings, environ: Environ) -> ProcessRole:
    role = environ["DMLC_ROLE"]
    if is_local_job(settings, environ):
        return _local_place(settings, role)
    fields = job(settings, settings.scheduler)
    if role == "scheduler":
        return ProcessRole(launcher="dmlc", role="scheduler", **fields)
    if role == "server":
        return ProcessRole(launcher="dmlc", role="server", **(fields | {"node_index": -1}))
    check_range("BYTEPS_LOCAL_RANK", settings.local_rank, "BYTEPS_LOCAL_SIZE", settings.local_size)
    rank = integer("BYTEPS_GLOBAL_RANK", environ) if environ.get("BYTEPS_GLOBAL_RANK") else -1
    return ProcessRole(launcher="dmlc", role="rank", rank=rank, local_rank=settings.local_rank,
                 local_size=settings.local_size, **fields, starts_node=settings.local_rank == 0)


def _local_place(settings: Settings, role: str) -> ProcessRole:
    if role != "worker":
        return ProcessRole(launcher="dmlc", role=role, node_id=settings.node_id, scheduler=("127.0.0.1", 0), job_key=b"")
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
                 num_nodes=1, scheduler=("127.0.0.1", 0), starts_node=first, starts_scheduler=first, job_key=key)


BYTEPS = Environment("dmlc", 0, lambda settings, environ: are_set(_MARKS, environ), _missing, _place)
