"""What nodes have said to a scheduler that knows nothing, and what follows from each account alone. Pure."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .. import messages as m
from ..job.admission import process_of


@dataclass
class NodeReport:
    """What one node has said; `join`: it was never welcomed, and knows nothing."""

    rejoin: m.Rejoin
    units: dict[int, m.UnitPlan] = field(default_factory=dict)
    later: list[m.Message] = field(default_factory=list)
    left: set[int] = field(default_factory=set)  # ranks of its own
    is_complete: bool = False
    join: m.Join | None = None

    @property
    def index(self) -> int:
        """The node's."""
        return self.rejoin.index

    @property
    def ranks(self) -> tuple[int, ...]:
        """The node's."""
        return self.rejoin.nodes[self.rejoin.index].ranks


class NodeReports:
    """One account of each node, by the identity that it comes from. *nodes*: all that are known before the first.

    Thousands of nodes may speak at once, so what all of them together say is kept as they speak: to look at it takes no
    loop over all accounts.
    """

    def __init__(self, nodes: tuple[m.NodeInfo, ...] = ()) -> None:
        self._by_sender: dict[bytes, NodeReport] = {}
        self._sender_of: dict[int, bytes] = {}
        self._late: set[int] = set()
        #: Indices of those who have said all.
        self.complete: set[int] = set()
        #: All nodes that somebody knows: helpers are not told of others that come late.
        self.nodes: tuple[m.NodeInfo, ...] = ()
        self.workers: set[int] = set()
        self.lost: set[int] = set()
        self.joining: set[int] = set()
        self.farewells: set[int] = set()
        #: Helpers that a node with ranks calls lost.
        self.called: set[int] = set()
        self._seats: dict[tuple[str, int, str], int] = {}
        self._know(nodes)

    def __iter__(self) -> Iterator[tuple[bytes, NodeReport]]:
        return iter(self._by_sender.items())

    def __len__(self) -> int:
        return len(self._by_sender)

    def get(self, sender: bytes) -> NodeReport | None:
        """Return what *sender* has said so far."""
        return self._by_sender.get(sender)

    def sender_of(self, index: int) -> bytes | None:
        """Return from where node *index* speaks."""
        return self._sender_of.get(index)

    @property
    def indices(self) -> set[int]:
        """The nodes that have begun to speak."""
        return set(self._sender_of)

    def find_node(self, join: m.Join) -> int | None:
        """Return the index of the node that has sent *join*, if it is one of those that somebody knows."""
        return self._seats.get(process_of(join))

    def begin(self, sender: bytes, account: NodeReport) -> None:
        """Take *account* in place of what *sender*, or its node, has said before."""
        for other in (sender, self._sender_of.get(account.index)):
            if other is not None:
                self.drop(other)
        self._by_sender[sender] = account
        self._sender_of[account.index] = sender
        self._count(account)

    def drop(self, sender: bytes) -> None:
        """Forget *sender*, but not what it has said of others: that stays true, except who was still to come."""
        account = self._by_sender.pop(sender, None)
        if account is None:
            return
        del self._sender_of[account.index]
        self.complete.discard(account.index)
        self._late.discard(account.index)
        if account.rejoin.joining:
            self.joining = {index for each in self._by_sender.values() for index in each.rejoin.joining}

    def enter(self, account: NodeReport, message: m.Message) -> None:
        """Add *message* to *account*."""
        if isinstance(message, m.Kept):
            account.units |= {unit.unit: unit for unit in message.units}
            return
        if isinstance(message, m.Recounted):
            account.is_complete = True
        else:
            account.later.append(message)
        self._note(account, message)

    def _count(self, account: NodeReport) -> None:
        rejoin = account.rejoin
        self._know(rejoin.nodes)
        self.lost.update(rejoin.lost)
        self.joining.update(rejoin.joining)
        self.farewells.update(rejoin.farewells)
        if rejoin.is_late:
            self._late.add(account.index)
        if account.is_complete:
            self.complete.add(account.index)
        for message in account.later:
            self._note(account, message)

    def _know(self, nodes: tuple[m.NodeInfo, ...]) -> None:
        if len(nodes) > len(self.nodes):
            self.nodes = nodes
            self.workers = {node.index for node in nodes if node.ranks}
            self._seats = {process_of(node): node.index for node in nodes}

    def _note(self, account: NodeReport, message: m.Message) -> None:
        """Keep what *message* says of others, or of the node as a whole."""
        if isinstance(message, m.Recounted):
            self.complete.add(account.index)
        elif isinstance(message, m.RankLeft):
            account.left.add(message.rank)
        elif isinstance(message, m.Lost) and account.ranks:
            kind, _, number = message.who.partition(" ")
            if kind == "node" and number.isdecimal():
                self.called.add(int(number))

    @property
    def left_behind(self) -> set[int]:
        """The nodes that were coming late, of whose share nothing was committed: they have to come anew."""
        late = [self._by_sender[self._sender_of[index]].rejoin for index in self._late & self.complete]
        if not late:
            return self.joining
        latest = max(each.rejoin.committed for each in self._by_sender.values() if each.is_complete)
        return self.joining | {each.index for each in late if not each.committed and each.prepared != latest}
