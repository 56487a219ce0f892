"""Which cores a thread that serves an RDMA device runs on, as the setting rdma_cores says."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ..orchestration.errors import ConfigError
from . import numa
from .host import Host


def cores_of(host: Host, device: str, text: str) -> frozenset[int]:
    """Return the cores for *device* by the setting's *text*: "3", "4-7", "numa" or "". Empty: any.

    "numa" is empty, too, where the kernel does not say which NUMA node the device is on, and where this process may
    run on none of its cores.

    Raises
    ------
    ConfigError
        If this process may run on none of them.
    """
    allowed = numa.allowed_cpus(host.tree)
    if text == "numa":
        beside = next((each.numa_node for each in host.devices if each.name == device), None)
        return host.numa[beside].cpus & allowed if beside in host.numa else frozenset()
    wanted = numa.parse_cpus(text)
    if wanted and not wanted & allowed:
        raise ConfigError(f"rdma_cores={text}: this process may run on none of them, but on "
                          f"{','.join(map(str, sorted(allowed)))} (taskset, cpuset)")
    return wanted & allowed


@contextlib.contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Keep the calling thread on *cores* meanwhile, and every thread that it starts meanwhile for good; empty: any."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, before)
