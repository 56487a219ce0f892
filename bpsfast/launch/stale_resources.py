"""Find and remove processes, network namespaces and folders that dead jobs have left on this machine (`bpsfast clean`).

The marks of their owners (`base.process_identity`) tell that these are dead:

    processes    started by a rank or another process of a job whose launcher and orphan reaper were both killed; what
                 has left its session (a daemon of the user's) is left alone, as at the end of a job
    namespaces   of `launch.namespaces`, with their links and queues
    folders      temporary ones of benches and of ``bpsfast tune``

Nothing else stays behind: memory (memfds), local sockets (abstract ones) and devices (TUN) vanish with the last process
that holds them.
"""
from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from ..base import process_identity
from ..base.resources import is_ready
from ..orchestration.errors import BpsError
from .namespaces import netns

_FOLDER = re.compile(r"bpsfast-[a-z]+-(\d+\.\d+\.[0-9a-f]{8})-\w+")
#: Why a namespace was not removed.
NEEDS_ROOT = "it needs root"
_TERM_S, _KILL_S = 2.0, 5.0


class StaleResource(msgspec.Struct, frozen=True):
    """One resource whose owner, process `owner_pid`, is dead. `kind`: process, namespace or folder."""

    kind: str
    name: str
    owner_pid: int
    about: str


def find() -> list[StaleResource]:
    """Return what is left of this user's jobs, in the order of removal."""
    return [*processes(), *namespaces(), *folders()]


def remove(found: Iterable[StaleResource]) -> Iterator[tuple[StaleResource, str]]:
    """Remove each; yield it with "", or with the reason why it is still there. What is in use again stays."""
    chosen = list(found)
    yield from _end([each for each in chosen if each.kind == "process"])
    for each in chosen:
        if each.kind == "namespace":
            yield each, _remove_namespace(each.name)
        elif each.kind == "folder":
            yield each, _remove_folder(Path(each.name))


def processes() -> list[StaleResource]:
    """Return this user's processes that their dead launcher would have ended."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and (mark := _left_by(int(name))):
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0") if Path(f"/proc/{name}").exists() else []
            found.append(StaleResource("process", name, int(mark.split(".")[0]),
                                  b" ".join(words).decode("utf-8", "replace").strip()[:120]))
    return sorted(found, key=lambda each: int(each.name))


def namespaces() -> list[StaleResource]:
    """Return network namespaces whose owner is dead."""
    return [StaleResource("namespace", name, int(name.split(".")[1]), "network namespace of a simulated cluster, and "
                          "what runs in it") for name in netns.stale()]


def folders() -> list[StaleResource]:
    """Return temporary folders of this user whose owner is dead."""
    found = []
    for path in sorted(Path(tempfile.gettempdir()).glob("bpsfast-*")):
        mark = _folder_left_by(path)
        if mark:
            found.append(StaleResource("folder", str(path), int(mark.split(".")[0]), f"{_nbytes(path)} bytes"))
    return found


def _left_by(pid: int) -> str:
    """Return the mark of the dead launcher of process *pid*; "" if the launcher lives or the user is another one."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        folder = Path(f"/proc/{pid}")
        if folder.stat().st_uid != os.geteuid() or pid == os.getpid():
            return ""
        prefix = f"{process_identity.LAUNCHER_VARIABLE}=".encode()
        value = next((each.removeprefix(prefix).decode() for each in (folder / "environ").read_bytes().split(b"\0")
                      if each.startswith(prefix)), "")
        mark, _, group = value.rpartition(".")
        fields = process_identity.stat(pid)
        if fields and fields[0] not in "ZX" and fields[3] == group and process_identity.is_dead(mark):
            return mark
    return ""


def _folder_left_by(path: Path) -> str:
    match = _FOLDER.fullmatch(path.name)
    with contextlib.suppress(FileNotFoundError):
        about = path.lstat()
        is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
        if match and is_own and process_identity.is_dead(match[1]):
            return match[1]
    return ""


def _end(found: list[StaleResource]) -> Iterator[tuple[StaleResource, str]]:
    """End processes by SIGTERM, and later those that are left by SIGKILL."""
    held: list[tuple[StaleResource, int]] = []
    try:
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                held.append((each, os.pidfd_open(int(each.name))))
        for number, seconds in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
            for each, fd in held:
                # the pid may have been another process's when the descriptor was opened
                if not is_ready(fd, 0.0) and _left_by(int(each.name)):
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(fd, number)
            deadline = time.monotonic() + seconds
            for _, fd in held:
                is_ready(fd, deadline - time.monotonic())
        survivors = {each for each, fd in held if not is_ready(fd, 0.0)}
    finally:
        for _, fd in held:
            os.close(fd)
    for each in found:
        yield each, "it still runs after SIGKILL: it waits in the kernel (state D)" if each in survivors else ""


def _remove_namespace(name: str) -> str:
    if os.geteuid() != 0:
        return NEEDS_ROOT
    try:
        netns.remove(name)
    except BpsError as exc:
        return str(exc)
    return ""


def _remove_folder(path: Path) -> str:
    if not _folder_left_by(path):
        return ""  # another process has removed it
    try:
        shutil.rmtree(path)
    except OSError as exc:
        return f"{exc.strerror}: {exc.filename}"
    return ""


def _nbytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
