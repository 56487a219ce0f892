"""The mark of a process, for what it may leave behind: names of folders and namespaces, its children's environment.

``<pid>.<start time>.<place>``: the start time (clock ticks since boot) tells the process from a later one with its
number; *place* is this boot and PID namespace, where the number means something. So whoever finds a mark can tell what
was left by the dead, what is in use, and of what nobody here can know that.
"""
from __future__ import annotations

import functools
import os
import zlib
from pathlib import Path

_GONE = "gone"


@functools.cache
def place() -> str:
    """Return the name of this boot and PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    words = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return f"{zlib.crc32(words.encode()):08x}"


def mark() -> str:
    """Return the mark of this process."""
    return f"{os.getpid()}.{start_time(os.getpid())}.{place()}"


def is_dead(found: str) -> bool:
    """Whether the process that made the mark *found* has certainly ended. False for what is no mark of this place."""
    pid, start, where = [*found.split("."), "", ""][:3]
    return where == place() and pid.isdecimal() and start.isdecimal() and start_time(int(pid)) != start


def start_time(pid: int) -> str:
    """Return when process *pid* started, in clock ticks since boot; "gone" if it has ended."""
    fields = stat(pid)
    return _GONE if not fields or fields[0] in "ZX" else fields[19]


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name: state, parent, group, session and so on; empty if gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()  # the name in parentheses may hold anything


def folder_prefix(kind: str) -> str:
    """Return what the names of this process's temporary folders begin with: ``bpsfast clean`` finds them by it."""
    return f"bpsfast-{kind}-{mark()}-"
