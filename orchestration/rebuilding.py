"""A scheduler without a memory learns from the nodes what the one before it knew. Pure, as `Job` is.

Everybody tells all it knows (`Ledger.account`). At most one commit can have reached some nodes and not others, and then
all are prepared for it: it is a commit, and the others get it. What nobody has committed is dropped, and proposed anew
because its declarations are said again. So does a recovery begin anew that was under way, in a new epoch.

Nothing is decided before a majority has spoken: voters are the nodes with ranks, and the scheduler. So of two
schedulers of one job, on two sides of a cut, one at most decides anything.
"""
from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from . import messages as m
from .admission import seat_of
from .credit_queue import rank_parts
from .errors import BpsError, MismatchError, PeerLostError, ProtocolError, StallError, error_of
from .past import Past
from .roster import Roster, describe_node

Outgoing = list[tuple[bytes, m.Message]]


@dataclass
class _Account:
    """What one node has said; `join`: it was never welcomed, and knows nothing."""

    rejoin: m.Rejoin
    units: dict[int, m.UnitPlan] = field(default_factory=dict)
    later: list[m.Message] = field(default_factory=list)
    is_complete: bool = False
    join: m.Join | None = None


class Rebuilding:
    """One rebuilding of one job, from the first account to the last one. Owner thread only; *now* as for `Job`.

    Parameters
    ----------
    recall
        The number of the `Recall` that accounts answer. Who dials anew answers none.
    known
        The nodes that have been recalled, and when each was heard, by sender.
    job, nodes
        That job's name and nodes; "" if it is not known which one it is, and the first account says it.
    """

    def __init__(self, package: str, *, heartbeat_s: float, lease_s: float, timeout_s: float, now: float,
                 recall: int = 0, known: Mapping[bytes, tuple[int, float]] | None = None,
                 nodes: Sequence[m.NodeInfo] = (), job: str = "") -> None:
        self.recall = recall
        self.aborted: BpsError | None = None
        self._package = package
        self._heartbeat_s, self._lease_s, self._timeout_s = heartbeat_s, lease_s, timeout_s
        self._began = self._last_tick = self._next_heartbeat = now
        self._n_heartbeats = 0
        self._heard = {sender: heard for sender, (_, heard) in (known or {}).items()}
        self._index_of = {sender: index for sender, (index, _) in (known or {}).items()}
        self._accounts: dict[bytes, _Account] = {}
        self._joins: dict[bytes, m.Join] = {}
        self._all_left: set[int] = set()  # nodes with ranks that have said so before they went
        self._first = m.Rejoin(version=m.VERSION, package=package, settings={}, job=job, index=0,
                               nodes=tuple(nodes)) if job else None
        self._majority_since: float | None = None

    # -- what comes in ------------------------------------------------------------------------------------

    def receive(self, now: float, sender: bytes, message: m.Message) -> Outgoing:
        """Take one message; return what is to be answered."""
        account = self._accounts.get(sender)
        if isinstance(message, m.Heartbeat):
            if sender in self._heard:
                self._heard[sender] = now
        elif isinstance(message, m.Rejoin):
            return self._rejoin(now, sender, message)
        elif isinstance(message, m.Join):
            self._heard[sender] = now
            self._joins[sender] = message
            self._match()
        elif account is not None:
            self._heard[sender] = now
            self._enter(account, message)
        return []

    def unreachable(self, sender: bytes) -> None:
        """Forget what *sender* has said, whose connection is gone: it says it again if it lives."""
        self._heard.pop(sender, None)
        self._joins.pop(sender, None)
        self._accounts.pop(sender, None)

    def _rejoin(self, now: float, sender: bytes, rejoin: m.Rejoin) -> Outgoing:
        if sender in self._heard and rejoin.recall != self.recall:
            return []  # its answer to this recall is on its way
        refused = self._objection(rejoin)
        if refused is not None:
            return [(sender, m.Refuse(error=type(refused).__name__, reason=str(refused)))]
        if self._first is None:
            self._first = rejoin
        if rejoin.index in self._lost():
            return [(sender, m.Abort(error="PeerLostError", goes_on=True,
                                     reason="the job goes on without this node, which it has lost"))]
        for other in [other for other, each in self._accounts.items() if each.rejoin.index == rejoin.index]:
            del self._accounts[other]
        self._heard[sender] = now
        self._accounts[sender] = _Account(rejoin)
        self._match()
        return []

    def _objection(self, rejoin: m.Rejoin) -> BpsError | None:
        if rejoin.version != m.VERSION or (self._package and rejoin.package != self._package):
            return MismatchError(f"node {rejoin.index} has version {rejoin.package} (protocol {rejoin.version}), the "
                                 f"scheduler {self._package} (protocol {m.VERSION}); install one version everywhere")
        first = self._first
        if not 0 <= rejoin.index < len(rejoin.nodes):
            return ProtocolError(f"a node says that it is node {rejoin.index} of {len(rejoin.nodes)}")
        if first is not None and rejoin.job != first.job:
            return PeerLostError(f"the scheduler of this job is gone: at its address is that of another one (job "
                                 f"{first.job}, of {len(first.nodes)} nodes, not {rejoin.job})")
        return None

    def _enter(self, account: _Account, message: m.Message) -> None:
        if isinstance(message, m.Kept):
            account.units |= {unit.unit: unit for unit in message.units}
        elif isinstance(message, m.Recounted):
            account.is_complete = True
        else:
            account.later.append(message)
        ranks = account.rejoin.nodes[account.rejoin.index].ranks
        if ranks and {each.rank for each in account.later if isinstance(each, m.RankLeft)} >= set(ranks):
            self._all_left.add(account.rejoin.index)

    def _match(self) -> None:
        """Find out which nodes those are that were never welcomed: they know nothing."""
        first = self._first
        if first is None:
            return
        coming = {index for each in self._accounts.values() for index in each.rejoin.joining}  # they begin anew
        for sender, join in list(self._joins.items()):
            node = seat_of(join, self._nodes())
            if node is not None and node.index not in coming:
                del self._joins[sender]
                self._accounts[sender] = _Account(
                    m.Rejoin(version=m.VERSION, package=join.package, settings=join.settings, job=first.job,
                             index=node.index, nodes=self._nodes()), is_complete=True, join=join)

    # -- what follows -------------------------------------------------------------------------------------

    def tick(self, now: float) -> Outgoing:
        """Return what the time leads to: heartbeats. Look at `finished`, `aborted` and `past` afterwards."""
        slept_s, self._last_tick = now - self._last_tick, now
        if slept_s > self._lease_s / 2:
            self._heard = {sender: heard + slept_s for sender, heard in self._heard.items()}
            self._began += slept_s
            self._majority_since = self._majority_since + slept_s if self._majority_since is not None else None
        if now - self._began >= self._timeout_s:
            self.aborted = StallError(f"the scheduler was lost, and {self._timeout_s:g} s (start_timeout_s) after "
                                      f"another one began too few nodes have told it what they know: "
                                      f"{self._describe()}")
        if now < self._next_heartbeat:
            return []
        self._next_heartbeat = now + self._heartbeat_s
        self._n_heartbeats += 1
        return [(sender, m.Heartbeat(sequence=self._n_heartbeats)) for sender in self.senders]

    @property
    def senders(self) -> list[bytes]:
        """Who is to hear how it ends."""
        return list(dict.fromkeys([*self._accounts, *self._joins, *self._heard]))

    @property
    def newcomers(self) -> list[tuple[bytes, m.Join]]:
        """Who has joined, and never was in the job."""
        return list(self._joins.items())

    @property
    def speakers(self) -> list[bytes]:
        """Who has begun to say what it knows, or is known to be in the job."""
        return list(self._accounts)

    @property
    def another(self) -> m.Join | None:
        """How the first node has joined that has ranks and is in no node's account: another job gathers here."""
        if self._first is None:
            return None
        return next((join for join in self._joins.values() if join.ranks), None)

    @property
    def is_alive(self) -> bool:
        """Whether a majority of the voters has spoken, though some may not have said all."""
        return self._is_majority({each.rejoin.index for each in self._accounts.values()})

    @property
    def finished(self) -> bool:
        """Whether all ranks of the job have left."""
        left = self._all_left | {node for each in self._accounts.values() for node in each.rejoin.farewells}
        return self._first is not None and left >= set(self._workers())

    def past(self, now: float) -> Past | None:
        """Return what has become of the job once everybody has said what it knows, or is lost.

        Raises
        ------
        PeerLostError
            If somebody is lost without whom it cannot go on.
        ProtocolError
            If what nodes say contradicts what schedulers do.
        """
        if self._first is None:
            return None
        told = {each.rejoin.index: sender for sender, each in self._accounts.items()
                if each.is_complete and each.rejoin.index not in self._lost() | self._left_behind()}
        workers = self._workers()
        if not self._is_majority(told):
            self._majority_since = None
            return None
        self._majority_since = now if self._majority_since is None else self._majority_since
        over = {*told, *self._lost()}
        missing = [node.index for node in self._nodes() if node.index not in over]
        if any(not self._is_given_up(now, index) for index in set(missing) - self._left_behind()):
            return None
        lost = [index for index in missing if index in workers]
        if lost:
            raise PeerLostError("; ".join(describe_node(self._nodes(), index) for index in lost) + (
                f" did not come back within lease_s = {self._lease_s:g} s, after the scheduler was lost"))
        return self._conclude({index: self._accounts[sender] for index, sender in sorted(told.items())},
                              {index: sender for index, sender in told.items()}, missing)

    def _nodes(self) -> tuple[m.NodeInfo, ...]:
        """Return all nodes that somebody knows: helpers are not told of others that come late."""
        return max((each.rejoin.nodes for each in self._accounts.values()), key=len,
                   default=self._first.nodes if self._first is not None else ())

    def _workers(self) -> list[int]:
        return [node.index for node in self._nodes() if node.ranks]

    def _is_majority(self, told: Container[int]) -> bool:
        workers = self._workers()
        return 2 * (sum(index in told for index in workers) + 1) > len(workers) + 1

    def _left_behind(self) -> set[int]:
        """Return the nodes that were coming late, of whose share nothing was committed: they have to come anew."""
        told = [each.rejoin for each in self._accounts.values() if each.is_complete]
        latest = max((each.committed for each in told), default=0)
        return {index for each in told for index in each.joining} | {
            each.index for each in told if each.is_late and not each.committed and each.prepared != latest}

    def _lost(self) -> set[int]:
        return {node for each in self._accounts.values() for node in each.rejoin.lost}

    def _is_given_up(self, now: float, index: int) -> bool:
        """Whether node *index*, which has not told all, is lost: called so by one with ranks, or silent."""
        speaks = [sender for sender, each in self._accounts.items() if each.rejoin.index == index]
        speaks += [sender for sender, known in self._index_of.items() if known == index and sender in self._heard]
        heard = max([self._majority_since or self._began, *(self._heard.get(sender, 0.0) for sender in speaks)])
        nodes = self._nodes()
        called = not speaks and not nodes[index].ranks and any(
            isinstance(said, m.Lost) and said.who == f"node {index}"
            for each in self._accounts.values() if nodes[each.rejoin.index].ranks for said in each.later)
        return called or now - heard >= self._lease_s

    def _conclude(self, accounts: dict[int, _Account], senders: dict[int, bytes], absent: Sequence[int]) -> Past:
        nodes = self._nodes()
        rejoins = {index: account.rejoin for index, account in accounts.items()}
        latest = max(each.committed for each in rejoins.values())
        behind = {index for index, each in rejoins.items() if each.committed != latest}
        for index in behind:
            if rejoins[index].prepared != latest:
                raise ProtocolError(f"{describe_node(nodes, index)} has committed generation "
                                    f"{rejoins[index].committed}, and is not prepared for {latest}, which others have "
                                    "committed")
        # Who came late knows only some units, but maybe those of the latest commit before the others do.
        whole = [index for index in accounts if not rejoins[index].is_late]
        base = next((index for index in whole if index not in behind), whole[0])
        known = dict(accounts[base].units)
        if base in behind:
            known |= next(account for index, account in accounts.items() if index not in behind).units
        units = [unit for number, unit in known.items() if all(
            number in accounts[index].units or (index in behind and number in rejoins[index].prepared_units)
            for index in whole)]
        kept = {unit.unit for unit in units}
        names = {member.name for unit in units for member in unit.members}
        rates, unmeasured = _rates(nodes, rejoins, absent)
        barrier = max(each.barrier for each in rejoins.values())
        answers: dict[int, list[m.Message]] = {}
        for index, account in accounts.items():
            answers[index] = said = []
            said += [m.NotComing(node=each) for each in account.rejoin.joining if each in absent]
            if account.join is not None:
                said.append(m.Welcome(index=index, epoch=1, nodes=nodes, job=account.rejoin.job))
            if retired := [number for number in account.units if number not in kept]:
                said.append(m.Retired(units=tuple(retired)))
            if index in behind:
                said.append(m.Commit(generation=latest, order=tuple(rank_parts(units))))
                # retired by all since: others have given it back
                if over := [number for number in account.rejoin.prepared_units if number not in kept]:
                    said.append(m.Retired(units=tuple(over)))
            said.append(m.Resume())
            if not account.rejoin.rates and not unmeasured and any(node.probes for node in nodes):
                said.append(m.Rates(nic_rate_bytes=tuple(rates)))
            if account.rejoin.barrier < barrier:
                said.append(m.BarrierDone(sequence=barrier))
        roster = Roster([(senders.get(node.index, b""), node) for node in nodes])
        roster.lost |= self._lost()
        # Who has committed less knows of older ones.
        lent = {each.part: each for rejoin in sorted(rejoins.values(), key=lambda each: each.committed)
                for each in rejoin.lent}
        gone_from: dict[int, set[int]] = {}
        for rejoin in rejoins.values():
            for first, ranks in rejoin.gone_from:
                gone_from.setdefault(first, set()).update(ranks)
        parts = {part.part for unit in units for part in unit.parts}
        return Past(
            roster=roster, job=rejoins[min(rejoins)].job, epoch=max(each.epoch for each in rejoins.values()),
            absent=absent, frozen=any(each.frozen for index, each in rejoins.items() if index not in behind),
            generation=max(each.seen for each in rejoins.values()) + _UNHEARD,
            next_unit=max(each.next_unit for each in rejoins.values()), units=units,
            lent={part: each for part, each in lent.items() if part in parts},
            gone_from={first: tuple(sorted(ranks)) for first, ranks in gone_from.items()},
            failed={name: error_of(error, reason) for each in rejoins.values() for name, error, reason in each.failed
                    if name not in names},
            n_declared=sum(each.n_declared for each in rejoins.values()), barrier=barrier, rates=rates,
            unmeasured=unmeasured,
            ownable_nbytes=[rejoins[node.index].ownable_nbytes if node.index in rejoins else -2 for node in nodes],
            answers=answers,
            later=[(index, message) for index, account in accounts.items()
                   for message in map(lambda each: _still(each, kept), account.later) if message is not None])

    def _describe(self) -> str:
        if self._first is None:
            return "none was ever welcomed"
        nodes = self._nodes()
        told = {each.rejoin.index for each in self._accounts.values() if each.is_complete}
        missing = [describe_node(nodes, node.index) for node in nodes if node.index not in told | self._lost()]
        return f"missing {'; '.join(missing) or 'nobody'}"


#: So many numbers a scheduler may have given that nobody who is left has heard of.
_UNHEARD = 1000


def _rates(nodes: Sequence[m.NodeInfo], rejoins: dict[int, m.Rejoin], absent: Sequence[int]
           ) -> tuple[list[float], list[int]]:
    """Return the rates of all NICs as far as they are known, and the nodes that have not said theirs."""
    for each in rejoins.values():
        if each.rates:
            return list(each.rates), []
    measured = {index: each.measured for index, each in rejoins.items() if each.measured >= 0}
    lost = {*absent, *(node for each in rejoins.values() for node in each.lost)}
    return ([measured.get(node.index, node.nic_rate_bytes) for node in nodes],
            [node.index for node in nodes if node.probes and node.index not in measured and node.index not in lost])


def _still(message: m.Message, units: set[int]) -> m.Message | None:
    """Return *message* as far as it still matters: what is retired was retired by everybody."""
    if not isinstance(message, m.Retire):
        return message
    rest = tuple(number for number in message.units if number in units)
    return msgspec.structs.replace(message, units=rest) if rest else None
