"""BPSFAST_RANK and its like: set by ``bpsfast run``, or by hand. Scheduler and nodes run already."""
from __future__ import annotations

import msgspec

from ...base.settings import Settings
from ..process_role import ProcessRole, check_range, job
from .environment import Environ, Environment, are_set

_MARKS = ("BPSFAST_RANK", "BPSFAST_SIZE", "BPSFAST_LOCAL_RANK")
_NEEDED = ("BPSFAST_RANK", "BPSFAST_SIZE", "BPSFAST_LOCAL_RANK", "BPSFAST_LOCAL_SIZE", "BPSFAST_SCHEDULER")


def _marks(settings: Settings, environ: Environ) -> list[str]:
    marks = are_set(_MARKS, environ)
    if marks == ["BPSFAST_SIZE"] and environ.get("JOB_COMPLETION_INDEX"):
        return []  # the size of a Kubernetes Job, which Kubernetes does not tell
    return ["rank"] if not marks and settings.rank >= 0 else marks  # given on the command line


def _missing(settings: Settings, environ: Environ) -> list[str]:
    values = msgspec.structs.asdict(settings)
    return [name for name in _NEEDED if values[name.removeprefix("BPSFAST_").lower()] in (-1, "")]


def _place(settings: Settings, environ: Environ) -> ProcessRole:
    check_range("BPSFAST_RANK", settings.rank, "BPSFAST_SIZE", settings.size)
    check_range("BPSFAST_LOCAL_RANK", settings.local_rank, "BPSFAST_LOCAL_SIZE", settings.local_size)
    return ProcessRole(launcher="bpsfast", role="rank", rank=settings.rank, size=settings.size,
                 local_rank=settings.local_rank, local_size=settings.local_size, **job(settings, settings.scheduler))


EXPLICIT = Environment("bpsfast", 0, _marks, _missing, _place)
