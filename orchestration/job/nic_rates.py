"""The rates of the nodes' NICs, as they become known: some say theirs when they join, others measure it first."""
from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from .. import messages as m


class NicRates:
    """Of the nodes of one job; *nodes*: those of the start, one after the other. Owner thread only."""

    def __init__(self, nodes: Sequence[m.NodeInfo]) -> None:
        #: Bytes per second by node index, 0 where not known.
        self.rates = [node.nic_rate_bytes for node in nodes]
        #: The nodes that measure still.
        self.waiting = {node.index for node in nodes if node.probes}

    def resume(self, rates: Sequence[float], waiting: Collection[int]) -> None:
        """Go on where another scheduler has left off, which knew *rates*, and was *waiting* for those at most."""
        self.rates[:] = [*rates, *self.rates[len(rates):]]
        self.waiting &= set(waiting)

    def add(self, rate_bytes: float) -> None:
        """Take the next node, which comes late and has measured."""
        self.rates.append(rate_bytes)

    def measured(self, index: int, rate_bytes: float) -> bool:
        """Take a node's measurement; return False, and take nothing, if it was not to measure."""
        if index not in self.waiting:
            return False
        self.waiting.remove(index)
        self.rates[index] = rate_bytes
        return True

    def give_up(self, index: int) -> bool:
        """Wait no more for a node, which is lost; return whether it was waited for."""
        was_awaited = index in self.waiting
        self.waiting.discard(index)
        return was_awaited

    def known(self, nodes: Sequence[m.NodeInfo]) -> list[m.NodeInfo]:
        """Return *nodes* with the rates that are known of them."""
        return [msgspec.structs.replace(node, nic_rate_bytes=rate) for node, rate in zip(nodes, self.rates)]

    @property
    def message(self) -> m.Rates:
        """What nodes are told once all have measured."""
        return m.Rates(nic_rate_bytes=tuple(self.rates))
