"""How the GPUs of an island add up among themselves, and what that puts on links."""
from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

from .copies import Copy, between_gpus, islands_of
from .graph import Link, LinkKind, PartKind, Topology
from .loads import LinkLoads


def reduce_to(budget: LinkLoads, island: Sequence[str], root: str, variable: Hashable) -> None:
    """Let the GPUs of *island* add *variable* of the gradient up at *root*.

    Over NVLink as NCCL's rings do: each GPU sends and receives it all, over its links in proportion to their rates.
    Below a switch directly, which with many roots is a reduce-scatter. Elsewhere along NCCL's ring, GPU after GPU, over
    whatever leads there: so a switch's link is crossed once each way, not by every GPU.
    """
    topology = budget.topology
    nvlinks = _nvlinks(topology, island)
    if nvlinks:
        budget.fill(nvlinks, variable)
        return
    if any(set(island) <= set(each) for each in islands_of(topology, PartKind.SWITCH)):
        hops = [(gpu, root) for gpu in island if gpu != root]
    else:
        place = island.index(root) + 1
        hops = list(itertools.pairwise([*island[place:], *island[:place]]))
    for begin, end in hops:
        copy = next(between_gpus(topology, begin, end), None) or Copy(begin, end, topology.path(begin, end))
        budget.fill(dict.fromkeys(copy.links, 1.0), variable)


def _nvlinks(topology: Topology, island: Sequence[str]) -> dict[Link, float]:
    """Return the island's NVLinks with what each carries of a byte, {} if they do not join all of it."""
    if len(island) < 2 or not any(set(island) <= set(each) for each in islands_of(topology, PartKind.NVSWITCH)):
        return {}
    ends = {*island, *(part.name for part in topology.of(PartKind.NVSWITCH))}
    links = [link for link in topology.links if link.kind is LinkKind.NVLINK and {link.a, link.b} <= ends]
    of_gpu = {gpu: sum(link.rate_bytes for link in links if gpu in (link.a, link.b)) for gpu in island}
    return {link: 2.0 * link.rate_bytes / min(of_gpu[end] for end in (link.a, link.b) if end in of_gpu)
            for link in links if of_gpu.keys() & {link.a, link.b}}
