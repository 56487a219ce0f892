"""Describes the machine and the software of a benchmark, for its result file."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from bpsfast.hardware.host import Host
from bpsfast.tools.doctor import hardware as caches_check

_PACKAGES = ("bpsfast", "numpy", "numba", "llvmlite", "ml_dtypes", "msgspec", "pyzmq", "torch", "mpi4py",
             "cupy-cuda12x", "cupy-cuda13x")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def describe() -> dict[str, Any]:
    """Return CPU, caches (bytes), memory (bytes), kernel and versions; absent packages are left out.

    `handover_ns`: the present time of a cache line between cores that share a cache according to the kernel, or None if
    unknown. Cores of a virtual machine may be near each other in one run and far apart in the next.
    """
    handover = caches_check.measure(Host())
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "n_cores": psutil.cpu_count(logical=False),
        "n_threads": psutil.cpu_count(),
        "n_usable": len(os.sched_getaffinity(0)),
        "cache_nbytes": caches(),
        "handover_ns": None if handover.error else handover.ns,
        "memory_nbytes": psutil.virtual_memory().total,
        "available_nbytes": psutil.virtual_memory().available,
        "load_average": list(os.getloadavg()),
        "kernel": platform.release(),
        "huge_pages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "versions": {"python": sys.version.split()[0], **_versions()},
    }


def caches() -> dict[str, int]:
    """Return the bytes of the caches of a core, {"L1d": ..., "L2": ..., "L3": ...}, or {} if the kernel has none."""
    found: dict[str, int] = {}
    for index in sorted(_CACHES.glob("index*")):
        level, kind, size = (_read(index / name) for name in ("level", "type", "size"))
        if kind in ("Data", "Unified") and size.endswith("K"):
            found[f"L{level}" + ("d" if level == "1" else "")] = int(size[:-1]) * 1024
    return found


def _cpu_model() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
