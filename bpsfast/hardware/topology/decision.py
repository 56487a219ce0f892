"""Decides how a machine sums its GPUs' gradients: as settings force, else the best way, else OSDI'20's; reports it."""
from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ...base.settings import Settings
from ...orchestration.errors import ConfigError
from .copies import GpuNicPair, direct_pairs, enabled_pairs, gpu_nic_pairs, refusal_reasons
from .graph import PartKind, Topology
from .linear_program import MISSING, can_solve
from .loads import OWN_GRADIENTS, Loads, Traffic
from .strategy_solver import (
    ForcedStrategy,
    Strategy,
    choose,
    islands_by_size,
    lower_bound,
    nearest_socket_strategy,
    paper_grouping,
    paper_rule,
)

_log = logging.getLogger("bpsfast.hardware.topology")
_logged: set[str] = set()


def strategy_of(topology: Topology, settings: Settings, traffic: Traffic = OWN_GRADIENTS) -> Strategy:
    """Return the strategy of *topology* and log once where it comes from. SciPy is optional.

    Raises `ConfigError` if a setting asks for something that the machine does not have, or a GPU has no path to memory.
    """
    given, direct = forced(topology, settings), enabled_pairs(topology, settings)
    if direct and not can_solve():
        _log_once(logging.WARNING, "BPSFAST_GPU_DIRECT is on, but what goes directly to cards cannot be computed: "
                                   f"{MISSING}")
    if given is None and can_solve():
        _log_once(logging.INFO, f"machine {topology.name} sums its gradients by the best strategy for its links")
        return choose(topology, traffic, direct=direct)
    if given is None:
        _log_once(logging.WARNING if topology.of(PartKind.GPU) else logging.INFO,
                  f"machine {topology.name} sums its gradients by OSDI'20's rule; for the best strategy {MISSING}")
        return nearest_socket_strategy(topology, paper_grouping(topology), traffic)
    _log_once(logging.INFO, f"machine {topology.name} sums its gradients as {given.by} asks")
    return solve_forced(topology, given, traffic, direct)


def solve_forced(topology: Topology, given: ForcedStrategy, traffic: Traffic = OWN_GRADIENTS,
                 direct: Collection[GpuNicPair] = ()) -> Strategy:
    """Return the strategy of *given* with the best sockets, or without SciPy with the nearest ones."""
    if can_solve():
        return choose(topology, traffic, [given.islands], given.roots, direct)
    return nearest_socket_strategy(topology, given, traffic)


def forced(topology: Topology, settings: Settings) -> ForcedStrategy | None:
    """Return the strategy that *settings* force; None if they force nothing or there are no GPUs.

    As in BytePS, a switch size that does not divide the number of GPUs is ignored with a warning, and roots sum all
    GPUs. Local ranks are GPUs in their order. Raises `ConfigError` if a root is not a GPU of this machine, or roots and
    a switch size contradict each other.
    """
    gpus = tuple(part.name for part in topology.of(PartKind.GPU))
    size = settings.pcie_switch_size
    if not gpus or not (size or settings.reduce_roots):
        return None
    if size and len(gpus) % size:
        _log_once(logging.WARNING, f"BPSFAST_PCIE_SWITCH_SIZE = {size} (or BYTEPS_PCIE_SWITCH_SIZE) is ignored: the "
                               f"{len(gpus)} GPUs of machine {topology.name} are no multiple of it")
        size = 0
    if settings.reduce_roots:
        if size and size < len(gpus):
            raise ConfigError(f"BPSFAST_REDUCE_ROOTS = {settings.reduce_roots} and BPSFAST_PCIE_SWITCH_SIZE = {size} "
                              f"(or BYTEPS_REDUCE_ROOTS, BYTEPS_PCIE_SWITCH_SIZE) contradict each other: "
                              f"roots sum all {len(gpus)} GPUs, with a smaller size memory sums; set one of them")
        ranks = sorted({int(rank) for rank in settings.reduce_roots.split(",")})
        if ranks[-1] >= len(gpus):
            raise ConfigError(f"BPSFAST_REDUCE_ROOTS = {settings.reduce_roots} (or BYTEPS_REDUCE_ROOTS): there is no "
                              f"local rank {ranks[-1]} on machine {topology.name}, whose {len(gpus)} GPUs have the "
                              f"ranks 0 to {len(gpus) - 1}")
        return ForcedStrategy((gpus,), tuple(gpus[rank] for rank in ranks), f"reduce_roots = {settings.reduce_roots}")
    return ForcedStrategy(islands_by_size(topology, size), gpus, f"pcie_switch_size = {size}") if size else None


