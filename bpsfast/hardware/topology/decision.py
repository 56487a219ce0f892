"""The strategy of a machine: what settings force, else what is best, else the paper's rule."""
from __future__ import annotations

import logging
from collections.abc import Collection

from ...base.settings import Settings
from ...orchestration.errors import ConfigError
from .gpu_direct import GpuNicPair, wished
from .graph import PartKind, Topology
from .linear_program import MISSING, can_solve
from .loads import OWN, Traffic
from .nearest_socket import plain
from .strategy import Strategy
from .strategy_solver import ForcedStrategy, choose, islands_by_size, rule

_log = logging.getLogger("bpsfast.hardware.topology")
_told: set[str] = set()


def strategy_of(topology: Topology, settings: Settings, traffic: Traffic = OWN) -> Strategy:
    """Return the strategy of *topology*, and say once in the log where it comes from. Without SciPy, too.

    Raises
    ------
    ConfigError
        A setting asks for what the machine has not or cannot; a GPU has no way to memory.
    """
    given, direct = forced(topology, settings), wished(topology, settings)
    if direct and not can_solve():
        _tell(logging.WARNING, f"BPSFAST_GPU_DIRECT is on, but how much goes straight to cards is not found: {MISSING}")
    if given is None and can_solve():
        _tell(logging.INFO, f"machine {topology.name} sums its gradients as its links allow best")
        return choose(topology, traffic, direct=direct)
    if given is None:
        _tell(logging.WARNING if topology.of(PartKind.GPU) else logging.INFO,
              f"machine {topology.name} sums its gradients by OSDI'20's rule: for what its links allow best {MISSING}")
        return plain(topology, rule(topology), traffic)
    _tell(logging.INFO, f"machine {topology.name} sums its gradients as {given.by} says")
    return solve_forced(topology, given, traffic, direct)


def solve_forced(topology: Topology, given: ForcedStrategy, traffic: Traffic = OWN, direct: Collection[GpuNicPair] = ()) -> Strategy:
    """Return the strategy of *given*, with the sockets that are best for it, if SciPy is there; else the nearest."""
    if can_solve():
        return choose(topology, traffic, [given.islands], given.roots, direct)
    return plain(topology, given, traffic)


def forced(topology: Topology, settings: Settings) -> ForcedStrategy | None:
    """Return what *settings* force of the strategy, None if nothing: then, too, where there are no GPUs.

    As in BytePS a switch size that does not divide the GPUs is ignored with a warning, and roots add up all GPUs; local
    ranks are GPUs in their order.

    Raises
    ------
    ConfigError
        A root is no GPU of this machine, or roots and a switch size exclude each other.
    """
    gpus = tuple(part.name for part in topology.of(PartKind.GPU))
    size = settings.pcie_switch_size
    if not gpus or not (size or settings.reduce_roots):
        return None
    if size and len(gpus) % size:
        _tell(logging.WARNING, f"BPSFAST_PCIE_SWITCH_SIZE = {size} (or BYTEPS_PCIE_SWITCH_SIZE) is ignored: the "
                               f"{len(gpus)} GPUs of machine {topology.name} are no multiple of it")
        size = 0
    if settings.reduce_roots:
        if size and size < len(gpus):
            raise ConfigError(f"BPSFAST_REDUCE_ROOTS = {settings.reduce_roots} and BPSFAST_PCIE_SWITCH_SIZE = {size} "
                              f"(or BYTEPS_REDUCE_ROOTS, BYTEPS_PCIE_SWITCH_SIZE) exclude each other: roots add all "
                              f"{len(gpus)} GPUs up, a switch size below that lets memory add; set one of them")
        ranks = sorted({int(rank) for rank in settings.reduce_roots.split(",")})
        if ranks[-1] >= len(gpus):
            raise ConfigError(f"BPSFAST_REDUCE_ROOTS = {settings.reduce_roots} (or BYTEPS_REDUCE_ROOTS): there is no "
                              f"local rank {ranks[-1]} on machine {topology.name}, whose {len(gpus)} GPUs have the "
                              f"ranks 0 to {len(gpus) - 1}")
        return ForcedStrategy((gpus,), tuple(gpus[rank] for rank in ranks), f"reduce_roots = {settings.reduce_roots}")
    return ForcedStrategy(islands_by_size(topology, size), gpus, f"pcie_switch_size = {size}") if size else None


def _tell(level: int, text: str) -> None:
    if text not in _told:
        _told.add(text)
        _log.log(level, "%s", text)
