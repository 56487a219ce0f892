"""Merges the state of a job from what its nodes report after a loss of the scheduler. Pure.

At most one commit can have reached some nodes and not others, and then all nodes are prepared for it: it counts, and
the others get it. What no node has committed is dropped, and proposed anew because its declarations are repeated.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from .. import messages as m
from ..errors import ProtocolError, error_of
from ..job.admission import process_of
from ..job.recovery import JobSnapshot
from ..priority.send_queue import rank_parts
from ..roster import Roster, describe_node, is_majority, number_of


@dataclass
class NodeReport:
    """What one node has reported; `join`: it never had a `Welcome`, and knows nothing."""

    rejoin: m.Rejoin
    committed: list[tuple[m.UnitPlan, ...]] = field(default_factory=list)
    later: list[m.Message] = field(default_factory=list)
    left: set[int] = field(default_factory=set)  # ranks of its own
    is_complete: bool = False
    join: m.Join | None = None

    @property
    def n_units(self) -> int:
        """How many committed units it has reported."""
        return sum(map(len, self.committed))

    @property
    def index(self) -> int:
        """The node index."""
        return self.rejoin.index

    @property
    def ranks(self) -> tuple[int, ...]:
        """The node's ranks."""
        return self.rejoin.nodes[self.rejoin.index].ranks


