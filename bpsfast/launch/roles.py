"""Who this process is: which rank of which machine, and which daemons it has to start.

The first complete set of variables wins; two sets that disagree, or half a set, are an error that names both.

    launcher   variables                                    starts the node      starts the scheduler
    bpsfast    BPSFAST_RANK/SIZE/LOCAL_RANK/LOCAL_SIZE      nobody: it runs      nobody: it runs
    torchrun   RANK, WORLD_SIZE, LOCAL_RANK, ...            local rank 0         global rank 0
    dmlc       DMLC_*, BYTEPS_LOCAL_RANK/LOCAL_SIZE         local rank 0         DMLC_ROLE=scheduler (*)
    single     none                                         the rank             the rank

(*) In a local job, local rank 0. That is BytePS's rule: one worker machine and no BYTEPS_FORCE_DISTRIBUTED.

Under BytePS's variables a DMLC_ROLE=server process on a machine with ranks *is* its node: whichever of the two starts
first takes the machine's local socket, and the other attaches.
"""
from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..orchestration import security
from ..orchestration.errors import ConfigError
from ..settings import Settings, parse_address

_log = logging.getLogger("bpsfast.roles")

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

#: launcher -> (variables that show its presence, variables it must set)
_SETS = {
    "bpsfast": (("BPSFAST_RANK", "BPSFAST_SIZE", "BPSFAST_LOCAL_RANK"),
                ("BPSFAST_RANK", "BPSFAST_SIZE", "BPSFAST_LOCAL_RANK", "BPSFAST_LOCAL_SIZE", "BPSFAST_SCHEDULER")),
    "torchrun": (("RANK", "LOCAL_RANK"), _TORCHRUN),
    "dmlc": (("DMLC_ROLE", "DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK"), ("DMLC_ROLE", "DMLC_NUM_WORKER")),
}
_DMLC_RANK = ("DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE")


class Place(msgspec.Struct, frozen=True, kw_only=True):
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


def detect(settings: Settings, environ: Mapping[str, str] | None = None) -> Place:
    """Return the place of this process.

    Raises
    ------
    ConfigError
        Half a set of variables, or two sets that disagree; the text names the variables and who should set them.
    """
    environ = os.environ if environ is None else environ
    present = [launcher for launcher in _SETS if _marks(launcher, settings, environ)]
    if not present:
        return _single(settings)
    missing = {launcher: _missing(launcher, settings, environ) for launcher in present}
    incomplete = [launcher for launcher in present if missing[launcher]]
    if incomplete:
        raise ConfigError(_incomplete_text(incomplete[0], missing, settings, environ))
    places = [_PLACES[launcher](settings, environ) for launcher in present]
    for other in places[1:]:
        _check_agree(places[0], other, settings, environ)
    return places[0]


def job_key(settings: Settings, scheduler: str) -> bytes:
    """Return the job's secret: of BPSFAST_JOB_KEY, of the file, else derived from *scheduler* ("host:port").

    Raises
    ------
    ConfigError
        The file cannot be read, or the key is too short or no hex.
    """
    text = given_key(settings)
    if not text and settings.local_rank in (0, -1) and not is_loopback(parse_address(scheduler, "the scheduler")[0]):
        _log.warning("no BPSFAST_JOB_KEY: the job's key is derived from the scheduler's address %s, so anyone who "
                     "reaches it can join; set BPSFAST_JOB_KEY to the same random hex on all roles", scheduler)
    return security.job_key(text or None, f"bpsfast|{scheduler}")


def given_key(settings: Settings) -> str:
    """Return the job's secret as it was given (hex), "" if it was not; ConfigError if its file cannot be read."""
    if settings.job_key or not settings.job_key_file:
        return settings.job_key
    try:
        return Path(settings.job_key_file).read_text(encoding="ascii").strip()
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
        return host == "localhost"


