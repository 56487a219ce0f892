"""The admitted nodes: whose message is it, whose rank is it, and what people call them. Pure."""
from __future__ import annotations

from collections.abc import Collection, Sequence

from .messages import Message, NodeInfo, Outgoing


class Roster:
    """All nodes in node order with the identities they send from. Who is lost keeps its index, for good.

    `joining`: those that come late and do not take part yet.
    """

    def __init__(self, entries: Sequence[tuple[bytes, NodeInfo]]) -> None:
        self.senders = [sender for sender, _ in entries]
        self.nodes = tuple(node for _, node in entries)
        self.size = sum(len(node.ranks) for node in self.nodes)
        self.lost: set[int] = set()
        self.joining: set[int] = set()
        self._index_of = {sender: index for index, sender in enumerate(self.senders)}
        self._node_of_rank = {rank: node.index for node in self.nodes for rank in node.ranks}

    def add(self, sender: bytes, node: NodeInfo) -> None:
        """Give *node*, which has no ranks and is the next one by its index, its place: it is `joining`."""
        self.senders.append(sender)
        self.nodes += (node,)
        self._index_of[sender] = node.index
        self.joining.add(node.index)

    def knows(self, sender: bytes) -> bool:
        """Whether *sender* has, or had, a place."""
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
        """Of those the ones with ranks."""
        return [index for index in self.alive if self.nodes[index].ranks]

    @property
    def alive_senders(self) -> list[bytes]:
        """The identities of the nodes that take part, in node order."""
        return [self.senders[index] for index in self.alive]

    def to_all(self, message: Message) -> Outgoing:
        """Address *message* to all nodes that take part."""
        return [(sender, message) for sender in self.alive_senders]

    def index_of(self, sender: bytes) -> int:
        """Return the node index of *sender*."""
        return self._index_of[sender]

    def node_of(self, rank: int) -> int:
        """Return the index of the node that *rank* belongs to, -1 if there is no such rank."""
        return self._node_of_rank.get(rank, -1)

    def senders_of(self, ranks: Sequence[int]) -> list[bytes]:
        """Return the nodes that *ranks* belong to, each once, in node order."""
        return [self.senders[index] for index in sorted({self._node_of_rank[rank] for rank in ranks})]

    def describe_node(self, index: int) -> str:
        """Name a node, see `describe_node`."""
        return describe_node(self.nodes, index)

    def describe_rank(self, rank: int) -> str:
        """Name a rank: "rank 3 (node 1, host b)"."""
        index = self.node_of(rank)
        return f"rank {rank} (node {index}, host {self.nodes[index].host})" if index >= 0 else f"rank {rank}"

    def describe(self, who: str) -> str:
        """Name *who*, given as "rank 3" or "node 1"; anything else is returned as it is."""
        kind, _, number = who.partition(" ")
        if number.isdecimal():
            if kind == "rank" and self.node_of(int(number)) >= 0:
                return self.describe_rank(int(number))
            if kind == "node" and int(number) < len(self.nodes):
                return self.describe_node(int(number))
        return who


def is_majority(heard: Collection[int], workers: Collection[int]) -> bool:
    """Whether a scheduler that hears nodes *heard* may decide: more than half of *workers*, all nodes with ranks.

    Or just half of them, with the first one: of two halves only one has that. The scheduler itself has no vote, for
    there may be one on each side.
    """
    n_heard = len(set(workers) & set(heard))
    return 2 * n_heard > len(workers) or (2 * n_heard == len(workers) and min(workers, default=-1) in heard)


def describe_node(nodes: Sequence[NodeInfo], index: int) -> str:
    """Name a node: "node 1 (host b, ranks 2, 3)" or "helper 0 (node 2, host c)"."""
    node = nodes[index]
    if not node.ranks:
        return f"helper {index - sum(bool(each.ranks) for each in nodes)} (node {index}, host {node.host})"
    ranks = ", ".join(map(str, node.ranks))
    return f"node {index} (host {node.host}, {'rank' if len(node.ranks) == 1 else 'ranks'} {ranks})"