class NodeReports:
    """One report of each node, by its connection. *nodes*: all that are known before the first report; of these are
    *lost* for certain.

    Thousands of nodes may report at once, so what follows from all of them is updated with each message, without a
    loop.
    """

    def __init__(self, nodes: tuple[m.NodeInfo, ...] = (), lost: Collection[int] = ()) -> None:
        #: What each connection has reported so far, and the connection of each node that has begun to report.
        self.by_sender: dict[bytes, NodeReport] = {}
        self.sender_of: dict[int, bytes] = {}
        self._late: set[int] = set()
        self._committed: dict[tuple[int, ...], list[tuple[m.UnitPlan, ...]]] = {}  # by the numbers of the units
        self._kept_ids: set[int] = set()  # of the lists in `_committed`
        #: Indices of the nodes whose report is complete.
        self.complete: set[int] = set()
        #: All nodes that any node knows: helpers are not told of others that come late.
        self.nodes: tuple[m.NodeInfo, ...] = ()
        self._with_ranks: set[int] = set()
        self._certainly_lost = frozenset(lost)
        self._settled_epoch, self._settled_lost = 0, frozenset[int]()  # of the last epoch that a node has committed
        self._voters = frozenset[int]()
        #: By epoch and the nodes called lost in it, which nodes report that.
        self._losses: dict[tuple[int, tuple[int, ...]], set[int]] = {}
        self._lost: frozenset[int] | None = None  # as `lost`, until it has to be found anew
        self._joining: dict[int, tuple[int, ...]] = {}  # by the node that reports it, if it is any
        self.nodes_left: set[int] = set()
        #: Helpers that a node with ranks calls lost.
        self.called_lost: set[int] = set()
        self._index_of: dict[tuple[str, int, str], int] = {}
        self._add_nodes(nodes)

    def find_node(self, join: m.Join) -> int | None:
        """Return the index of the node that has sent *join*, if some node knows it."""
        return self._index_of.get(process_of(join))

    def begin(self, sender: bytes, report: NodeReport) -> None:
        """Take *report* in place of what *sender*, or its node, has reported before."""
        for other in (sender, self.sender_of.get(report.index)):
            if other is not None:
                self.drop(other)
        self.by_sender[sender] = report
        self.sender_of[report.index] = sender
        self._losses.setdefault((report.rejoin.epoch, report.rejoin.lost), set()).add(report.index)
        self._lost = None
        self._count(report)

    def drop(self, sender: bytes) -> None:
        """Forget *sender*, but keep which epoch it has committed, and which ranks have left."""
        report = self.by_sender.pop(sender, None)
        if report is None:
            return
        del self.sender_of[report.index]
        self.complete.discard(report.index)
        self._late.discard(report.index)
        self._joining.pop(report.index, None)
        self._lost = None
        said = report.rejoin.epoch, report.rejoin.lost
        self._losses[said].discard(report.index)
        if not self._losses[said]:
            del self._losses[said]

    def enter(self, report: NodeReport, message: m.Message) -> None:
        """Add *message* to *report*."""
        if isinstance(message, m.CommittedUnits):
            report.committed.append(self._kept(message.units))
            return
        if isinstance(message, m.RejoinComplete):
            report.is_complete = True
        else:
            report.later.append(message)
        self._apply(report, message)

    def _kept(self, units: tuple[m.UnitPlan, ...]) -> tuple[m.UnitPlan, ...]:
        """Return *units* as an earlier node has reported them: nearly all report the same, and it is kept once."""
        if id(units) in self._kept_ids:
            return units
        alike = self._committed.setdefault(tuple(unit.unit for unit in units), [])
        known = next((each for each in alike if each == units), None)
        if known is None:
            alike.append(known := units)
            self._kept_ids.add(id(known))
        return known

    def _count(self, report: NodeReport) -> None:
        rejoin = report.rejoin
        self._add_nodes(rejoin.nodes)
        if report.ranks and rejoin.settled_epoch > self._settled_epoch:
            self._settled_epoch, self._settled_lost = rejoin.settled_epoch, frozenset(rejoin.settled_lost)
            self._voters = frozenset(self._with_ranks - self._settled_lost)
        if rejoin.joining:
            self._joining[report.index] = rejoin.joining
        self.nodes_left.update(rejoin.nodes_left)
        if rejoin.is_late:
            self._late.add(report.index)
        if report.is_complete:
            self.complete.add(report.index)
        for message in report.later:
            self._apply(report, message)

    def _add_nodes(self, nodes: tuple[m.NodeInfo, ...]) -> None:
        if len(nodes) > len(self.nodes):
            self.nodes = nodes
            self._lost = None
            self._with_ranks = {node.index for node in nodes if node.ranks}
            if self._settled_epoch:
                self._voters = frozenset(self._with_ranks - self._settled_lost)
            self._index_of = {process_of(node): node.index for node in nodes}

    def _apply(self, report: NodeReport, message: m.Message) -> None:
        """Keep what *message* says of other nodes, or of the node as a whole."""
        if isinstance(message, m.RejoinComplete):
            self.complete.add(report.index)
        elif isinstance(message, m.RankLeft):
            report.left.add(message.rank)
        elif isinstance(message, m.Lost) and report.ranks:
            if (node := number_of("node", message.who)) >= 0:
                self.called_lost.add(node)

    @property
    def settled_epoch(self) -> int:
        """The last epoch that a node has committed; 0: none has reported."""
        return self._settled_epoch

    @property
    def settled_lost(self) -> frozenset[int]:
        """The nodes that are lost for certain: a committed epoch is without them."""
        return self._certainly_lost | self._settled_lost

    @property
    def lost(self) -> frozenset[int]:
        """The nodes that the job goes on without, as far as the reports agree so far.

        A loss that is not committed counts if a node reports it that is not lost itself: it may have been ready for
        that epoch, which may be committed elsewhere. Reports of two schedulers' losses may exclude each other: then
        those count with which a majority goes on, or else those of the later epoch.
        """
        if self._lost is None:
            self._lost = self._find_lost()
        return self._lost

    def _find_lost(self) -> frozenset[int]:
        settled = self.settled_lost
        fresh = {said: frozenset(said[1]) - settled for said in self._losses}
        if not any(fresh.values()):
            return settled
        order = sorted(fresh, reverse=True)
        first_found: frozenset[int] | None = None
        for first in order:
            taken, lost = set[int](), set(settled)
            # Helpers last: one that has come late may know of losses that were never committed.
            for reporters in (self._with_ranks, self.sender_of.keys() - self._with_ranks):
                for said in (first, *(each for each in order if each != first)):
                    nodes = (self._losses[said] & reporters) - lost
                    if nodes and taken.isdisjoint(fresh[said]):
                        taken |= nodes
                        lost |= fresh[said]
            found = frozenset(lost | (self.sender_of.keys() - taken))
            if is_majority(taken, self._with_ranks - settled):
                return found
            first_found = first_found or found
        return first_found or settled

    @property
    def joining(self) -> set[int]:
        """The nodes that have come late, and do not take part yet."""
        return {index for said in self._joining.values() for index in said}

    @property
    def workers(self) -> set[int]:
        """The nodes with ranks that are not lost."""
        return self._with_ranks - self.lost

    @property
    def voters(self) -> frozenset[int]:
        """The nodes with ranks of the last epoch that a node has committed: a majority of them must report.

        Only nodes with ranks are asked, because a helper that came late may have been told of losses that were not
        committed.
        """
        return self._voters

    @property
    def lost_ranks(self) -> set[int]:
        """The ranks that some node calls lost which is not lost itself."""
        return {rank for report in self.by_sender.values() if report.index not in self.lost
                for rank in report.rejoin.lost_ranks}

    @property
    def left_behind(self) -> set[int]:
        """The late nodes of whose share nothing was committed: they have to join anew."""
        late = [self.by_sender[self.sender_of[index]].rejoin for index in self._late & self.complete - self.lost]
        if not late:
            return self.joining
        latest = max(each.rejoin.committed for each in self.by_sender.values()
                     if each.is_complete and each.index not in self.lost)
        return self.joining | {each.index for each in late if not each.committed and each.prepared != latest}


