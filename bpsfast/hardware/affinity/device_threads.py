"""Which cores threads run on: those of an RDMA device, as the setting rdma_cores says; any, or all of this process."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.value_formats import parse_cpus
from ...orchestration.errors import ConfigError
from .. import numa

if TYPE_CHECKING:
    from ..host import Host


def device_cores(host: Host, device: str, text: str, allowed: frozenset[int] = frozenset()) -> frozenset[int]:
    """Return the cores for *device* by the setting's *text*: "3", "4-7", "numa" or "". Empty: any.

    "numa" is empty, too, where the kernel does not say which NUMA node the device is on, and where this process may
    run on none of its cores. *allowed*: where it may run, if it now keeps to less by itself.

    Raises
    ------
    ConfigError
        If this process may run on none of them.
    """
    allowed = allowed or numa.allowed_cpus(host.tree)
    if text == "numa":
        beside = next((each.numa_node for each in host.devices if each.name == device), None)
        return host.numa[beside].cpus & allowed if beside in host.numa else frozenset()
    wanted = parse_cpus(text)
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


def for_each_thread(apply: Callable[[int], None]) -> None:
    """Call *apply* with the id of every thread of this process, those that are born meanwhile included."""
    done: set[int] = set()
    while fresh := {int(path.name) for path in Path("/proc/self/task").iterdir()} - done:
        for thread in fresh:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                apply(thread)
        done |= fresh
