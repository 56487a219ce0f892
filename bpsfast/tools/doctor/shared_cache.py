"""RD21: do cores that are said to share a cache do so? A virtual machine's host decides, and may change its mind."""
from __future__ import annotations

import os
from dataclasses import dataclass

from ...base.value_formats import parse_cpus
from ...hardware.host import Host
from ...hardware.numa import siblings
from ...pyx.perf import handover_ns
from .facts import Facts
from .finding import Check, Outcome, Severity, advice, passed, skipped, warned

#: Within a cache that cores share a line takes 20 to 80 ns; between those of chiplets or sockets 100 or more.
_MOST_NS = 100.0
#: So many cores are looked at beside the first of those that share a cache: each takes a millisecond.
_MOST_CORES = 15


@dataclass(frozen=True)
class CacheLineLatency:
    """A cache line took *ns* from CPU *first* to CPU *second*, the farthest of those that are said to share a cache;
    or why it was not measured.
    """

    first: int = -1
    second: int = -1
    ns: float = 0.0
    error: str = ""


def measure(host: Host) -> CacheLineLatency:
    """Measure between cores of *host*, this machine, that share the last level of cache by the kernel's word."""
    cores = sharers(host, frozenset(os.sched_getaffinity(0)))
    if len(cores) < 2:
        return CacheLineLatency(error="no two cores that this process may use share a cache, as far as the kernel says")
    first, *others = cores[:_MOST_CORES + 1]
    return max((again(CacheLineLatency(first, other)) for other in others), key=lambda found: (not found.error, found.ns))


def again(before: CacheLineLatency) -> CacheLineLatency:
    """Measure between the cores of *before*, if it has any."""
    if before.first < 0:
        return before
    try:
        return CacheLineLatency(before.first, before.second, handover_ns(before.first, before.second))
    except OSError as exc:
        return CacheLineLatency(before.first, before.second, error=exc.strerror or str(exc))


def differ(first_ns: float, second_ns: float) -> bool:
    """Tell whether cores shared a cache in one of two measurements and did not in the other; 0 ns: nobody knows."""
    return bool(first_ns and second_ns) and (first_ns <= _MOST_NS) != (second_ns <= _MOST_NS)


def sharers(host: Host, usable: frozenset[int]) -> list[int]:
    """Return one CPU of each core of *usable* in the largest set that shares the last level of cache, or []."""
    groups = dict.fromkeys(parse_cpus(_last_cache(host, cpu, "shared_cpu_list")) & usable for cpu in sorted(usable))
    return max((_cores(host, cpus) for cpus in groups), key=len, default=[])


def shared_cache(facts: Facts) -> Outcome:
    """RD21: is a cache line passed on as fast as within one cache?"""
    found = facts.cache_latency
    if found is None:
        return skipped("nobody has measured it")
    if found.error:
        return skipped(found.error)
    level = _last_cache(facts.host, found.first, "level") or "?"
    pair = f"CPUs {found.first} and {found.second}"
    took = f"a cache line takes {found.ns:.0f} ns from one to the other"
    if found.ns <= _MOST_NS:
        return passed(f"{pair} share an L{level} cache: {took}")
    return warned(f"{pair} share an L{level} cache, says the kernel, but {took}: the host of this virtual machine runs "
                  "them on different chips now, and sums of local ranks take twice as long",
                  host="on the host of the virtual machine: virsh vcpupin NAME 0 CPU   # all to cores of one L3",
                  check="bpsfast doctor   # again in a minute: where CPUs are not pinned it changes")


CHECKS = (
    Check("RD21", "shared cache", Severity.SLOW,
          ("a job is twice as slow as yesterday, on the same virtual machine", "benchmarks have two modes"),
          "A virtual machine's CPUs are threads of its host, which moves them between chips, or parts of a chip "
          "that have a cache each, while the guest's kernel goes on to say that they share one.",
          "What one rank has written another reads from memory, or across the host's interconnect.",
          "two CPUs that were 40 ns apart for minutes, then 200, while exchanges of 4 MiB fell from 12 to 5 GB/s",
          shared_cache,
          advice(host="on the host of the virtual machine: virsh vcpupin NAME 0 CPU",
                 check="bpsfast doctor; cat /sys/devices/system/cpu/cpu*/cache/index3/shared_cpu_list")),
)


def _cores(host: Host, cpus: frozenset[int]) -> list[int]:
    """Return the first CPU of each core of *cpus*."""
    return sorted({min(siblings(host.tree, cpu) & cpus, default=cpu) for cpu in cpus})


def _last_cache(host: Host, cpu: int, name: str) -> str:
    """Return what the kernel says of the largest cache that *cpu* has; "" if nothing."""
    place = f"sys/devices/system/cpu/cpu{cpu}/cache"
    levels = [(int(host.tree.text(f"{place}/{index}/level") or 0), index)
              for index in host.tree.names(place) if index.startswith("index")]
    return host.tree.text(f"{place}/{max(levels)[1]}/{name}") or "" if levels else ""
