"""A barrier that names who is missing: torch's own function of that name serves gloo only."""
from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ...orchestration.errors import ConfigError
from .process_group import ProcessGroup


def monitored_barrier(group: dist.ProcessGroup | None = None, timeout: timedelta | None = None,
                      wait_all_ranks: bool = False) -> None:
    """As `torch.distributed.monitored_barrier`, for groups of bpsfast (None: the default one).

    Raises
    ------
    DistBackendError
        Naming the first member that did not come within *timeout* (None: the group's), or, with *wait_all_ranks*, all.
        The group stays usable.
    ConfigError
        If *group* is another backend's.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, ProcessGroup):
        raise ConfigError(f"monitored_barrier of bpsfast needs one of its groups, got {type(found).__name__}; "
                          "gloo has torch.distributed.monitored_barrier")
    found.monitored_barrier(timeout, wait_all_ranks)
