"""torchrun: one on each machine starts the ranks there; they share a store on MASTER_ADDR:MASTER_PORT."""
from __future__ import annotations

from ...base.settings import Settings
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

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_FIELDS = {"RANK": "rank", "WORLD_SIZE": "size", "LOCAL_RANK": "local_rank", "LOCAL_WORLD_SIZE": "local_size"}


def _missing(settings: Settings, environ: Environ) -> list[str]:
    return are_unset(_NEEDED if settings.scheduler else (*_NEEDED, "MASTER_ADDR", "MASTER_PORT"), environ)


def _place(settings: Settings, environ: Environ) -> ProcessRole:
    number = {name: integer(name, environ) for name in _NEEDED}
    check_range("RANK", number["RANK"], "WORLD_SIZE", number["WORLD_SIZE"])
    check_range("LOCAL_RANK", number["LOCAL_RANK"], "LOCAL_WORLD_SIZE", number["LOCAL_WORLD_SIZE"])
    store = format_address(environ.get("MASTER_ADDR", ""), integer("MASTER_PORT", environ)) if (
        environ.get("MASTER_PORT")) else ""
    n_groups = integer("GROUP_WORLD_SIZE", environ) if environ.get("GROUP_WORLD_SIZE") else (
        -(-number["WORLD_SIZE"] // number["LOCAL_WORLD_SIZE"]))
    if number["LOCAL_WORLD_SIZE"] == number["WORLD_SIZE"] and not settings.scheduler and not settings.expects_helpers:
        fields = local_job(settings, f"torchrun|{store}", number["WORLD_SIZE"])
    else:  # two agents of one host are two machines
        fields = job(settings, settings.scheduler or format_address(
            environ["MASTER_ADDR"], scheduler_port(integer("MASTER_PORT", environ))))
    fields["node_id"] = node_id_or_default(settings, f"torchrun {store} group {number['GROUP_RANK']}")
    return ProcessRole(launcher="torchrun", role="rank", rank=number["RANK"], size=number["WORLD_SIZE"],
                 local_rank=number["LOCAL_RANK"], local_size=number["LOCAL_WORLD_SIZE"],
                 **(fields | {"node_index": number["GROUP_RANK"], "num_nodes": n_groups}),
                 starts_node=number["LOCAL_RANK"] == 0, starts_scheduler=number["RANK"] == 0)


TORCHRUN = Environment(
    "torchrun", 0, lambda settings, environ: are_set(("RANK", "LOCAL_RANK"), environ), _missing, _place,
    lambda place, environ: says(_FIELDS, place, environ))
