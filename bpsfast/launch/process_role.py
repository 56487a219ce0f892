"""`ProcessRole`: which rank of which machine a process is. `Environment`: reads that from a launcher's variables."""
from __future__ import annotations

import abc
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..base.byteps_variables import whole_number
from ..base.job_key import default_node_id, given_key, job_key, local_key
from ..base.settings import Settings, format_addresses, parse_addresses
from ..orchestration.errors import ConfigError
from .spare_daemons import SpareDaemons

Environ = Mapping[str, str]


class ProcessRole(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank of which machine a process is, and which daemons it starts. -1 means unknown.

    `role` is "rank", "server" or "scheduler". `scheduler` is where the job starts, `next_schedulers` are the further
    addresses of the list. A `scheduler` port of 0 means that the process which starts the scheduler chooses a free one;
    `reserved` is a socket that keeps one, and belongs to `daemons.start`. `spares`: where that finds daemons that have
    been started already. Under "dmlc" the number of ranks is known to the scheduler alone.
    """

    launcher: str
    role: str
    rank: int = -1
    size: int = -1
    local_rank: int = -1
    local_size: int = -1
    node_id: str
    node_index: int = -1
    num_nodes: int = -1
    num_helpers: int = 0
    num_servers: int = -1
    scheduler: tuple[str, int]
    next_schedulers: tuple[tuple[str, int], ...] = ()
    starts_node: bool = False
    starts_scheduler: bool = False
    reserved: socket.socket | None = None
    spares: SpareDaemons | None = None
    job_key: bytes

    @property
    def is_joined_once(self) -> bool:
        """Whether scheduler and nodes are started from outside, once: no rank could start them again."""
        return self.launcher == "bpsfast" or (self.launcher == "dmlc" and self.scheduler[1] != 0)

    @property
    def schedulers(self) -> list[tuple[str, int]]:
        """All addresses of the scheduler."""
        return [self.scheduler, *self.next_schedulers]

    def settings(self, settings: Settings) -> Settings:
        """Return *settings* with all that this role knows filled in."""
        return msgspec.structs.replace(
            settings, rank=self.rank, size=self.size, local_rank=self.local_rank, local_size=self.local_size,
            node_id=self.node_id, node_index=self.node_index, num_nodes=self.num_nodes, num_helpers=self.num_helpers,
            num_servers=self.num_servers, scheduler=format_addresses(self.schedulers), job_key=self.job_key.hex())


class Environment(abc.ABC):
    """Environment variables of one launcher. A launcher of a lower `level` runs inside one of a higher level."""

    name: str
    level = 0
    _marks: Sequence[str] = ()
    _needed: Sequence[str] = ()

    def marks(self, settings: Settings, environ: Environ) -> list[str]:
        """Return the variables that show the launcher's presence; none if it is absent."""
        return are_set(self._marks, environ)

    def missing(self, settings: Settings, environ: Environ) -> list[str]:
        """Return the variables that the launcher must set and has not set."""
        return are_unset(self._needed, environ)

    @abc.abstractmethod
    def role(self, settings: Settings, environ: Environ) -> ProcessRole:
        """Return the role that the variables describe, if none is missing."""

    def repeats(self, role: ProcessRole, environ: Environ) -> bool:
        """Tell whether an incomplete set only repeats *role*: scripts set RANK and others from Slurm's or MPI's."""
        return False


def are_set(names: Sequence[str], environ: Environ) -> list[str]:
    """Return those of *names* that have a value."""
    return [name for name in names if environ.get(name, "")]


def are_unset(names: Sequence[str], environ: Environ) -> list[str]:
    """Return those of *names* that are unset or empty."""
    return [name for name in names if not environ.get(name, "")]


def agrees(fields: Mapping[str, str], role: ProcessRole, environ: Environ) -> bool:
    """Tell whether all set variables of *fields* (variable -> field of `ProcessRole`) have the values of *role*."""
    return all(environ[name] == str(getattr(role, field)) for name, field in fields.items() if environ.get(name, ""))


def scheduler_port(master_port: int) -> int:
    """Return the scheduler's port, 20000 to 28191, of a torchrun job whose store listens on *master_port*.

    The range is below Linux's ephemeral ports. 8192 consecutive master ports give as many different ports, neighbours
    far apart, and never *master_port* itself (the factor less one is a multiple of 64, so 20000 would be one, too).
    """
    return 20000 + master_port * 3137 % 8192


def fields_of_job(settings: Settings, scheduler: str) -> dict[str, Any]:
    """Return the fields of `ProcessRole` that all processes of a machine share; *scheduler* is ``host:port``, or a list
    of them.
    """
    first, *further = parse_addresses(scheduler)
    return {
        "scheduler": first, "next_schedulers": tuple(further), "job_key": job_key(settings, scheduler),
        "node_id": default_node_id(settings, scheduler), "node_index": settings.node_index,
        "num_nodes": settings.num_nodes, "num_helpers": settings.num_helpers, "num_servers": settings.num_servers}


def fields_of_local_job(settings: Settings, common: str, size: int) -> dict[str, Any]:
    """Return the same fields for a job of *size* ranks on one machine, whose scheduler takes a free port.

    *common*: as in `local_key`; a single rank shares nothing with others, and draws a key.
    """
    key = local_key(settings, common) if size > 1 or given_key(settings) else secrets.token_bytes(32)
    return {
        "scheduler": ("127.0.0.1", 0), "job_key": key, "node_id": settings.node_id, "node_index": 0, "num_nodes": 1}


def check_range(name: str, value: int, limit_name: str, limit: int) -> None:
    """Raise `ConfigError` unless *value* of the variable *name* is at least 0 and less than *limit*."""
    if not 0 <= value < limit:
        raise ConfigError(f"{name} = {value} must be at least 0 and less than {limit_name} = {limit}")


def integer(name: str, environ: Environ) -> int:
    """Return the whole number in the variable *name*; raise `ConfigError` if it is none."""
    return whole_number(name, environ[name])