def _log_once(level: int, text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        _log.log(level, "%s", text)


#: The number of busiest links and cards that are shown.
_N_BUSIEST_SHOWN = 5


@dataclass(frozen=True)
class StrategyReport:
    """The strategy of the machine *topology* that sums *service* sizes of a gradient for others.

    `forced`: the strategy that the setting `forced_by` forces, None if there is none. `is_direct`: may GPUs send
    directly to cards.
    """

    topology: Topology
    service: float
    bound: Loads
    chosen: Strategy
    rule: Strategy
    forced: Strategy | None = None
    forced_by: str = ""
    is_direct: bool = False

    def lines(self) -> list[str]:
        """Return the report as text for people."""
        return [f"{self.topology.name}: a gradient, in and out, and {self.service:g} of its size summed for others", "",
                *self.chosen.lines(), "",
                f"{_ms(self.chosen.loads.time)} for each GB of gradient; at least {_ms(self.bound.time)} with any "
                f"strategy, {_ms(self.rule.loads.time)} with the paper's rule", "",
                *self._forced_lines(),
                "Busiest, in sizes of the gradient per direction:",
                *(f"  {name}: {load:.3g}, {_ms(time)}" for time, name, load in self.busiest()),
                *self._direct_lines()]

    def _forced_lines(self) -> list[str]:
        if self.forced is None:
            return []
        slower = self.forced.loads.time / self.chosen.loads.time - 1
        return [f"But forced by {self.forced_by}:", "", *self.forced.lines(), "",
                f"{_ms(self.forced.loads.time)} for each GB of gradient, {100 * slower:.1f} % more", ""]

    def _direct_lines(self) -> list[str]:
        able: dict[str, list[str]] = {}
        for pair in direct_pairs(self.topology):
            able.setdefault(pair.gpu, []).append(pair.card)
        answers = {**{gpu: f"can, to {', '.join(cards)}" for gpu, cards in able.items()},
                   **{gpu: f"cannot: {reason}" for gpu, reason in refusal_reasons(self.topology)}}
        head = f"Directly to a network card (gpu_direct, {'on' if self.is_direct else 'off'}; never measured):"
        gpus = [f"  {part.name} {answers[part.name]}" for part in self.topology.of(PartKind.GPU)] if answers else []
        return ["", head, *gpus] if gpus else []

    def busiest(self) -> list[tuple[float, str, float]]:
        """Return the slowest links and cards of the strategy in effect: seconds for each gradient byte, name, load.
        """
        loads = (self.forced or self.chosen).loads
        found = [(load / link.rate_bytes, f"{link.a} - {link.b}", load) for link, load in loads.links.items() if load]
        for name, load in loads.cards.items():
            rate = self.topology.part(name).wire_rate_bytes
            if rate:
                found.append((load / rate, f"{name} on the wire", load))
        return sorted(found, reverse=True)[:_N_BUSIEST_SHOWN]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as data; times are seconds for each byte of the gradient."""
        return {"machine": self.topology.name, "service": self.service, "seconds_per_byte": self.chosen.loads.time,
                "bound_seconds_per_byte": self.bound.time, "rule_seconds_per_byte": self.rule.loads.time,
                "ways": _ways(self.chosen),
                "forced": None if self.forced is None else {
                    "by": self.forced_by, "seconds_per_byte": self.forced.loads.time, "ways": _ways(self.forced)},
                "links": [{"a": link.a, "b": link.b, "kind": link.kind.value, "load": load}
                          for link, load in self.chosen.loads.links.items()],
                "cards": self.chosen.loads.cards,
                "gpu_direct": {"on": self.is_direct,
                               "pairs": [pair._asdict() for pair in gpu_nic_pairs(self.topology)]}}


def report_strategy(topology: Topology, service: float = 0.0, settings: Settings | None = None) -> StrategyReport:
    """Return a report of the best strategy and of the one that *settings* force.

    Raises `ConfigError` if SciPy is missing, GPUs have no path to memory, or settings ask for unknown GPUs.
    """
    traffic, settings = Traffic(service=service), settings or Settings()
    given, direct = forced(topology, settings), enabled_pairs(topology, settings)
    return StrategyReport(topology, service, lower_bound(topology, traffic, direct),
                          choose(topology, traffic, direct=direct), paper_rule(topology, traffic),
                          solve_forced(topology, given, traffic, direct) if given else None,
                          given.by if given else "", bool(direct))


def _ways(strategy: Strategy) -> list[dict[str, Any]]:
    return [{"share": way.share, "islands": way.islands,
             "copied": [{"root": root, "card" if end in strategy.loads.cards else "socket": end, "part": part}
                        for (root, end), part in way.copied.items()]} for way in strategy.ways]


def _ms(seconds_per_byte: float) -> str:
    return f"{seconds_per_byte * 1e12:.3g} ms"
