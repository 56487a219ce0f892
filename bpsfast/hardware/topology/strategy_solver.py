"""Finds strategies by which a machine sums its GPUs' gradients: the best one, OSDI'20's, a simple one; a lower bound.

In each share of a strategy the GPUs of an island first sum among themselves, each root its part; roots copy their parts
to a socket's memory; CPUs sum what the islands left there; one socket's sum is sent. Results go back the same way. With
islands of one GPU everything is copied; one island for each PCIe switch is OSDI'20's CPU-assisted aggregation; one
island over NVLink with chosen roots is its strategy for NVLink machines. With GPUDirect a root of an
island of all GPUs may copy to a card instead of to memory.

`choose` finds the best shares, roots, sockets and cards by a linear program. `nearest_socket_strategy` needs no solver.

`lower_bound` is a linear program over every copy, in which each GPU's part is a flow of its own. Where parts of several
GPUs meet they are summed and continue as one, so a copy is as large as the largest flow through it, not their sum. For
sums made at any part of the machine this is a lower bound (Edmonds' branchings; OSDI'20 section 4.1 finds it by hand).
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...orchestration.errors import ConfigError
from .copies import Copy, GpuNicPair, copies, islands_of, socket_of, switch_of
from .graph import PartKind, Topology
from .linear_program import LinearProgram
from .loads import OWN_GRADIENTS, TIME, LinkLoads, Loads, Terms, Traffic, reduce_to

#: A share below this is a rounding error.
NOTHING = 1e-7


@dataclass(frozen=True)
class StrategyShare:
    """A `share` of the gradient, and `copied`: the part of the share from each root to each socket or card."""

    share: float
    islands: tuple[tuple[str, ...], ...]
    copied: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def roots(self) -> dict[str, float]:
        """Return each root's part of the share; the parts of one island's roots add up to 1."""
        parts: dict[str, float] = {}
        for (root, _), part in self.copied.items():
            parts[root] = parts.get(root, 0.0) + part
        return parts


@dataclass(frozen=True)
class Strategy:
    """The shares (`ways`) of one machine, the largest first, and their loads."""

    ways: tuple[StrategyShare, ...]
    loads: Loads

    def lines(self) -> list[str]:
        """Return the strategy as text for people."""
        lines = []
        for way in self.ways:
            joined = [island for island in way.islands if len(island) > 1]
            groups = " and in ".join(f"{{{', '.join(island)}}}" for island in joined)
            how = f"summed in {groups}" if joined else "by each for itself"
            copied = ", ".join(f"{part:.0%} from {root} {'directly ' if end in self.loads.cards else ''}to {end}"
                               for (root, end), part in way.copied.items() if root != end)
            lines.append(f"{way.share:.1%} of the gradient: {how}; {copied or 'added in memory, where it is'}")
        return lines


Islands = tuple[tuple[str, ...], ...]


class ForcedStrategy(NamedTuple):
    """Islands, and the GPUs that share each island's copies. `by`: the setting that forces them."""

    islands: Islands
    roots: tuple[str, ...]
    by: str = ""


def choose(topology: Topology, traffic: Traffic = OWN_GRADIENTS, islands: Sequence[Islands] = (),
           roots: Collection[str] = (), direct: Collection[GpuNicPair] = ()) -> Strategy:
    """Return the fastest strategy, of these the one that loads links least.

    *islands*: groupings to choose from; by default each GPU alone, by PCIe switch, and by NVLink. *roots*: GPUs that
    equally share each island's copies to memory; an island without any of them uses all of its GPUs. By default each
    GPU copies as much as is best. *direct*: which roots may send directly to which cards, if all GPUs are one island;
    otherwise memory has to sum. Raises `ConfigError` if SciPy is missing; *islands* or *roots* name unknown GPUs; a GPU
    has no path to memory.
    """
    _check(topology, islands, roots)
    program = LinearProgram()
    budget = LinkLoads(topology, traffic)
    sent = budget.send(program, direct)
    groupings = list(dict.fromkeys(islands or default_groupings(topology)))
    program.equal({("share", number): 1.0 for number in range(len(groupings))}, 1.0)
    for number, grouping in enumerate(groupings):
        _add(program, budget, number, grouping, roots, sent)
    for sender, terms in sent.items():
        program.equal({**terms, **{("at", number, sender): -1.0 for number in range(len(groupings))}}, 0.0)
    total = budget.limit(program)
    values = program.least({TIME: 1.0}, total)
    ways = []
    for number, grouping in enumerate(groupings):
        share = values["share", number]
        if share > NOTHING:
            copied = {(key[2], key[3]): value / share for key, value in values.items()
                      if isinstance(key, tuple) and key[:2] == ("copied", number) and value > NOTHING * share}
            ways.append(StrategyShare(share, grouping, _with_cards(copied, direct, values)))
    return Strategy(tuple(sorted(ways, key=lambda way: -way.share)), budget.loads(values))


