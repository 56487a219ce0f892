"""A strategy without a solver: islands and roots are given, and every copy goes to the nearest socket.

What `choice.choose` finds for the same islands and roots is as fast or faster: it has the sockets and cards to choose.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

from .copies import Copy, socket_of
from .graph import PartKind, Topology
from .linear_program import LinearProgram
from .loads import OWN, LinkLoads, Traffic
from .reduction import reduce_to
from .strategy import Strategy, StrategyShare
from .strategy_solver import ForcedStrategy

#: Less than this of a gradient is rounding.
_NOTHING = 1e-9


def plain(topology: Topology, given: ForcedStrategy, traffic: Traffic = OWN) -> Strategy:
    """Return the strategy of *given*: each root copies an equal part, each card sends an equal part.

    Raises `ConfigError` if a GPU has no way to memory, or memory none to a card.
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
        for ends, part in _moves(held, goal).items():  # where islands meet their parts are added and move as one
            moved[ends] = max(moved[ends], part)
    for (begin, end), part in moved.items():
        values["move", begin, end] = part
        budget.carry(Copy(begin, end, topology.path(begin, end)), ("move", begin, end))
    return Strategy((StrategyShare(1.0, given.islands, copied),), budget.loads(values))


def _sent_by_cards(topology: Topology, sent: dict[str, dict[Hashable, float]]) -> dict[Hashable, float]:
    """Return the variables of `LinkLoads.send` for cards that send equal parts, each of its nearest socket's memory."""
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
    """Return how much goes from which socket to which, so that what is *held* becomes the *goal*."""
    moves = {}
    over = {socket: held[socket] - goal[socket] for socket in held}
    for begin, end in ((begin, end) for begin in over for end in over):
        part = min(over[begin], -over[end])
        if part > _NOTHING:
            moves[begin, end] = part
            over[begin] -= part
            over[end] += part
    return moves
