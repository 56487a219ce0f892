"""How a machine sums its GPUs' gradients: who adds in front of memory, which GPUs copy to which socket, and how much.

Each share of the gradient goes one `StrategyShare`: the GPUs of an island reduce among themselves, each root its part of the
share; roots copy their parts to a socket's memory; CPUs add what the islands have left there; one socket's sum is sent.
Results go back the mirrored way. Islands of one GPU copy everything: the plain way. One island for each PCIe switch:
OSDI'20's CPU-assisted aggregation. One over NVLink with chosen roots: its way for NVLink machines. With GPUDirect a
root of an island of all GPUs may copy to a card instead of to memory.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .loads import Loads

#: A share below this is what rounding has left of none.
NOTHING = 1e-7


@dataclass(frozen=True)
class StrategyShare:
    """One way: `share` of the gradient, and of that how much goes from each root to each socket, or to a card."""

    share: float
    islands: tuple[tuple[str, ...], ...]
    copied: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def roots(self) -> dict[str, float]:
        """Return the part of the way's share that each root has; those of an island's add up to 1."""
        parts: dict[str, float] = {}
        for (root, _), part in self.copied.items():
            parts[root] = parts.get(root, 0.0) + part
        return parts


@dataclass(frozen=True)
class Strategy:
    """All ways of one machine, the largest share first, and what they load."""

    ways: tuple[StrategyShare, ...]
    loads: Loads

    def lines(self) -> list[str]:
        """Return it in words, for people."""
        said = []
        for way in self.ways:
            joined = [island for island in way.islands if len(island) > 1]
            how = f"summed in {' and in '.join(map(_listed, joined))}" if joined else "by each for itself"
            copied = ", ".join(f"{part:.0%} from {root} {'straight ' if end in self.loads.cards else ''}to {end}"
                               for (root, end), part in way.copied.items() if root != end)
            said.append(f"{way.share:.1%} of the gradient: {how}; {copied or 'added in memory, where it is'}")
        return said


def _listed(names: Sequence[str]) -> str:
    return "{" + ", ".join(names) + "}"