def default_groupings(topology: Topology) -> Iterator[Islands]:
    """Yield the groupings to consider; a machine without GPUs has its sockets instead."""
    if not topology.of(PartKind.GPU):
        yield tuple((part.name,) for part in topology.of(PartKind.SOCKET))
        return
    yield islands_of(topology)
    yield islands_of(topology, PartKind.SWITCH)
    yield islands_of(topology, PartKind.NVSWITCH)


def paper_rule(topology: Topology, traffic: Traffic = OWN_GRADIENTS) -> Strategy:
    """Return the strategy of OSDI'20 section 4: its `paper_grouping` with the best sockets."""
    given = paper_grouping(topology)
    return choose(topology, traffic, [given.islands], given.roots)


def paper_grouping(topology: Topology) -> ForcedStrategy:
    """Return the paper's general rule by S_n and S_g: switches with GPUs, with and without a card.

    With NVLink and both kinds of switches, roots are the GPUs below switches without a card, preferably at a card's
    socket; otherwise all GPUs. Without NVLink each switch is an island.
    """
    gpus = tuple(part.name for part in topology.of(PartKind.GPU))
    by_nvlink = islands_of(topology, PartKind.NVSWITCH)
    if all(len(island) == 1 for island in by_nvlink):
        return ForcedStrategy(islands_of(topology, PartKind.SWITCH) or next(default_groupings(topology)), gpus)
    cards = [part.name for part in topology.of(PartKind.NIC)]
    burdened = {switch_of(topology, card) for card in cards} - {None}
    free = tuple(gpu for gpu in gpus if switch_of(topology, gpu) not in burdened)
    near = {socket_of(topology, card) for card in cards}
    roots = tuple(gpu for gpu in free if socket_of(topology, gpu) in near) or free or gpus
    return ForcedStrategy(by_nvlink, roots if len(free) < len(gpus) else gpus)


def islands_by_size(topology: Topology, n_gpus: int) -> Islands:
    """Return islands of *n_gpus* consecutive GPUs, as BYTEPS_PCIE_SWITCH_SIZE asks for."""
    gpus = [part.name for part in topology.of(PartKind.GPU)]
    if n_gpus < 1 or len(gpus) % n_gpus:
        raise ConfigError(f"BYTEPS_PCIE_SWITCH_SIZE={n_gpus}: this machine's {len(gpus)} GPUs are no multiple of that")
    return tuple(tuple(gpus[begin:begin + n_gpus]) for begin in range(0, len(gpus), n_gpus))


def _check(topology: Topology, islands: Sequence[Islands], roots: Collection[str]) -> None:
    gpus = {part.name for part in topology.of(PartKind.GPU)}
    strange = set(roots) - gpus
    if strange:
        raise ConfigError(f"{', '.join(sorted(strange))} cannot be a root: machine {topology.name} has the GPUs "
                          f"{', '.join(sorted(gpus)) or '(none)'}")
    for grouping in islands:
        members = sorted(name for island in grouping for name in island)
        if gpus and members != sorted(gpus):
            raise ConfigError(f"the islands {grouping} do not hold each GPU of machine {topology.name} once")


def _with_cards(copied: dict[tuple[str, str], float], direct: Collection[GpuNicPair],
                values: Mapping[Hashable, float]) -> dict[tuple[str, str], float]:
    """Return *copied* with the cards that GPUs send directly to, in place of copies of a GPU to itself."""
    found = {}
    for (root, end), part in copied.items():
        cards = {pair.card: values["direct", pair.gpu, pair.card] for pair in direct if root == end == pair.gpu}
        for card, value in cards.items():
            if value > NOTHING:
                found[root, card] = part * value / sum(cards.values())
        if not cards:
            found[root, end] = part
    return found


