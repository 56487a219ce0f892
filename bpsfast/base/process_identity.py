"""Identifiers of this machine, of its network and PID namespaces and of processes, which other processes can compare.

The *mark* of a process is in the names of its folders and network namespaces and in its children's environment. It is
``<pid>.<start time>.<namespace>``: the start time (clock ticks since boot) tells the process from a later one with the
same pid; the namespace is this boot and PID namespace, outside which the pid means nothing. From a mark another process
can tell whether the owner is dead, alive, or unknown here.
"""
from __future__ import annotations

import functools
import os
import zlib
from pathlib import Path

#: Environment variable of every process below a launcher: the launcher's mark and the session the process began in.
#: `launch.die_with_parent` and `launch.orphan_reaper`, which import nothing, repeat the name.
LAUNCHER_VARIABLE = "_BPSFAST_LAUNCHER"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_GONE = "gone"


def boot_id() -> str:
    """Return an identifier of this machine until it boots again, the same in every container.

    The host name, if the kernel has no boot id.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


def network_id() -> str:
    """Return an identifier of this network namespace: processes with the same one share devices and local sockets."""
    return f"{boot_id()} {os.stat('/proc/self/ns/net').st_ino}"


@functools.cache
def pid_namespace_id() -> str:
    """Return an identifier of this boot and PID namespace."""
    words = f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"
    return f"{zlib.crc32(words.encode()):08x}"


def mark() -> str:
    """Return the mark of this process."""
    return f"{os.getpid()}.{start_time(os.getpid())}.{pid_namespace_id()}"


def is_dead(found: str) -> bool:
    """Tell whether the process with the mark *found* has certainly ended. False for marks of other namespaces."""
    pid, start, where = [*found.split("."), "", ""][:3]
    return where == pid_namespace_id() and pid.isdecimal() and start.isdecimal() and start_time(int(pid)) != start


def start_time(pid: int) -> str:
    """Return when process *pid* started, in clock ticks since boot; "gone" if it has ended."""
    fields = stat(pid)
    return _GONE if not fields or fields[0] in "ZX" else fields[19]


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, group, session and so on; empty if gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()  # the name in parentheses may hold anything


def folder_prefix(kind: str) -> str:
    """Return the prefix of names of this process's temporary folders, by which ``bpsfast clean`` finds them."""
    return f"bpsfast-{kind}-{mark()}-"


def is_below_launcher() -> bool:
    """Tell whether a launcher (``bpsfast run``) started this process, and ends it together with the program.

    Then there is no deadline for the first rank: the program may load data for a long time before it joins the job, or
    may never use bpsfast.
    """
    return LAUNCHER_VARIABLE in os.environ