def is_local_job(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Tell whether BytePS would start neither scheduler nor servers: one worker machine, not forced."""
    return settings.num_nodes <= 1 and environ.get("BYTEPS_FORCE_DISTRIBUTED", "0") in ("", "0")


def _single(settings: Settings) -> Place:
    if settings.scheduler:
        raise ConfigError(
            f"BPSFAST_SCHEDULER = {settings.scheduler} says that this process belongs to a job, but nothing says which "
            "rank it is: set BPSFAST_RANK, BPSFAST_SIZE, BPSFAST_LOCAL_RANK and BPSFAST_LOCAL_SIZE, or start it by "
            "`bpsfast run`"
        )
    given = given_key(settings)
    key = security.job_key(given, "") if given else secrets.token_bytes(32)
    return Place(launcher="single", role="rank", rank=0, size=1, local_rank=0, local_size=1,
                 node_id=f"single-{os.getpid()}-{secrets.token_hex(4)}", num_nodes=1, scheduler=("127.0.0.1", 0),
                 starts_node=True, starts_scheduler=True, job_key=key)


def _explicit(settings: Settings, environ: Mapping[str, str]) -> Place:
    _check_range("BPSFAST_RANK", settings.rank, "BPSFAST_SIZE", settings.size)
    _check_range("BPSFAST_LOCAL_RANK", settings.local_rank, "BPSFAST_LOCAL_SIZE", settings.local_size)
    return Place(launcher="bpsfast", role="rank", rank=settings.rank, size=settings.size,
                 local_rank=settings.local_rank, local_size=settings.local_size, **_job(settings, settings.scheduler))


def _torchrun(settings: Settings, environ: Mapping[str, str]) -> Place:
    number = {name: _integer(name, environ) for name in _TORCHRUN}
    _check_range("RANK", number["RANK"], "WORLD_SIZE", number["WORLD_SIZE"])
    _check_range("LOCAL_RANK", number["LOCAL_RANK"], "LOCAL_WORLD_SIZE", number["LOCAL_WORLD_SIZE"])
    scheduler = settings.scheduler
    if not scheduler:
        scheduler = format_address(environ["MASTER_ADDR"], scheduler_port(_integer("MASTER_PORT", environ)))
    n_groups = _integer("GROUP_WORLD_SIZE", environ) if environ.get("GROUP_WORLD_SIZE") else (
        -(-number["WORLD_SIZE"] // number["LOCAL_WORLD_SIZE"]))
    job = _job(settings, scheduler)
    if settings.node_id == "machine":
        job["node_id"] = f"group-{number['GROUP_RANK']}"   # two agents of one host are two machines
    return Place(launcher="torchrun", role="rank", rank=number["RANK"], size=number["WORLD_SIZE"],
                 local_rank=number["LOCAL_RANK"], local_size=number["LOCAL_WORLD_SIZE"],
                 **(job | {"node_index": number["GROUP_RANK"], "num_nodes": n_groups}),
                 starts_node=number["LOCAL_RANK"] == 0, starts_scheduler=number["RANK"] == 0)


def _dmlc(settings: Settings, environ: Mapping[str, str]) -> Place:
    role = environ["DMLC_ROLE"]
    if is_local_job(settings, environ):
        return _dmlc_local(settings, role)
    job = _job(settings, settings.scheduler)
    if role == "scheduler":
        return Place(launcher="dmlc", role="scheduler", **job)
    if role == "server":
        return Place(launcher="dmlc", role="server", **(job | {"node_index": -1}))
    _check_range("BYTEPS_LOCAL_RANK", settings.local_rank, "BYTEPS_LOCAL_SIZE", settings.local_size)
    rank = _integer("BYTEPS_GLOBAL_RANK", environ) if environ.get("BYTEPS_GLOBAL_RANK") else -1
    return Place(launcher="dmlc", role="rank", rank=rank, local_rank=settings.local_rank,
                 local_size=settings.local_size, **job, starts_node=settings.local_rank == 0)


def _dmlc_local(settings: Settings, role: str) -> Place:
    if role != "worker":
        return Place(launcher="dmlc", role=role, node_id=settings.node_id, scheduler=("127.0.0.1", 0), job_key=b"")
    _check_range("BYTEPS_LOCAL_RANK", settings.local_rank, "BYTEPS_LOCAL_SIZE", settings.local_size)
    given = given_key(settings)
    if given or settings.scheduler:
        key = security.job_key(given or None, f"bpsfast|{settings.scheduler}")
    elif settings.local_size == 1:
        key = secrets.token_bytes(32)
    else:
        raise ConfigError(
            f"{settings.local_size} ranks of one machine need something in common to find their node by: set "
            "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, or BPSFAST_JOB_KEY, or start them by `bpsfast dmlc -- command`"
        )
    first = settings.local_rank == 0
    return Place(launcher="dmlc", role="rank", rank=settings.local_rank, size=settings.local_size,
                 local_rank=settings.local_rank, local_size=settings.local_size, node_id=settings.node_id, node_index=0,
                 num_nodes=1, scheduler=("127.0.0.1", 0), starts_node=first, starts_scheduler=first, job_key=key)


_PLACES = {"bpsfast": _explicit, "torchrun": _torchrun, "dmlc": _dmlc}


def _job(settings: Settings, scheduler: str) -> dict:
    return {
        "scheduler": parse_address(scheduler, "BPSFAST_SCHEDULER"), "job_key": job_key(settings, scheduler),
        "node_id": settings.node_id, "node_index": settings.node_index, "num_nodes": settings.num_nodes,
        "num_helpers": settings.num_helpers, "num_servers": settings.num_servers,
    }


def _marks(launcher: str, settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Return the variables that show that *launcher* has started this process."""
    marks = [name for name in _SETS[launcher][0] if environ.get(name, "")]
    if launcher == "bpsfast" and not marks and settings.rank >= 0:
        return ["rank"]  # given on the command line
    return marks


def _missing(launcher: str, settings: Settings, environ: Mapping[str, str]) -> list[str]:
    needed = list(_SETS[launcher][1])
    if launcher == "bpsfast":
        values = msgspec.structs.asdict(settings)
        return [name for name in needed if values[name.removeprefix("BPSFAST_").lower()] in (-1, "")]
    if launcher == "torchrun" and not settings.scheduler:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    if launcher == "dmlc":
        role = environ.get("DMLC_ROLE", "worker")
        if role not in ("worker", "server", "scheduler"):
            raise ConfigError(f"DMLC_ROLE = {role!r}: expected worker, server or scheduler")
        needed += _DMLC_RANK if role == "worker" else ()
        if not is_local_job(settings, environ):
            needed += ["DMLC_NUM_SERVER"]
            needed += [] if settings.scheduler else ["DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"]
    return [name for name in needed if not environ.get(name, "")]


def _incomplete_text(launcher: str, missing: dict, settings: Settings, environ: Mapping[str, str]) -> str:
    text = f"{', '.join(_marks(launcher, settings, environ))} set, but {', '.join(missing[launcher])} not"
    others = [f"{', '.join(_marks(other, settings, environ))} ({other})" for other in missing if other != launcher]
    if others:
        text += f", and variables of another launcher as well: {'; '.join(others)}. Unset those of one launcher"
    elif launcher == "dmlc" and set(missing[launcher]) & {"BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE"}:
        text += ". Start the ranks by `bpsfast dmlc -- command` (as by bpslaunch), or set them for each rank"
    else:
        text += ". Set them, or start the program by `bpsfast run`"
    return f"cannot tell which rank this process is: {text}"


def _check_agree(first: Place, other: Place, settings: Settings, environ: Mapping[str, str]) -> None:
    for field in ("role", "rank", "size", "local_rank", "local_size"):
        mine, theirs = getattr(first, field), getattr(other, field)
        if mine != theirs and -1 not in (mine, theirs):
            marks = [", ".join(_marks(place.launcher, settings, environ)) for place in (first, other)]
            raise ConfigError(
                f"two launchers disagree about {field}: {first.launcher} ({marks[0]}) says {mine}, "
                f"{other.launcher} ({marks[1]}) says {theirs}. Unset the variables of one of them"
            )


def _check_range(name: str, value: int, limit_name: str, limit: int) -> None:
    if not 0 <= value < limit:
        raise ConfigError(f"{name} = {value} must be at least 0 and less than {limit_name} = {limit}")


def _integer(name: str, environ: Mapping[str, str]) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name} = {environ[name]!r} is no whole number") from None
