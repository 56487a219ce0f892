"""The admitted nodes of a job: their connections, their ranks, and their names in messages. Pure."""
from __future__ import annotations

from collections.abc import Collection, Sequence

from .messages import Message, NodeInfo, Outgoing


class Roster:
    """All nodes in node order with the connections that they send from. A lost node keeps its index, a rank its number.

    `joining`: nodes that come late and do not take part yet. `lost_ranks`: those of lost nodes, and those that were
    lost alone. `size`: the number of ranks at the start.
    """

    def __init__(self, entries: Sequence[tuple[bytes, NodeInfo]]) -> None:
        self.senders = [sender for sender, _ in entries]
        self.nodes = tuple(node for _, node in entries)
        self.size = sum(len(node.ranks) for node in self.nodes)
        self.lost: set[int] = set()
        self.joining: set[int] = set()
        self.lost_ranks: set[int] = set()
        self._index_of = {sender: index for index, sender in enumerate(self.senders)}
        self._node_of_rank = {rank: node.index for node in self.nodes for rank in node.ranks}

    def add(self, sender: bytes, node: NodeInfo) -> None:
        """Add *node*, which has no ranks and the next index, as `joining`."""
        self.senders.append(sender)
        self.nodes += (node,)
        self._index_of[sender] = node.index
        self.joining.add(node.index)

    def knows(self, sender: bytes) -> bool:
        """Whether *sender* is, or was, the connection of a node."""
        return sender in self._index_of

    @property
    def absent(self) -> set[int]:
        """The nodes that take no part: lost ones, and those that do not yet."""
        return self.lost | self.joining

    @property
    def alive(self) -> list[int]:
        """The nodes that take part."""
        return [node.index for node in self.nodes if node.index not in self.absent]

    @property
    def workers(self) -> list[int]:
        """The nodes with ranks that take part."""
        return [index for index in self.alive if self.nodes[index].ranks]

    @property
    def ranks(self) -> list[int]:
        """The ranks that are not lost."""
        return [rank for rank in range(self.size) if rank not in self.lost_ranks]

    def left_on(self, index: int) -> list[int]:
        """Return the ranks of a node that are not lost."""
        return [rank for rank in self.nodes[index].ranks if rank not in self.lost_ranks]

    @property
    def alive_senders(self) -> list[bytes]:
        """The connections of the nodes that take part, in node order."""
        return [self.senders[index] for index in self.alive]

    def to_all(self, message: Message) -> Outgoing:
        """Address *message* to all nodes that take part."""
        return [(sender, message) for sender in self.alive_senders]

    def index_of(self, sender: bytes) -> int:
        """Return the node index of *sender*."""
        return self._index_of[sender]

    def node_of(self, rank: int) -> int:
        """Return the index of the node of *rank*, -1 if there is no such rank."""
        return self._node_of_rank.get(rank, -1)

    def senders_of(self, ranks: Sequence[int]) -> list[bytes]:
        """Return the connections of the nodes of *ranks*, each once, in node order."""
        return [self.senders[index] for index in sorted({self._node_of_rank[rank] for rank in ranks})]

    def describe_node(self, index: int) -> str:
        """Describe a node, see `describe_node`."""
        return describe_node(self.nodes, index)

    def describe_rank(self, rank: int) -> str:
        """Describe a rank: "rank 3 (node 1, host b)"."""
        index = self.node_of(rank)
        return f"rank {rank} (node {index}, host {self.nodes[index].host})" if index >= 0 else f"rank {rank}"

    def describe(self, who: str) -> str:
        """Describe *who*, given as "rank 3" or "node 1"; return anything else unchanged."""
        rank, node = number_of("rank", who), number_of("node", who)
        if self.node_of(rank) >= 0:
            return self.describe_rank(rank)
        return self.describe_node(node) if 0 <= node < len(self.nodes) else who


def number_of(kind: str, who: str) -> int:
    """Return the number of *who* if it is of *kind* ("rank" of "rank 3", "node" of "node 1"), else -1."""
    found, _, number = who.partition(" ")
    return int(number) if found == kind and number.isdecimal() else -1


def is_majority(heard: Collection[int], workers: Collection[int]) -> bool:
    """Whether a scheduler that hears nodes *heard* may decide: more than half of *workers*, all nodes with ranks.

    Or exactly half of them, with the first one, which only one of two halves has. The scheduler itself has no vote,
    because there may be one on each side of a network partition.
    """
    n_heard = len(set(workers) & set(heard))
    return 2 * n_heard > len(workers) or (2 * n_heard == len(workers) and min(workers, default=-1) in heard)


def may_decide(heard: Collection[int], voters: Collection[int], dead: Collection[int] = ()) -> bool:
    """Whether a scheduler that hears nodes *heard* may change a job for all.

    *voters*: the nodes with ranks of the last committed epoch, of which a majority must be heard. Or all others are
    proven *dead*: one of them that is dead does not count, because it may have been ready at another scheduler before.
    """
    return is_majority(heard, voters) or (bool(voters) and set(voters) <= {*heard, *dead})


def describe_node(nodes: Sequence[NodeInfo], index: int) -> str:
    """Describe a node: "node 1 (host b, ranks 2, 3)" or "helper 0 (node 2, host c)"."""
    node = nodes[index]
    if not node.ranks:
        return f"helper {index - sum(bool(each.ranks) for each in nodes)} (node {index}, host {node.host})"
    ranks = ", ".join(map(str, node.ranks))
    return f"node {index} (host {node.host}, {'rank' if len(node.ranks) == 1 else 'ranks'} {ranks})"
