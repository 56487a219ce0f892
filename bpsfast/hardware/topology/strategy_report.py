"""How a machine's gradients are best summed, beside what nothing can beat, the paper's rule, and what is forced."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...base.settings import Settings
from .decision import forced, solve_forced
from .gpu_direct import nearest, pairs, possible, wished
from .graph import PartKind, Topology
from .loads import Loads, Traffic
from .lower_bound import optimum
from .strategy import Strategy
from .strategy_solver import choose, paper_rule

#: So many of the busiest links and cards are shown.
_N_BUSIEST_SHOWN = 5


@dataclass(frozen=True)
class StrategyReport:
    """The strategy of the machine *topology* that sums *service* sizes of a gradient for others.

    `forced`: what the settings `forced_by` make of it, None if they force nothing. `is_direct`: may GPUs send straight
    to cards.
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
        """Return it for people."""
        return [f"{self.topology.name}: a gradient, in and out, and {self.service:g} of its size summed for others", "",
                *self.chosen.lines(), "",
                f"{_ms(self.chosen.loads.time)} for each GB of gradient; at least {_ms(self.bound.time)} on any way, "
                f"{_ms(self.rule.loads.time)} by the rule of the paper", "",
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
        for pair in possible(self.topology):
            able.setdefault(pair.gpu, []).append(pair.card)
        told = {**{gpu: f"can, to {', '.join(cards)}" for gpu, cards in able.items()},
                **{gpu: f"cannot: {reason}" for gpu, reason in nearest(self.topology)}}
        head = f"Straight to a network card (gpu_direct, {'on' if self.is_direct else 'off'}; never measured):"
        return ["", head, *(f"  {part.name} {told[part.name]}" for part in self.topology.of(PartKind.GPU))] if told else []

    def busiest(self) -> list[tuple[float, str, float]]:
        """Return the links and cards that take longest: seconds for each byte of the gradient, name, load.

        Of what is forced, if something is.
        """
        loads = (self.forced or self.chosen).loads
        found = [(load / link.rate_bytes, f"{link.a} - {link.b}", load) for link, load in loads.links.items() if load]
        for name, load in loads.cards.items():
            rate = self.topology.part(name).wire_rate_bytes
            if rate:
                found.append((load / rate, f"{name} on the wire", load))
        return sorted(found, reverse=True)[:_N_BUSIEST_SHOWN]

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs; times in seconds for each byte of the gradient."""
        return {"machine": self.topology.name, "service": self.service, "seconds_per_byte": self.chosen.loads.time,
                "bound_seconds_per_byte": self.bound.time, "rule_seconds_per_byte": self.rule.loads.time,
                "ways": _ways(self.chosen),
                "forced": None if self.forced is None else {
                    "by": self.forced_by, "seconds_per_byte": self.forced.loads.time, "ways": _ways(self.forced)},
                "links": [{"a": link.a, "b": link.b, "kind": link.kind.value, "load": load}
                          for link, load in self.chosen.loads.links.items()],
                "cards": self.chosen.loads.cards,
                "gpu_direct": {"on": self.is_direct, "pairs": [pair._asdict() for pair in pairs(self.topology)]}}


def advise(topology: Topology, service: float = 0.0, settings: Settings | None = None) -> StrategyReport:
    """Return what is best, and what *settings* force.

    Raises `ConfigError` if SciPy is missing, GPUs have no way to memory, or settings ask for what the machine has not.
    """
    traffic, settings = Traffic(service=service), settings or Settings()
    given, direct = forced(topology, settings), wished(topology, settings)
    return StrategyReport(topology, service, optimum(topology, traffic, direct), choose(topology, traffic, direct=direct),
                  paper_rule(topology, traffic), solve_forced(topology, given, traffic, direct) if given else None,
                  given.by if given else "", bool(direct))


def _ways(strategy: Strategy) -> list[dict[str, Any]]:
    return [{"share": way.share, "islands": way.islands,
             "copied": [{"root": root, "card" if end in strategy.loads.cards else "socket": end, "part": part}
                        for (root, end), part in way.copied.items()]} for way in strategy.ways]


def _ms(seconds_per_byte: float) -> str:
    return f"{seconds_per_byte * 1e12:.3g} ms"
