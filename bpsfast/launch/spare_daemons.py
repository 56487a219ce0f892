"""Daemons that have loaded their modules and wait for their settings, so that the next job of a process starts sooner.

Most of the time in which scheduler and node start is spent on loading modules. A process that belongs to one job after
another (`bpsfast.elastic`) has this done while the present job still runs. A spare daemon gets its settings, the job's
key among them, over a socket. A spare that is not needed is killed, and ends by itself if its starter does.
"""
from __future__ import annotations

import contextlib
import importlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..base import process_identity
from ..base.resources import is_ready
from ..hardware.affinity.binding import on_cores, unbound_cpus
from ..orchestration.errors import DECODE_ERRORS, ProtocolError

_READY = b"r"
#: A daemon that takes longer to load its modules is not used.
_LOAD_S = 30.0
_CHUNK_NBYTES = 1 << 16


def start(command: str, environ: Mapping[str, str], options: Sequence[str] = (),
          fds: Sequence[int] = ()) -> subprocess.Popen:
    """Start ``bpsfast COMMAND`` with *options* as a child that watches this process, and inherits *fds*."""
    # without the launcher's mark: the daemon watches this process itself, and `orphan_reaper` leaves it alone
    own = {name: value for name, value in environ.items() if name != process_identity.LAUNCHER_VARIABLE}
    starter_fd = os.pidfd_open(os.getpid())
    try:
        with on_cores(unbound_cpus()):  # not those that another job pinned this rank to
            return subprocess.Popen(
                [sys.executable, "-m", "bpsfast", command, "--starter-fd", str(starter_fd), *options],
                pass_fds=[starter_fd, *fds], env=own | {"PYTHONSAFEPATH": "1"}, stdin=subprocess.DEVNULL, stdout=2,
                start_new_session=True)
    finally:
        os.close(starter_fd)


class SpareDaemons:
    """The spare daemons of this process: at most one of each command, "scheduler" or "node". Owner thread only."""

    def __init__(self) -> None:
        self._spares: dict[str, _Spare] = {}

    def keep(self, commands: Iterable[str], environ: Mapping[str, str]) -> None:
        """Have a spare of each of *commands*, started with *environ* if there is none, and no others.

        One that cannot be started is left out: the daemon is then started when it is needed.
        """
        wanted = set(commands)
        for command in self._spares.keys() - wanted:
            self._spares.pop(command).close()
        for command in sorted(wanted):
            found = self._spares.get(command)
            if found is not None and found.process.poll() is None:
                continue
            if found is not None:
                self._spares.pop(command).close()
            with contextlib.suppress(OSError):
                self._spares[command] = _Spare(command, environ)

    def are_ready(self, timeout_s: float) -> bool:
        """Wait up to *timeout_s* for each; tell whether all have loaded their modules, or have ended."""
        return all(spare.is_ready(timeout_s) for spare in self._spares.values())

    def take(self, command: str, variables: Mapping[str, str]) -> subprocess.Popen | None:
        """Have the spare of *command* go on with the settings in *variables*; None if there is none."""
        spare = self._spares.pop(command, None)
        return None if spare is None else spare.go_on(variables)

    def close(self) -> None:
        """End all. Idempotent."""
        while self._spares:
            self._spares.popitem()[1].close()


class _Spare:
    def __init__(self, command: str, environ: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = start(command, environ, ["--settings-fd", str(theirs.fileno())], [theirs.fileno()])
        except OSError:
            self._socket.close()
            raise

    def is_ready(self, timeout_s: float) -> bool:
        return is_ready(self._socket.fileno(), timeout_s)

    def go_on(self, variables: Mapping[str, str]) -> subprocess.Popen | None:
        with self._socket:
            try:
                self._socket.settimeout(_LOAD_S)
                self._socket.recv(len(_READY))  # else the end of this socket would discard the settings
                self._socket.sendall(msgspec.json.encode(dict(variables)))
                self._socket.shutdown(socket.SHUT_WR)  # forks of this process may hold the socket, too
            except OSError:  # it has ended, or hangs
                self.process.kill()
                self.process.wait()
                return None
        return self.process

    def close(self) -> None:
        self._socket.close()
        self.process.kill()  # it may still load its modules
        self.process.wait()


def take_settings(fd: int, starter_fd: int, *modules: str) -> bool:
    """In a spare daemon: load *modules* of bpsfast, wait for the settings, and put them into the environment.

    Returns False if the daemon is not needed. *fd*: the socket that it was started with, which is closed. *starter_fd*:
    the starter's pidfd.
    """
    for name in modules:
        importlib.import_module(f"bpsfast.{name}")
    data = bytearray()
    with socket.socket(fileno=fd) as channel, contextlib.suppress(ConnectionError):
        channel.sendall(_READY)
        poll = select.poll()
        for each in (fd, starter_fd):  # forks of the starter may hold the socket, and outlive it
            poll.register(each, select.POLLIN)
        while fd in dict(poll.poll()) and (chunk := channel.recv(_CHUNK_NBYTES)):
            data += chunk
    if not data:
        return False
    try:
        os.environ.update(msgspec.json.decode(bytes(data), type=dict[str, str]))
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"a spare daemon's settings cannot be read: {exc}") from exc
    return True
