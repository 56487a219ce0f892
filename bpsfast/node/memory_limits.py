"""How much memory this process may still allocate: the machine's free memory and the limits of its cgroups.

The kernel kills a process that faults in a memfd beyond a cgroup's limit, so the node checks here first. Page cache
counts as free: the kernel drops it before it kills.
"""
from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

from ..orchestration.errors import CapacityError

#: Memory that is left to everything which is no segment: Python, sockets, the trainers' own allocations.
RESERVE_NBYTES = 64 << 20
#: cgroup v1 writes "no limit" as a huge number of pages.
_UNLIMITED = 1 << 60


class Limit(NamedTuple):
    """One bound on memory: what sets it, how much it allows at all, and how much of that is still free (bytes)."""

    source: str
    nbytes: int
    free_nbytes: int


def limits(root: Path = Path("/")) -> list[Limit]:
    """Return all bounds that hold for this process. *root* is where /proc and the cgroup mounts are looked up."""
    memory = psutil.virtual_memory()
    return [Limit("the machine", memory.total, memory.available), *_cgroup_limits(root)]


def free_nbytes() -> int:
    """Return how many bytes this process may still take."""
    return max(0, min(limit.free_nbytes for limit in limits()) - RESERVE_NBYTES)


def require(nbytes: int, purpose: str, root: Path = Path("/")) -> None:
    """Return if *nbytes* more may be taken for *purpose*.

    Raises
    ------
    CapacityError
        Naming the tightest bound, what is needed and what is free, both in bytes.
    """
    tightest = min(limits(root), key=lambda limit: limit.free_nbytes)
    free = max(0, tightest.free_nbytes - RESERVE_NBYTES)
    if nbytes > free:
        raise CapacityError(
            f"{purpose} needs {nbytes} bytes ({nbytes / 2**20:.1f} MiB), but {tightest.source} has {free} bytes "
            f"({free / 2**20:.1f} MiB) free of {tightest.nbytes} (less {RESERVE_NBYTES} kept for everything else): "
            "raise the limit, or push less at a time"
        )


def _cgroup_limits(root: Path) -> list[Limit]:
    """Return the limits of the process's memory cgroup and of all its ancestors, v1 and v2."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in memberships:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            names = ("memory.max", "memory.current", "")
            where = _mount(mounts, "cgroup2", None)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            where = _mount(mounts, "cgroup", "memory")
        else:
            continue
        if where is not None:
            found += _ancestor_limits(root, where, path, names)
    return found


def _mount(mounts: list[str], kind: str, option: str | None) -> tuple[str, str] | None:
    """Return (root inside the hierarchy, mount point) of a cgroup file system, or None if it is not mounted."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) > 4 and rest and rest[0] == kind and (option is None or option in rest[-1].split(",")):
            return fields[3], fields[4]
    return None


def _ancestor_limits(root: Path, where: tuple[str, str], path: str, names: tuple[str, str, str]) -> list[Limit]:
    inside, mount_point = where
    top = root / mount_point.lstrip("/")
    # In a container the hierarchy is mounted from our own group on: its root is not "/".
    relative = path.removeprefix(inside) if inside != "/" else path
    group = top / relative.strip("/")
    if not group.is_dir():
        group = top
    found = []
    for folder in (group, *group.parents):
        if folder != top and top not in folder.parents:
            break
        limit = _read_limit(folder, *names)
        if limit is not None:
            found.append(limit)
    return found


def _read_limit(folder: Path, limit_name: str, usage_name: str, prefix: str) -> Limit | None:
    try:
        text = (folder / limit_name).read_text().strip()
        used = int((folder / usage_name).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None  # the root group has no limit files, other groups may be hidden from us
    if text == "max" or int(text) >= _UNLIMITED:
        return None
    stat = dict(line.split() for line in lines)
    # Pages of memfds are on the anonymous lists, so these two are true cache.
    cache = int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0))
    return Limit(f"cgroup {folder}", int(text), max(0, int(text) - used + cache))
