"""The place of a process in its job, and what places are made of: addresses, ports, the job's key."""
from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..base.job_key import machine_secret
from ..base.settings import Settings, parse_address
from ..orchestration import security
from ..orchestration.errors import ConfigError

_log = logging.getLogger("bpsfast.roles")
_ANY_NODE = Settings().node_id
#: Names that mean the loopback on every machine (RFC 6761, Debian's and Red Hat's hosts files).
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "localhost6")


class ProcessRole(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one process in its job. -1 means unknown; under "dmlc" only the scheduler can count the ranks.

    A `scheduler` port of 0 means: whoever starts it chooses a free one; `reserved` holds one that was chosen before,
    and belongs to `daemons.start`. `starts_node` and `starts_scheduler` say what that has to do here.
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
    starts_node: bool = False
    starts_scheduler: bool = False
    reserved: socket.socket | None = None
    job_key: bytes

    @property
    def is_joined_once(self) -> bool:
        """Whether scheduler and nodes are started from outside, once: no rank could start them again."""
        return self.launcher == "bpsfast" or (self.launcher == "dmlc" and self.scheduler[1] != 0)

    def settings(self, settings: Settings) -> Settings:
        """Return *settings* with everything this place knows filled in."""
        return msgspec.structs.replace(
            settings, rank=self.rank, size=self.size, local_rank=self.local_rank, local_size=self.local_size,
            node_id=self.node_id, node_index=self.node_index, num_nodes=self.num_nodes, num_helpers=self.num_helpers,
            num_servers=self.num_servers, scheduler=format_address(*self.scheduler), job_key=self.job_key.hex(),
        )


def job_key(settings: Settings, scheduler: str) -> bytes:
    """Return the job's secret for the scheduler at *scheduler* ("host:port").

    It is the given one; else, where only this machine reaches the scheduler, one that follows from this user's
    `machine_secret`. Beyond that a job without a key is refused, unless BPSFAST_INSECURE=1 asks for it: then the key
    follows from the address, and is no secret.

    Raises
    ------
    ConfigError
        There is no key, its file cannot be read, or it is too short or not hexadecimal.
    """
    host = parse_address(scheduler, "the scheduler")[0]
    if given_key(settings) or is_loopback(host):
        return local_key(settings, scheduler)
    check_insecure(settings, f"could join the job of the scheduler at {scheduler}")
    return security.job_key(None, f"bpsfast|{scheduler}")


def local_key(settings: Settings, common: str) -> bytes:
    """Return the secret of a job on one machine: the given one, or one that only this user's processes can derive.

    *common* is what the processes of this job, and of no other on this machine, know.
    """
    given = given_key(settings)
    if given:
        return security.job_key(given, "")
    return security.prove(machine_secret(), "bpsfast job key", common)


def check_insecure(settings: Settings, danger: str) -> None:
    """Raise `ConfigError` unless the user has asked to go without a key; warn if so.

    *danger* completes "whoever reaches this port ...".
    """
    if not settings.insecure:
        raise ConfigError(
            f"there is no job key, and without one whoever reaches its port {danger}: set BPSFAST_JOB_KEY to the same "
            "random hex on all machines (openssl rand -hex 32), or BPSFAST_JOB_KEY_FILE to a file with it, or "
            "BPSFAST_INSECURE=1 on a network where everybody is trusted")
    if settings.local_rank in (0, -1):
        _log.warning("BPSFAST_INSECURE=1 and no job key: whoever reaches its port %s", danger)


def given_key(settings: Settings) -> str:
    """Return the job's secret as it was given (hex), "" if it was not; ConfigError if its file cannot be read."""
    if settings.job_key or not settings.job_key_file:
        return settings.job_key
    try:
        return Path(settings.job_key_file).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"BPSFAST_JOB_KEY_FILE = {settings.job_key_file!r} cannot be read: {exc}") from exc


def scheduler_port(master_port: int) -> int:
    """Return the scheduler's port of a torchrun job, whose store listens on *master_port* itself: 20000 to 28191.

    Below Linux's ephemeral ports, and of its own for each job: 8192 consecutive master ports have as many different
    ones, neighbours are far apart, and it is never *master_port* (the factor less one is a multiple of 64, so that
    would make 20000 one, too).
    """
    return 20000 + master_port * 3137 % 8192


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Tell whether *host* can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in _LOOPBACK_NAMES


def job(settings: Settings, scheduler: str) -> dict[str, Any]:
    """Return the fields of a `ProcessRole` that all processes of one machine share; *scheduler* is "host:port"."""
    return {
        "scheduler": parse_address(scheduler, "BPSFAST_SCHEDULER"), "job_key": job_key(settings, scheduler),
        "node_id": default_node_id(settings, scheduler), "node_index": settings.node_index, "num_nodes": settings.num_nodes,
        "num_helpers": settings.num_helpers, "num_servers": settings.num_servers,
    }


def local_job(settings: Settings, common: str, size: int) -> dict[str, Any]:
    """Return the same for a job on one machine: only who starts the scheduler must know its port.

    *common*: as in `local_key`. *size*: ranks in the job; one alone needs nothing in common with others.
    """
    key = local_key(settings, common) if size > 1 or given_key(settings) else secrets.token_bytes(32)
    return {
        "scheduler": ("127.0.0.1", 0), "job_key": key, "node_id": settings.node_id, "node_index": 0, "num_nodes": 1,
    }


def default_node_id(settings: Settings, scheduler: str) -> str:
    """Return the name of this machine's node in the job of the scheduler at *scheduler* ("host:port"): two jobs on one
    machine may have one key.
    """
    return node_id_or_default(settings, f"machine of {scheduler.lower()}")


def node_id_or_default(settings: Settings, name: str) -> str:
    """Return *name*, which no other job on this host has, unless the user has named the node."""
    return name if settings.node_id == _ANY_NODE else settings.node_id


def check_range(name: str, value: int, limit_name: str, limit: int) -> None:
    """Raise `ConfigError` unless *value* of the variable *name* is at least 0 and less than *limit*."""
    if not 0 <= value < limit:
        raise ConfigError(f"{name} = {value} must be at least 0 and less than {limit_name} = {limit}")


def integer(name: str, environ: Mapping[str, str]) -> int:
    """Return the whole number that the variable *name* holds; `ConfigError` if it is none."""
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name} = {environ[name]!r} is no whole number") from None