#: The most numbers that a scheduler may have given out and that no remaining node has heard of.
_MAX_UNHEARD = 1000


def merge_reports(nodes: Sequence[m.NodeInfo], reports: Mapping[int, NodeReport], senders: Mapping[int, bytes],
                  lost: Collection[int], absent: Sequence[int], voters: Collection[int] = (),
                  dead: Collection[int] = (), settled_epoch: int = 1) -> JobSnapshot:
    """Return the state in which the job of *nodes* continues.

    *reports* and *senders* are those of all nodes that take part, by index; *lost* were lost before, *absent* are by
    now. *voters*, *dead*: as in `may_decide`; *settled_epoch*: the epoch of *voters*. Raises
    `ProtocolError` if the reports contradict what schedulers do.
    """
    rejoins = {index: report.rejoin for index, report in reports.items()}
    latest = max(each.committed for each in rejoins.values())
    behind = {index for index, each in rejoins.items() if each.committed != latest}
    for index in behind:
        if rejoins[index].prepared != latest:
            raise ProtocolError(f"{describe_node(nodes, index)} has committed generation "
                                f"{rejoins[index].committed}, and is not prepared for {latest}, which others have "
                                "committed")
    # A late node knows only some units, but maybe those of the latest commit before the others do.
    whole = [index for index in reports if not rejoins[index].is_late]
    base = next((index for index in whole if index not in behind), whole[0])
    units_of = _units_of(reports)
    known = dict(units_of[base])
    if base in behind:
        known |= next(units_of[index] for index in reports if index not in behind)
    # Nodes that have committed and prepared the same are looked at once.
    have = {id(units_of[index]): units_of[index].keys() for index in whole if index not in behind}
    prepared = {(id(units_of[index]), rejoins[index].prepared_units): units_of[index].keys()
                | set(rejoins[index].prepared_units) for index in whole if index in behind}
    units = [unit for number, unit in known.items()
             if all(number in each for each in (*have.values(), *prepared.values()))]
    numbers = {unit.unit for unit in units}
    names = {member.name for unit in units for member in unit.members}
    retired_of = {id(each): tuple(number for number in each if number not in numbers) for each in units_of.values()}
    rates, unmeasured = _rates(nodes, rejoins, absent)
    has_rates = not unmeasured and any(node.probes for node in nodes)
    barrier = max(each.barrier for each in rejoins.values())
    answers: dict[int, list[m.Message]] = {}
    for index, report in reports.items():
        said: list[m.Message] = [m.NewcomerGone(node=each) for each in report.rejoin.joining if each in absent]
        answers[index] = said
        if report.join is not None:
            said.append(m.Welcome(index=index, epoch=1, nodes=tuple(nodes), job=report.rejoin.job))
        if retired := retired_of[id(units_of[index])]:
            said.append(m.Retired(units=retired))
        if index in behind:
            said.append(m.Commit(generation=latest, order=tuple(rank_parts(units))))
            # retired by all since: other nodes have freed them
            if over := [number for number in report.rejoin.prepared_units if number not in numbers]:
                said.append(m.Retired(units=tuple(over)))
        # a node that missed newcomers would number the next one wrongly
        said.append(m.Resume(missed=tuple(nodes[len(report.rejoin.nodes):]) if report.ranks else ()))
        if has_rates and not report.rejoin.rates:
            said.append(m.Rates(nic_rate_bytes=tuple(rates)))
        if report.rejoin.barrier < barrier:
            said.append(m.BarrierDone(sequence=barrier))
    roster = Roster([(senders.get(node.index, b""), node) for node in nodes])
    roster.lost.update(lost)
    lost_workers = {index for index in lost if nodes[index].ranks}
    # Those of another scheduler than that of the nodes that remain: they are to be told.
    is_news = bool(lost_workers) and any(
        not lost_workers.issubset(rejoin.lost) for index, rejoin in rejoins.items() if nodes[index].ranks)
    # Nodes that have committed less know older ones.
    changes = {each.part: each for rejoin in sorted(rejoins.values(), key=lambda each: each.committed)
               for each in rejoin.changes}
    gone_from: dict[int, set[int]] = {}
    for rejoin in rejoins.values():
        for first, ranks in rejoin.gone_from:
            gone_from.setdefault(first, set()).update(ranks)
    parts = {part.part for unit in units for part in unit.parts}
    return JobSnapshot(
        roster=roster, job=rejoins[min(rejoins)].job, epoch=max(each.epoch for each in rejoins.values()),
        absent=absent, settled_epoch=settled_epoch,
        frozen=is_news or any(each.frozen for index, each in rejoins.items() if index not in behind),
        generation=max(each.seen for each in rejoins.values()) + _MAX_UNHEARD,
        next_unit=max(each.next_unit for each in rejoins.values()), units=units,
        changes={part: each for part, each in changes.items() if part in parts},
        gone_from={first: tuple(sorted(ranks)) for first, ranks in gone_from.items()},
        failed={name: error_of(error, reason) for each in rejoins.values() for name, error, reason in each.failed
                if name not in names},
        n_declared=sum(each.n_declared for each in rejoins.values()), barrier=barrier, rates=rates,
        unmeasured=unmeasured,
        ownable_nbytes=[rejoins[node.index].ownable_nbytes if node.index in rejoins else -2 for node in nodes],
        answers=answers, voters=voters, dead=dead,
        lost_ranks={rank for each in rejoins.values() for rank in each.lost_ranks}
        | {rank for index in {*lost, *absent} for rank in nodes[index].ranks},
        later=[(index, message) for index, report in reports.items()
               for message in map(lambda each: _without_retired(each, numbers), report.later) if message is not None])


