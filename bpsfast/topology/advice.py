"""How a machine's gradients are best summed, beside what nothing can beat and what the paper's rule would do."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .budget import Loads, Traffic
from .choice import choose, paper_rule
from .graph import Topology
from .optimum import optimum
from .strategy import Strategy

#: So many of the busiest links and cards are shown.
_N_BUSIEST = 5


@dataclass(frozen=True)
class Advice:
    """The strategy of the machine *topology* that sums *service* sizes of a gradient for others."""

    topology: Topology
    service: float
    bound: Loads
    chosen: Strategy
    rule: Strategy

    def lines(self) -> list[str]:
        """Return it for people."""
        return [f"{self.topology.name}: a gradient, in and out, and {self.service:g} of its size summed for others", "",
                *self.chosen.lines(), "",
                f"{_ms(self.chosen.loads.time)} for each GB of gradient; at least {_ms(self.bound.time)} on any way, "
                f"{_ms(self.rule.loads.time)} by the rule of the paper", "",
                "Busiest, in sizes of the gradient per direction:",
                *(f"  {name}: {load:.3g}, {_ms(time)}" for time, name, load in self.busiest())]

    def busiest(self) -> list[tuple[float, str, float]]:
        """Return the links and cards that take longest: seconds for each byte of the gradient, name, load."""
        loads = self.chosen.loads
        found = [(load / link.rate_bytes, f"{link.a} - {link.b}", load) for link, load in loads.links.items() if load]
        for name, load in loads.cards.items():
            rate = self.topology.part(name).wire_rate_bytes
            if rate:
                found.append((load / rate, f"{name} on the wire", load))
        return sorted(found, reverse=True)[:_N_BUSIEST]

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs; times in seconds for each byte of the gradient."""
        return {"machine": self.topology.name, "service": self.service, "seconds_per_byte": self.chosen.loads.time,
                "bound_seconds_per_byte": self.bound.time, "rule_seconds_per_byte": self.rule.loads.time,
                "ways": [{"share": way.share, "islands": way.islands,
                          "copied": [{"root": root, "socket": socket, "part": part}
                                     for (root, socket), part in way.copied.items()]} for way in self.chosen.ways],
                "links": [{"a": link.a, "b": link.b, "kind": link.kind.value, "load": load}
                          for link, load in self.chosen.loads.links.items()],
                "cards": self.chosen.loads.cards}


def advise(topology: Topology, service: float = 0.0) -> Advice:
    """Return what is best; raises `ConfigError` if SciPy is missing, or if GPUs have no way to memory."""
    traffic = Traffic(service=service)
    return Advice(topology, service, optimum(topology, traffic), choose(topology, traffic),
                  paper_rule(topology, traffic))


def _ms(seconds_per_byte: float) -> str:
    return f"{seconds_per_byte * 1e12:.3g} ms"
