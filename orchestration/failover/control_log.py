"""Records a node's messages to and from the scheduler, from which a later scheduler rebuilds the job's state. Pure.

The node records what it receives from the scheduler and what it sends to it, and `report` repeats it: what was
committed by its outcome, unanswered messages as they were sent. So the scheduler has no state that is not also at the
nodes.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from .. import messages as m
from ..job.recovery import note_changes
from ..long_lists import with_digest

#: Units in one message: each may have thousands of partitions, and the size of a message is limited.
_UNITS_AT_ONCE = 256


@dataclass
class _Declaration:
    """An unanswered declaration; `first`: the position of its first tensor in all that the rank has declared."""

    rank: int
    first: int
    tensors: tuple[m.TensorSpec, ...]
    digest: bytes
    waiting: set[str]


class ControlLog:
    """Records one node's messages to and from the scheduler; *package*, *settings*: as in `Join`. Owner thread only."""

    def __init__(self, package: str, settings: Mapping[str, str]) -> None:
        self._package = package
        self._settings = dict(settings)
        self._welcome: m.Welcome | None = None
        self._rates: tuple[float, ...] = ()
        self._measured = -1.0
        self._epoch = 0
        self._nodes: tuple[m.NodeInfo, ...] = ()
        self._lost: set[int] = set()
        self._lost_ranks: set[int] = set()
        self._settled: tuple[int, tuple[int, ...]] = (1, ())  # the last committed epoch, and the nodes lost by then
        self._joining: set[int] = set()
        self._frozen = False
        self._committed = self._seen = self._next_unit = 0
        self._prepared: m.Plan | m.Recover | None = None
        self._units: dict[int, m.UnitPlan] = {}
        self._changes: dict[int, m.OwnerChange] = {}  # of each partition the last one
        self._gone_from: dict[int, set[int]] = {}
        self._failed: dict[str, tuple[str, str, str]] = {}
        self._barrier = 0
        self._ownable_nbytes = -2
        self._n_declared: dict[int, int] = {}
        self._declarations: list[_Declaration] = []
        self._repeated: dict[bytes, tuple[Any, ...]] = {}  # the lists of the last report, by digest
        self._retiring: dict[int, set[int]] = {}  # unit -> ranks of this node
        self._entered: dict[int, m.BarrierEnter] = {}
        self._left: dict[int, m.RankLeft] = {}
        self._asked: dict[tuple[int, int], m.Message] = {}  # by rank and question
        self._published: dict[tuple[int, str], m.Publish] = {}
        self._credit: dict[int, m.Credit] = {}
        self._lost_said: dict[str, m.Lost] = {}
        self._nodes_left: set[int] = set()

    @property
    def left(self) -> set[int]:
        """The ranks of this node that have left, and all ranks that are lost."""
        return set(self._left) | self._lost_ranks

    @property
    def lost(self) -> set[int]:
        """The nodes that the job goes on without."""
        return set(self._lost)

    @property
    def settled(self) -> tuple[int, tuple[int, ...]]:
        """The last committed epoch, and the nodes lost by then."""
        return self._settled

    def heard(self, message: m.Message) -> None:
        """Record a message of the scheduler, before it is acted on."""
        match message:
            case m.Welcome():
                self._welcome, self._epoch, self._nodes = message, message.epoch, message.nodes
                self._lost = set(message.lost)
                self._settled = message.epoch, message.lost
            case m.Joined():
                self._nodes += (message.node,)
                self._joining.add(message.node.index)
            case m.NewcomerGone():
                self._joining.discard(message.node)
                self._lost.add(message.node)
            case m.Rates():
                self._rates = message.nic_rate_bytes
            case m.Plan() | m.Recover():
                self._prepared, self._seen = message, max(self._seen, message.generation)
                self._next_unit = max([self._next_unit, *(unit.unit + 1 for unit in message.units)])
            case m.Commit():
                self._commit(message)
            case m.Freeze():
                self._freeze(message)
            case m.Resume():
                self._prepared = None
                self._nodes += message.missed
                self._lost.update(node.index for node in message.missed)
            case m.Retired():
                self._retired(message)
            case m.DeclareFailed():
                self._declare_failed(message)
            case m.BarrierDone():
                self._barrier = max(self._barrier, message.sequence)
            case m.StallAnswer() | m.LagAnswer() | m.KeyValueReply():
                self._answered(message)

    def said(self, message: m.Message) -> None:
        """Record a message of this node to the scheduler, for its ranks or itself."""
        match message:
            case m.Measured():
                self._measured = message.nic_rate_bytes
            case m.Declare():
                self._declare(message)
            case m.Retire():
                for number in message.units:
                    self._retiring.setdefault(number, set()).add(message.rank)
            case m.BarrierEnter():
                self._entered[message.rank] = message
            case m.RankLeft():
                self._left[message.rank] = message
                self._asked = {key: asked for key, asked in self._asked.items() if key[0] != message.rank}
            case m.StallQuestion() | m.LagQuestion() | m.Lookup():
                self._asked[message.rank, message.question] = message
            case m.Publish():
                self._published[message.rank, message.key] = message
                self._asked[message.rank, message.question] = message
            case m.Withdraw():
                self._published = {key: notice for key, notice in self._published.items()
                                   if key[0] != message.rank or not key[1].startswith(message.prefix)}
            case m.Credit():
                self._credit[message.rank] = message
            case m.Lost():
                self._lost_said[message.who] = message
            case m.Ready() | m.MemoryFreed():
                self._ownable_nbytes = message.ownable_nbytes
            case m.PrepareFailed():
                self._ownable_nbytes, self._prepared = message.ownable_nbytes, None

    @property
    def units(self) -> list[m.UnitPlan]:
        """The committed units, in the order of their commits."""
        return list(self._units.values())

    def list_of(self, digest: bytes) -> tuple[Any, ...]:
        """Return the list that *digest* identifies, of an unanswered declaration or of the last report; else ()."""
        said = next((said for said in self._declarations if said.digest == digest), None)
        return said.tensors if said is not None else self._repeated.get(digest, ())

    def record_peer_left(self, node: int) -> None:
        """Record that all ranks of *node* have left, as it says itself."""
        self._nodes_left.add(node)

    def report(self, recall: int = 0) -> Iterator[m.Message]:
        """Yield the messages for a scheduler that asks by *recall* (0: it has not asked). Call it after `Welcome`."""
        assert self._welcome is not None
        plan = self._prepared
        yield m.Rejoin(
            version=m.VERSION, package=self._package, settings=self._settings, job=self._welcome.job,
            index=self._welcome.index, nodes=self._nodes, is_late=self._welcome.is_late,
            joining=tuple(sorted(self._joining)), recall=recall, n_units=len(self._units),
            rates=self._rates, measured=self._measured, epoch=self._epoch, lost=tuple(sorted(self._lost)),
            lost_ranks=tuple(sorted(self._lost_ranks)),
            frozen=self._frozen, committed=self._committed, prepared=plan.generation if plan is not None else 0,
            prepared_units=tuple(unit.unit for unit in plan.units) if isinstance(plan, m.Plan) else (),
            seen=self._seen, next_unit=self._next_unit, changes=tuple(self._changes.values()),
            gone_from=tuple((first, tuple(sorted(ranks))) for first, ranks in sorted(self._gone_from.items())),
            failed=tuple(self._failed.values()), barrier=self._barrier, n_declared=sum(self._n_declared.values()),
            ownable_nbytes=self._ownable_nbytes, nodes_left=tuple(sorted(self._nodes_left)),
            settled_epoch=self._settled[0], settled_lost=self._settled[1])
        self._repeated = {}
        units = self.units
        for begin in range(0, len(units), _UNITS_AT_ONCE):
            yield self._repeat(m.CommittedUnits(units=tuple(units[begin:begin + _UNITS_AT_ONCE])))
        yield from self._credit.values()
        for said in self._declarations:
            at = [i for i, spec in enumerate(said.tensors) if spec.name in said.waiting]
            tensors = said.tensors if len(at) == len(said.tensors) else tuple(said.tensors[i] for i in at)
            # only those of the first rank count, and there may be thousands of ranks
            is_first = any(said.rank == (spec.ranks[0] if spec.ranks else 0) for spec in tensors)
            yield self._repeat(m.Declare(rank=said.rank, tensors=tensors,
                                         positions=tuple(said.first + i for i in at) if is_first else ()))
        units_of: dict[int, list[int]] = {}
        for unit, ranks in self._retiring.items():
            for rank in ranks:
                units_of.setdefault(rank, []).append(unit)
        yield from (m.Retire(rank=rank, units=tuple(theirs)) for rank, theirs in sorted(units_of.items()))
        yield from self._published.values()
        yield from (asked for asked in self._asked.values() if not isinstance(asked, m.Publish))
        yield from (entered for entered in self._entered.values() if entered.sequence > self._barrier)
        yield from self._left.values()
        yield from self._lost_said.values()
        yield m.RejoinComplete()

    def _repeat(self, message: m.Declare | m.CommittedUnits) -> m.Message:
        """Return *message* with the digest of its list, if that is long; the list can then be had from `list_of`."""
        message = with_digest(message)
        if message.digest:
            self._repeated[message.digest] = message.tensors if isinstance(message, m.Declare) else message.units
        return message

    def _commit(self, message: m.Commit) -> None:
        plan, self._prepared = self._prepared, None
        if plan is None or plan.generation != message.generation:
            return  # the node itself reports that
        self._committed = message.generation
        self._units |= {unit.unit: unit for unit in plan.units}
        if isinstance(plan, m.Recover):
            self._frozen = False
            self._settled = self._epoch, tuple(sorted(self._lost))
            note_changes(self._changes, plan.owner_changes, plan.redone, plan.keepers)
            return
        for said in self._declarations:
            said.waiting -= {member.name for unit in plan.units for member in unit.members}
        self._declarations = [said for said in self._declarations if said.waiting]

    def _freeze(self, message: m.Freeze) -> None:
        self._epoch, self._frozen, self._prepared = message.epoch, True, None
        self._lost = (self._lost | set(message.lost)) - set(message.joined)
        self._joining -= {*message.lost, *message.joined}
        self._lost_ranks.update(message.lost_ranks)
        for who in (*(f"node {node}" for node in message.lost), *(f"rank {rank}" for rank in message.lost_ranks)):
            self._lost_said.pop(who, None)

    def _retired(self, message: m.Retired) -> None:
        plan = self._prepared
        if isinstance(plan, m.Recover):  # retired after that commit, of which this node is still to hear
            self._prepared = msgspec.structs.replace(plan, units=tuple(
                unit for unit in plan.units if unit.unit not in message.units))
        for number in message.units:
            unit = self._units.pop(number, None)
            self._retiring.pop(number, None)
            if unit is not None:
                for part in unit.parts:
                    self._changes.pop(part.part, None)
                if unit.store is not None:
                    self._gone_from.setdefault(unit.store_unit, set()).update(unit.ranks)
        alive = {unit.store_unit for unit in self._units.values()}
        self._gone_from = {first: ranks for first, ranks in self._gone_from.items() if first in alive}

    def _declare_failed(self, message: m.DeclareFailed) -> None:
        names = set(message.names)
        self._failed |= {name: (name, message.error, message.reason) for name in message.names}
        for said in self._declarations:
            said.waiting -= names
        self._declarations = [said for said in self._declarations if said.waiting]
        plan = self._prepared
        if isinstance(plan, m.Plan) and names & {member.name for unit in plan.units for member in unit.members}:
            self._prepared = None

    def _answered(self, message: m.StallAnswer | m.LagAnswer | m.KeyValueReply) -> None:
        question = self._asked.pop((message.rank, message.question), None)
        if isinstance(question, m.Publish) and isinstance(message, m.KeyValueReply) and message.error:
            self._published.pop((question.rank, question.key), None)

    def _declare(self, message: m.Declare) -> None:
        first = self._n_declared.get(message.rank, 0)
        self._n_declared[message.rank] = first + len(message.tensors)
        # Ranks of one node mostly declare the same: one copy is kept.
        tensors = (self.list_of(message.digest) if message.digest else ()) or message.tensors
        self._declarations.append(_Declaration(message.rank, first, tensors, message.digest,
                                               {spec.name for spec in tensors}))
