"""For `bench summation`: the cores and the memory traffic that servers need to keep up with a network card."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from bpsfast.bench.paper.summation.operations import FUSED, Row
from bpsfast.bench.paper.summation.updates import UPDATES

#: The card writes each incoming byte to memory, and reads as many outgoing bytes.
_CARD_TRAFFIC = 2.0


class Service(NamedTuple):
    """Cost of a server for gradients of *n_workers*, for each incoming bit: seconds of a core, and bits of memory
    traffic (including the card's)."""

    name: str
    core_s: float
    traffic: float

    def cores(self, line_bits: float) -> float:
        """Return how many cores it needs at this rate."""
        return self.core_s * line_bits


class Machine(NamedTuple):
    """Resources of a machine: cores, and bits of memory traffic per second."""

    n_cores: int
    memory_bits: float


def machine(rows: Sequence[Row]) -> Machine:
    """Return the machine's resources; its memory rate is the highest traffic of any operation on all cores."""
    n_cores = most(rows)
    return Machine(n_cores, max(row.bits * row.traffic for row in rows if row.n_threads == n_cores))


def services(rows: Sequence[Row], n_workers: int) -> list[Service]:
    """Return the summation service, and servers that also update parameters, once for *n_workers* gradients."""
    alone = {(row.operation, row.dtype): row for row in rows if row.n_threads == 1}
    total = alone[FUSED, "float32"]
    found = [Service("sum (bpsfast)", 1 / total.core_bits, total.traffic + _CARD_TRAFFIC)]
    for name in UPDATES:
        update = alone[name, "float32"]
        found.append(Service(f"sum + {name}", found[0].core_s + 1 / update.core_bits / n_workers,
                             found[0].traffic + update.traffic / n_workers))
    return found


def most(rows: Sequence[Row]) -> int:
    """Return the largest number of threads."""
    return max(row.n_threads for row in rows)


def limit(service: Service, line_bits: float, found: Machine) -> str:
    """Return the bottleneck at this rate: "memory", "cores", or "" if there is none."""
    if service.traffic * line_bits > found.memory_bits:
        return "memory"
    return "cores" if service.cores(line_bits) > found.n_cores else ""


def verdict(offered: Sequence[Service], line_bits: float, found: Machine) -> str:
    """Return a sentence about what a machine can do at this rate."""
    carried = [service.name for service in offered if not limit(service, line_bits, found)]
    own = offered[0]
    needs = (f"{line_bits / 1e9:g} Gbit/s: {_number(own.cores(line_bits))} cores, "
             f"{own.traffic * line_bits / 1e9:.0f} Gbit/s of memory for the sum")
    if len(carried) == len(offered):
        return f"{needs}: yes, and with any update"
    if own.name in carried:
        return f"{needs}: yes, but not with {', '.join(_others(offered, carried))}"
    return f"{needs}: no, {limit(own, line_bits, found)}"


def _others(offered: Sequence[Service], carried: Sequence[str]) -> list[str]:
    return [service.name.removeprefix("sum + ") for service in offered if service.name not in carried]


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{math.ceil(value)}"
