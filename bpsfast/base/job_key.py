"""This user's secret on this machine: from it the keys of jobs are derived that do not leave the machine.

Ranks of a job on one machine (torchrun, mpirun, a Slurm step, BytePS's variables) have no channel of their own before
they meet, and what they have in common, such as a port or the process that started them, every user of the machine can
see. A file that only this user can read is such a channel.
"""
from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from ..orchestration.errors import ConfigError

#: Where the secret may lie: the first of them in which this user has, or can have, a folder of its own. TMPDIR does not
#: count, since not all processes of a job need have the same.
_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
_FILE = "machine.key"
#: What is over soon, and says nothing of the folder.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EINTR)
_NBYTES = 32


def machine_secret(places: Sequence[str | Path] = _PLACES) -> bytes:
    """Return the 32 bytes that all processes of this user on this machine get, and nobody else but root.

    The first process that asks draws them. They last as long as the file does; jobs read it at their start only.

    Raises
    ------
    ConfigError
        In none of *places* this user can have a folder that nobody else can write or read.
    """
    objections = []
    for place in places:
        folder = Path(place) / f"bpsfast-{os.geteuid()}"
        try:
            return _read_or_draw(folder)
        except OSError as exc:
            if exc.errno in _PASSING:  # another process may have better luck, and would go elsewhere
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
        os.utime(fd)  # who cleans up by age leaves it to jobs that still run
    finally:
        os.close(fd)
    if len(data) != _NBYTES:
        raise OSError(f"{_FILE} has not {_NBYTES} bytes: remove it")
    return data


def _draw(within: int) -> None:
    """Make the file, whole from the moment that others see it; another process may have been faster."""
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
    """Raise OSError unless *fd* is this user's, and nobody else's to read or to write."""
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        raise OSError(f"it belongs to user {found.st_uid}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise OSError(f"other users may use it (mode {stat.S_IMODE(found.st_mode):04o})")
