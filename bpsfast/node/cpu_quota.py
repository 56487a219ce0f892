"""Limits the node's share of a machine that others use: a number of CPUs, and on request only idle CPU time.

Memory is bounded in `regions`, the network in `node.transport.tcp`. What the kernel does for the node's packets in
interrupts, it does on CPUs of its own choice.
"""
from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ..base.settings import Settings
from ..base.value_formats import format_cpus, parse_cpus
from ..hardware import numa
from ..hardware.affinity.binding import for_each_thread
from ..hardware.sysfs import Tree
from ..orchestration.errors import ConfigError

log = logging.getLogger("bpsfast.node")

#: How long CPUs are watched before the idlest are taken.
_WATCH_S = 0.2
#: CPUs whose idle shares differ by less are alike: so near together they are noise.
_ALIKE = 0.1
_LEAST_URGENT = 19


def take(settings: Settings) -> Settings:
    """Limit this process and its future threads to its share; return the settings that follow from it.

    Call it before anything else runs, and only in the node's own process: it cannot be undone.

    Raises `ConfigError` if this process may not run on as many CPUs as it is to keep to, or not on those.
    """
    tree = Tree()
    changes: dict[str, int] = {}
    if settings.cores:
        cpus = choose(tree, settings.cores, settings.cpus, avoid=parse_cpus(settings.avoid_cpus))
        for_each_thread(lambda thread: os.sched_setaffinity(thread, cpus))
        changes["engine_threads"] = settings.engine_threads or settings.cores
        log.info("keeping to CPUs %s", format_cpus(cpus))
    if settings.nice:
        # SCHED_IDLE: any thread that wakes up on this CPU gets it at once, and the kernel counts it as idle when it
        # looks for one. Niceness alone would leave us a time slice now and then.
        for_each_thread(_yield_to_all)
        _yield_as_group(tree)
        changes["awake_us"] = 0  # staying awake keeps a CPU from its sleep, and slows the sibling of its core
    return msgspec.structs.replace(settings, **changes)


def choose(tree: Tree, n: int, text: str = "", idle: Mapping[int, float] | None = None,
           avoid: frozenset[int] = frozenset()) -> frozenset[int]:
    """Return *n* of the CPUs that this process may run on.

    Those of *text* ("4-7"), where that names more the idlest; else the idlest of the NUMA node that has most idle time
    for *n*: memory of another node is slow, and slows those who use it. A CPU is as idle as the busiest of its core.

    *idle*: idle share of each CPU; None: they are watched for a moment. *avoid*: CPUs that are not taken.

    Raises `ConfigError` if there are not so many.
    """
    allowed = numa.allowed_cpus(tree)
    named = parse_cpus(text)
    able = (allowed & named if named else allowed) - avoid
    if len(able) < n:
        which = (f"of CPUs {text} it may run on {format_cpus(able) or 'none'}" if named else "it may run on these"
                 if not avoid else f"BPSFAST_AVOID_CPUS leaves {format_cpus(able) or 'none'}")
        raise ConfigError(f"BPSFAST_CORES = {n}, but this process may use {format_cpus(allowed)} (taskset, "
                          f"cpuset; {which}): {len(able)} of {n}. Ask for fewer, or give it more")
    if len(able) == n:
        return able
    shares = idle_shares(tree) if idle is None else idle
    cores = {cpu: numa.siblings(tree, cpu) for cpu in able}
    rest = {cpu: round(min(shares.get(each, 0.0) for each in cores[cpu]) / _ALIKE) for cpu in able}

    def idlest(cpus: Iterable[int]) -> list[int]:
        return sorted(cpus, key=lambda cpu: (-rest[cpu], cpu))[:n]

    nodes = [node.cpus & able for _, node in sorted(numa.nodes(tree).items()) if len(node.cpus & able) >= n]
    candidates = [idlest(cpus) for cpus in nodes if not named] or [idlest(able)]
    return frozenset(max(candidates, key=lambda cpus: sum(rest[cpu] for cpu in cpus)))


def idle_shares(tree: Tree, watch_s: float = _WATCH_S) -> dict[int, float]:
    """Return the idle share of every CPU during the next *watch_s* seconds."""
    before = _ticks(tree)
    time.sleep(watch_s)
    found = {}
    for cpu, (idle, total) in _ticks(tree).items():
        idle_before, total_before = before.get(cpu, (0, 0))
        found[cpu] = (idle - idle_before) / (total - total_before) if total > total_before else 1.0
    return found


def _ticks(tree: Tree) -> dict[int, tuple[int, int]]:
    """Return (idle, all) ticks of each CPU since boot."""
    found = {}
    for line in (tree.text("proc/stat") or "").splitlines():
        name, *words = line.split()
        if name.startswith("cpu") and name[3:].isdecimal():
            ticks = [int(word) for word in words[:8]]
            found[int(name[3:])] = ticks[3] + ticks[4], sum(ticks)
    return found


def _yield_to_all(thread: int) -> None:
    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, thread, _LEAST_URGENT)


def _yield_as_group(tree: Tree) -> None:
    """Lower the weight of the session, where the kernel divides CPUs among sessions first (sched_autogroup)."""
    if not tree.number("proc/sys/kernel/sched_autogroup_enabled"):
        return
    if os.getsid(0) != os.getpid():
        log.info("sched_autogroup is on, and this process shares its session with others, which keep their weight: "
                 "start it by setsid, or as a service")
        return
    try:
        Path("/proc/self/autogroup").write_text(str(_LEAST_URGENT))
    except OSError as exc:
        log.info("the weight of this session could not be lowered: %s", exc)
