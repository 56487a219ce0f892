"""What follows from the accounts of all nodes: where the job goes on, and who is to be told what it has missed. Pure.

At most one commit can have reached some nodes and not others, and then all are prepared for it: it is a commit, and
the others get it. What nobody has committed is dropped, and proposed anew because its declarations are said again.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from .. import messages as m
from ..errors import ProtocolError, error_of
from ..job.snapshot import JobSnapshot
from ..priority.credit_queue import rank_parts
from ..roster import Roster, describe_node
from .node_reports import NodeReport

#: So many numbers a scheduler may have given that nobody who is left has heard of.
_UNHEARD = 1000


def merge_reports(nodes: Sequence[m.NodeInfo], accounts: Mapping[int, NodeReport], senders: Mapping[int, bytes],
             lost: Collection[int], absent: Sequence[int]) -> JobSnapshot:
    """Return where the job of *nodes* goes on.

    *accounts* and *senders* are those of all who take part, by node; *lost* were so before, and *absent* are by now.

    Raises
    ------
    ProtocolError
        If what nodes say contradicts what schedulers do.
    """
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
        said: list[m.Message] = [m.NotComing(node=each) for each in account.rejoin.joining if each in absent]
        answers[index] = said
        if account.join is not None:
            said.append(m.Welcome(index=index, epoch=1, nodes=tuple(nodes), job=account.rejoin.job))
        if retired := [number for number in account.units if number not in kept]:
            said.append(m.Retired(units=tuple(retired)))
        if index in behind:
            said.append(m.Commit(generation=latest, order=tuple(rank_parts(units))))
            # retired by all since: others have given it back
            if over := [number for number in account.rejoin.prepared_units if number not in kept]:
                said.append(m.Retired(units=tuple(over)))
        # whoever missed that others have come would number the next one wrongly
        said.append(m.Resume(missed=tuple(nodes[len(account.rejoin.nodes):]) if account.ranks else ()))
        if not account.rejoin.rates and not unmeasured and any(node.probes for node in nodes):
            said.append(m.Rates(nic_rate_bytes=tuple(rates)))
        if account.rejoin.barrier < barrier:
            said.append(m.BarrierDone(sequence=barrier))
    roster = Roster([(senders.get(node.index, b""), node) for node in nodes])
    roster.lost.update(lost)
    # Who has committed less knows of older ones.
    lent = {each.part: each for rejoin in sorted(rejoins.values(), key=lambda each: each.committed)
            for each in rejoin.lent}
    gone_from: dict[int, set[int]] = {}
    for rejoin in rejoins.values():
        for first, ranks in rejoin.gone_from:
            gone_from.setdefault(first, set()).update(ranks)
    parts = {part.part for unit in units for part in unit.parts}
    return JobSnapshot(
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
