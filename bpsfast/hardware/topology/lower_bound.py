"""What no use of a machine's links can beat: a linear program over every copy, each GPU's part a flow of its own.

Where parts of several GPUs meet they are added, and go on as one: a copy carries the most of what single parts it has,
not their sum. So each part is a flow from its GPU to where sums are sent from, and copies are as large as the largest
flow through them; the result takes the mirrored way. For sums that are put together at any part of the machine this is
a lower bound (Edmonds' branchings; OSDI'20 section 4.1 finds it by hand for one machine).
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from .copies import copies
from .gpu_direct import GpuNicPair
from .graph import PartKind, Topology
from .linear_program import LinearProgram
from .loads import OWN, TIME, LinkLoads, Loads, Terms, Traffic


def optimum(topology: Topology, traffic: Traffic = OWN, direct: Collection[GpuNicPair] = ()) -> Loads:
    """Return the loads of the fastest use of *topology*'s links, of these the one that moves least.

    *direct*: which GPUs may send straight to which cards.
    Raises `ConfigError` if SciPy is missing, or if GPUs have no way to a socket.
    """
    program = LinearProgram()
    budget = LinkLoads(topology, traffic)
    shares = budget.send(program, direct)
    sources = [part.name for part in topology.of(PartKind.GPU) or topology.of(PartKind.SOCKET)]
    places = [part.name for kind in (PartKind.GPU, PartKind.SOCKET) for part in topology.of(kind)]
    balances: dict[tuple[str, str], Terms] = {(source, place): defaultdict(float)
                                              for source in sources for place in places}
    for number, copy in enumerate(copies(topology)):
        budget.carry(copy, ("copy", number))
        for source in sources:
            flow = "flow", source, number
            program.at_most({flow: 1.0, ("copy", number): -1.0}, 0.0)
            balances[source, copy.begin][flow] += 1.0
            balances[source, copy.end][flow] -= 1.0
    for (source, place), terms in balances.items():
        for variable, factor in shares.get(place, {}).items():
            terms[variable] += factor
        program.equal(terms, 1.0 if source == place else 0.0)
    total = budget.limit(program)
    return budget.loads(program.least({TIME: 1.0}, total))
