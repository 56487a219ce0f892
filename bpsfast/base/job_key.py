"""Determines the secret key of a job: the given one, or one derived from this user's secret on this machine.

Ranks of a job on one machine (torchrun, mpirun, a Slurm step, BytePS's variables) share nothing that other users of the
machine cannot see: a port, or the process that started them. So `machine_secret` keeps a secret in a file that only
this user can read; jobs that stay on the machine derive their keys from it.
"""
from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from ..orchestration import security
from ..orchestration.errors import ConfigError
from .addresses import is_loopback
from .settings import Settings, first_address, parse_addresses

_log = logging.getLogger("bpsfast.roles")
_ANY_NODE = Settings().node_id

#: Folders for the secret: the first one in which this user has, or can have, a folder of its own. TMPDIR is not used,
#: as the processes of a job may have different ones.
_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
_FILE = "machine.key"
#: Temporary errors, which do not mean that the folder is unusable.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EINTR)
_NBYTES = 32


def machine_secret(places: Sequence[str | Path] = _PLACES) -> bytes:
    """Return 32 bytes that all processes of this user on this machine get, and no others but root's.

    The first process draws them. They last as long as the file; jobs read it only at their start.

    Raises `ConfigError` if this user has a private folder in none of *places*.
    """
    objections = []
    for place in places:
        folder = Path(place) / f"bpsfast-{os.geteuid()}"
        try:
            return _read_or_draw(folder)
        except OSError as exc:
            if exc.errno in _PASSING:  # another process might succeed here, and use another folder
                raise ConfigError(f"this user's secret in {folder} cannot be read: {exc}; try again, or set "
                                  "BPSFAST_JOB_KEY to the same random hex for all processes of the job") from exc
            objections.append(f"{folder}: {exc.strerror or exc}")
    raise ConfigError(f"there is no job key, and no place to keep this user's secret ({'; '.join(objections)}): make "
                      "one of these folders this user's, with mode 0700, or set BPSFAST_JOB_KEY to the same random hex "
                      "for all processes of the job (openssl rand -hex 32)")


def _read_or_draw(folder: Path) -> bytes:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_owner(within)
        try:
            return _read(within)
        except FileNotFoundError:
            _draw(within)
            return _read(within)
    finally:
        os.close(within)


def _read(within: int) -> bytes:
    fd = os.open(_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        _check_owner(fd)
        data = os.read(fd, _NBYTES + 1)
        os.utime(fd)  # so that cleaning up by age does not remove it
    finally:
        os.close(fd)
    if len(data) != _NBYTES:
        raise OSError(f"{_FILE} has not {_NBYTES} bytes: remove it")
    return data


def _draw(within: int) -> None:
    """Create the file atomically, unless another process was faster."""
    name = f".{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=within)
    try:
        os.write(fd, secrets.token_bytes(_NBYTES))
        with contextlib.suppress(FileExistsError):
            os.link(name, _FILE, src_dir_fd=within, dst_dir_fd=within)
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=within)


def _check_owner(fd: int) -> None:
    """Raise `OSError` unless *fd* is this user's, without permissions for others."""
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        raise OSError(f"it belongs to user {found.st_uid}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise OSError(f"other users may use it (mode {stat.S_IMODE(found.st_mode):04o})")


def given_key(settings: Settings) -> str:
    """Return the job's key as given in the settings (hex), "" if none; raise `ConfigError` for an unreadable file."""
    if settings.job_key or not settings.job_key_file:
        return settings.job_key
    try:
        return Path(settings.job_key_file).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"BPSFAST_JOB_KEY_FILE = {settings.job_key_file!r} cannot be read: {exc}") from exc


def job_key(settings: Settings, scheduler: str) -> bytes:
    """Return the key of the job with the scheduler at *scheduler* (``host:port``, or a list of them).

    It is the given one; else, if only this machine can reach the scheduler, one derived from `machine_secret`. Any
    other job without a key is refused, unless BPSFAST_INSECURE=1: then the key follows from the first address, and is
    no secret.

    Raises `ConfigError` if there is no key, its file cannot be read, or it is too short or not hexadecimal.
    """
    first = first_address(scheduler)
    are_loopback = [is_loopback(host) for host, _ in parse_addresses(scheduler)]
    if any(are_loopback) and not all(are_loopback):
        raise ConfigError(f"BPSFAST_SCHEDULER = {scheduler} has addresses of the loopback and others: name an address "
                          "of each machine that all machines of the job reach")
    if given_key(settings) or all(are_loopback):
        return local_key(settings, first)
    check_insecure(settings, f"could join the job of the scheduler at {scheduler}")
    return security.job_key(None, f"bpsfast|{first}")


def local_key(settings: Settings, common: str) -> bytes:
    """Return the key of a job on one machine: the given one, or one that only this user's processes can derive.

    *common* is known to the processes of this job, and differs from other jobs on this machine.
    """
    given = given_key(settings)
    if given:
        return security.job_key(given, "")
    return security.prove(machine_secret(), "bpsfast job key", common)


def check_insecure(settings: Settings, danger: str) -> None:
    """Raise `ConfigError` unless the user allows a job without a key; then log a warning.

    *danger* completes "whoever reaches this port ...".
    """
    if not settings.insecure:
        raise ConfigError(
            f"there is no job key, and without one whoever reaches its port {danger}: set BPSFAST_JOB_KEY to the same "
            "random hex on all machines (openssl rand -hex 32), or BPSFAST_JOB_KEY_FILE to a file with it, or "
            "BPSFAST_INSECURE=1 on a network where everybody is trusted")
    if settings.local_rank in (0, -1):
        _log.warning("BPSFAST_INSECURE=1 and no job key: whoever reaches its port %s", danger)


def default_node_id(settings: Settings, scheduler: str) -> str:
    """Return the name of this machine's node in the job with the scheduler at *scheduler* (``host:port``, or a list of
    them), as two jobs on one machine may have the same key.
    """
    return node_id_or_default(settings, f"machine of {first_address(scheduler).lower()}")


def node_id_or_default(settings: Settings, name: str) -> str:
    """Return the setting `node_id` if it is set, else *name*, which differs from other jobs on this host."""
    return name if settings.node_id == _ANY_NODE else settings.node_id


def elastic_key(key: bytes) -> bytes:
    """Return the key of the line between an elastic job's workers and its coordinator, derived from the job's *key*."""
    return security.prove(key, "coordinator")