def _add(program: LinearProgram, budget: LinkLoads, number: int, grouping: Islands, roots: Collection[str],
         sent: dict[str, Terms]) -> None:
    """Add one grouping to *program*: from GPUs to roots, to sockets, and to the socket (or GPU) that sends.

    All islands must have the same amount at each sender, so that no GPU sends sums that only memory can make.
    """
    share = "share", number
    known = copies(budget.topology)
    moves = [copy for copy in known if copy.begin in budget.sockets and copy.end in budget.sockets]
    for place, island in enumerate(grouping):
        balances: dict[str, Terms] = {sender: defaultdict(float) for sender in sent}
        chosen = [gpu for gpu in island if gpu in roots] or list(island)
        all_copied: Terms = {share: -1.0}
        for root in chosen:
            copied: Terms = {}
            to_memory = [copy for copy in known if copy.begin == root and copy.end in budget.sockets
                         and root not in budget.sockets]
            there = [Copy(root, root, ())] if root in sent else []
            for copy in [*to_memory, *there]:
                variable = "copied", number, root, copy.end
                if copy.links:
                    budget.carry(copy, variable)
                reduce_to(budget, island, root, variable)
                balances[copy.end][variable] += 1.0
                copied[variable] = 1.0
            if not copied:
                raise ConfigError(f"no path leads from {root} to a socket's memory in machine {budget.topology.name}")
            if roots:
                program.equal({**copied, share: -1.0 / len(chosen)}, 0.0)
            all_copied |= copied
        program.equal(all_copied, 0.0)
        for index, copy in enumerate(moves):
            flow = "flow", number, place, index
            program.at_most({flow: 1.0, ("move", number, index): -1.0}, 0.0)
            balances[copy.begin][flow] -= 1.0
            balances[copy.end][flow] += 1.0
        for sender, terms in balances.items():
            program.equal({**terms, ("at", number, sender): -1.0}, 0.0)
    for index, copy in enumerate(moves):
        budget.carry(copy, ("move", number, index))


def lower_bound(topology: Topology, traffic: Traffic = OWN_GRADIENTS, direct: Collection[GpuNicPair] = ()) -> Loads:
    """Return the loads of the fastest use of *topology*'s links, of these the one that copies least.

    *direct*: which GPUs may send directly to which cards. Raises `ConfigError` if SciPy is missing, or if GPUs have no
    path to a socket.
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


#: Less than this part of a gradient is a rounding error.
_NOTHING = 1e-9


def nearest_socket_strategy(topology: Topology, given: ForcedStrategy, traffic: Traffic = OWN_GRADIENTS) -> Strategy:
    """Return the strategy of *given* without a solver: roots copy equal parts to the nearest socket.

    It is never faster than `choose`. Raises `ConfigError` if a GPU has no path to memory, or memory none to a card.
    """
    budget = LinkLoads(topology, traffic)
    sent = budget.send(LinearProgram())
    values = _sent_by_cards(topology, sent)
    goal = {socket: sum(values.get(variable, 0.0) for variable in terms) for socket, terms in sent.items()}
    copied: dict[tuple[str, str], float] = {}
    moved: defaultdict[tuple[str, str], float] = defaultdict(float)
    for island in given.islands:
        roots = [gpu for gpu in island if gpu in given.roots] or list(island)
        held = dict.fromkeys(sent, 0.0)
        for root in roots:
            socket = root if root in sent else socket_of(topology, root)
            variable = "copied", root
            copied[root, socket] = values[variable] = 1.0 / len(roots)
            held[socket] += values[variable]
            if root != socket:
                budget.carry(Copy(root, socket, topology.path(root, socket)), variable)
            reduce_to(budget, island, root, variable)
        for ends, part in _moves(held, goal).items():  # parts of several islands are summed and move as one
            moved[ends] = max(moved[ends], part)
    for (begin, end), part in moved.items():
        values["move", begin, end] = part
        budget.carry(Copy(begin, end, topology.path(begin, end)), ("move", begin, end))
    return Strategy((StrategyShare(1.0, given.islands, copied),), budget.loads(values))


def _sent_by_cards(topology: Topology, sent: dict[str, dict[Hashable, float]]) -> dict[Hashable, float]:
    """Return the variables of `LinkLoads.send` if each card sends an equal part from its nearest socket's memory."""
    nearest = {}
    for card in topology.of(PartKind.NIC):
        paths = [(len(topology.path(socket, card.name)), socket) for socket in sent]
        near = [each for each in paths if each[0]]
        if near:
            nearest[card.name] = min(near)[1]
    if not nearest:
        return {("sum", min(sent)): 1.0}
    return {(kind, socket, card): 1.0 / len(nearest) for card, socket in nearest.items()
            for kind in ("worker", "service")}


def _moves(held: dict[str, float], goal: dict[str, float]) -> dict[tuple[str, str], float]:
    """Return the moves between sockets that turn *held* into *goal*."""
    moves = {}
    over = {socket: held[socket] - goal[socket] for socket in held}
    for begin, end in ((begin, end) for begin in over for end in over):
        part = min(over[begin], -over[end])
        if part > _NOTHING:
            moves[begin, end] = part
            over[begin] -= part
            over[end] += part
    return moves