def _units_of(reports: Mapping[int, NodeReport]) -> dict[int, dict[int, m.UnitPlan]]:
    """Return the units of each node by number; one and the same object for nodes that have reported the same."""
    made: dict[tuple[int, ...], dict[int, m.UnitPlan]] = {}
    found = {}
    for index, report in reports.items():
        key = tuple(map(id, report.committed))
        if key not in made:
            made[key] = {unit.unit: unit for units in report.committed for unit in units}
        found[index] = made[key]
    return found


def _rates(nodes: Sequence[m.NodeInfo], rejoins: dict[int, m.Rejoin], absent: Sequence[int]
           ) -> tuple[list[float], list[int]]:
    """Return the rates of all NICs as far as they are known, and the nodes that have not reported theirs."""
    for each in rejoins.values():
        if each.rates:
            return list(each.rates), []
    measured = {index: each.measured for index, each in rejoins.items() if each.measured >= 0}
    lost = {*absent, *(node for each in rejoins.values() for node in each.lost)}
    return ([measured.get(node.index, node.nic_rate_bytes) for node in nodes],
            [node.index for node in nodes if node.probes and node.index not in measured and node.index not in lost])


def _without_retired(message: m.Message, units: set[int]) -> m.Message | None:
    """Return *message* as far as it still matters: a retired unit was retired by all ranks."""
    if not isinstance(message, m.Retire):
        return message
    rest = tuple(number for number in message.units if number in units)
    return msgspec.structs.replace(message, units=rest) if rest else None
