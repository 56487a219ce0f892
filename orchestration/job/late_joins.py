"""Lets nodes join a running job: they are checked, announced to the others, connected, then taken in. Pure.

    coming      admitted, with the next node index: nodes with ranks are told to expect it (`Joined`)
    welcomed    all of them do: it gets all nodes (`Welcome`), and connects, while the job continues undisturbed
    linked      it, and all of them, have said so (`NewcomerReady`): the next change of epoch takes it in
                (`NodeLosses.integrate`)

Only nodes without ranks can come, and only as many as the job expects. If it has that many helpers, one more waits for
a lease, in case one of them is dead and not yet known to be, and is refused then. A newcomer that is refused, dies, or
is not connected in time does no harm: the job goes on.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from .. import messages as m
from ..errors import BpsError, ConfigError, MismatchError, PeerLostError, StallError
from ..placement.rates import machines_of
from ..placement.shares import optimal_shares
from ..roster import Roster
from .admission import Admission, JobSettings, node_of, process_of
from .recovery import is_plain

#: The most nodes, lost ones included, because an engine has 4096 sources for all ranks and nodes that it ever knows.
MAX_NODES = 3072


@dataclass
class _Coming:
    """One newcomer. *expected*: nodes that expect it; *linked*: nodes that have its connections, itself included."""

    deadline: float
    is_welcomed: bool = False
    expected: set[int] = field(default_factory=set)
    linked: set[int] = field(default_factory=set)


class LateJoins:
    """The newcomers of one job. Parameters are the `Job`'s own objects, which change.

    *settings* limit how long each may take to be connected (`start_timeout_s`), how many helpers there may be
    (`most_helpers`), and for how long a dead one may count among them (`helper_lease_s`).
    """

    def __init__(self, roster: Roster, admission: Admission, settings: JobSettings) -> None:
        self._roster = roster
        self._admission = admission
        self._settings = settings
        self._timeout_s = settings.start_timeout_s
        self._coming: dict[int, _Coming] = {}
        self._queue: dict[bytes, tuple[m.Join, float]] = {}  # joins that wait for room, and until when

    def refusal(self, sender: bytes, join: m.Join, is_over: bool) -> BpsError | None:
        """Return why the node of *join* cannot come late, if it cannot."""
        who = f"the node on host {join.host} (pid {join.pid})"
        if is_over:
            return ConfigError(f"the job is over; {who} comes too late")
        if join.ranks:
            return ConfigError(f"the job is already complete with {len(self._roster.nodes)} nodes; {who} has "
                               f"{len(join.ranks)} ranks, and only helpers, without any, can come late")
        if self._roster.knows(sender):
            return PeerLostError(f"{self._roster.describe_node(self._roster.index_of(sender))} was lost, and the job "
                                 "goes on without it: start another process")
        if len(self._roster.nodes) >= MAX_NODES:
            return ConfigError(f"a job numbers at most {MAX_NODES} nodes, lost ones included: {who} is one too many")
        mismatch: MismatchError | None = self._admission.check(join)
        return mismatch

    @property
    def has_room(self) -> bool:
        """Whether the job may have one helper more, newcomers counted."""
        return len(self._helpers()) < self._settings.most_helpers

    def _helpers(self) -> list[int]:
        return [node.index for node in self._roster.nodes if not node.ranks and node.index not in self._roster.lost]

    @property
    def queue(self) -> list[bytes]:
        """The connections that wait for room."""
        return list(self._queue)

    def wait(self, now: float, sender: bytes, join: m.Join) -> None:
        """Keep *join* until there is room, or all dead helpers are known to be dead."""
        until = now + (self._settings.helper_lease_s or self._settings.lease_s) + self._settings.heartbeat_s
        for other, (before, since) in list(self._queue.items()):
            if process_of(before) == process_of(join):  # it has dialled anew
                del self._queue[other]
                until = since
        self._queue[sender] = join, until

    def leave_queue(self, sender: bytes) -> bool:
        """Forget *sender*, whose connection has closed; return whether it waited for room."""
        return self._queue.pop(sender, None) is not None

    def next_in_queue(self, now: float) -> tuple[bytes, m.Join, ConfigError | None] | None:
        """Take out a node that is admitted now, or has to be refused, and why; None if there is none."""
        for sender, (join, until) in self._queue.items():
            if self.has_room or now >= until:
                del self._queue[sender]
                return sender, join, None if self.has_room else self._one_too_many(join)
        return None

    def _one_too_many(self, join: m.Join) -> ConfigError:
        helpers = self._helpers()
        have = f"has {len(helpers)} of them ({', '.join(map(self._roster.describe_node, helpers))})" if helpers else \
            "has none"
        most = self._settings.most_helpers
        return ConfigError(f"the job expects at most {most} helper{'s' * (most != 1)} and {have}: the node on "
                           f"host {join.host} (pid {join.pid}) is one too many. To let helpers come later, start the "
                           "job with BPSFAST_MAX_HELPERS set to the most there may be")

    def admit(self, now: float, sender: bytes, join: m.Join) -> m.Outgoing:
        """Give a newcomer its index, and let all nodes with ranks expect it."""
        index = len(self._roster.nodes)
        # its NIC is not measured: the others' are busy
        node = msgspec.structs.replace(node_of(index, join), probes=False)
        self._roster.add(sender, node)
        self._coming[index] = _Coming(now + self._timeout_s)
        return [(self._roster.senders[worker], m.Joined(node=node)) for worker in self._roster.workers]

    def is_coming(self, index: int) -> bool:
        """Whether node *index* is a newcomer that is not taken in yet."""
        return index in self._coming

    def newcomer_ready(self, sender: bytes, message: m.NewcomerReady, job: str, epoch: int, rates: Sequence[float],
                       units: Sequence[m.UnitPlan]) -> m.Outgoing:
        """Note that a node expects a newcomer, or is connected to it.

        *job*: its name; *epoch*: the last committed one; *rates*: of NICs, by node; *units*: the committed ones.
        """
        coming = self._coming.get(message.node)
        if coming is None:
            return []  # it was given up meanwhile
        index = self._roster.index_of(sender)
        (coming.linked if message.is_linked else coming.expected).add(index)
        if coming.is_welcomed or not coming.expected >= set(self._roster.workers):
            return []
        coming.is_welcomed = True
        nodes = tuple(msgspec.structs.replace(node, nic_rate_bytes=rates[node.index], probes=False)
                      for node in self._roster.nodes)
        return [(self._roster.senders[message.node], m.Welcome(
            index=message.node, epoch=epoch, nodes=nodes, is_late=True, job=job,
            lost=tuple(sorted(self._roster.lost)), joining=tuple(sorted(self._roster.joining - {message.node})),
            kinds=tuple(sorted({(unit.dtype, unit.op) for unit in units})),
            share_nbytes=self._share_nbytes(nodes[message.node], nodes, units)))]

    def _share_nbytes(self, newcomer: m.NodeInfo, nodes: Sequence[m.NodeInfo], units: Sequence[m.UnitPlan]) -> int:
        """Return about what *newcomer* will own of *units*: its share of all that can move, and a partition more.

        Only to let it allocate memory before all ranks wait; `rebalancing` may give it more, or less.
        """
        plain = [unit for unit in units if is_plain(unit)]
        if not plain:
            return 0
        machines = machines_of([*(nodes[index] for index in self._roster.alive), newcomer])
        *_, share_nbytes = optimal_shares(machines, sum(unit.nbytes for unit in plain)).owned
        return int(share_nbytes) + max(part.nbytes for unit in plain for part in unit.parts) if share_nbytes else 0

    def take_linked(self) -> set[int]:
        """Return, once, the newcomers that are connected to all nodes: they are to be taken in now."""
        linked = {index for index, coming in self._coming.items()
                  if coming.linked >= {index, *self._roster.workers}}
        for index in linked:
            del self._coming[index]
        return linked

    def overdue(self, now: float) -> list[tuple[bytes, StallError]]:
        """Return the newcomers that are not connected in time, and which nodes are missing."""
        found = []
        for index, coming in self._coming.items():
            if now < coming.deadline:
                continue
            wanted = {*self._roster.workers, *([index] if coming.is_welcomed else [])}
            missing = wanted - (coming.linked if coming.is_welcomed else coming.expected)
            if not missing:
                continue  # it is taken in once the change or the measurement under way has ended
            names = "; ".join(map(self._roster.describe_node, sorted(missing)))
            found.append((self._roster.senders[index], StallError(
                f"{self._roster.describe_node(index)} came to the running job, and within start_timeout_s = "
                f"{self._timeout_s:g} s did not hear from, or was not connected to: {names}")))
        return found

    @property
    def coming(self) -> list[int]:
        """The newcomers that are not taken in yet."""
        return sorted(self._coming)

    def give_up(self, index: int, error: BpsError) -> m.Outgoing:
        """Continue without newcomer *index*, which is lost, or not connected in time."""
        del self._coming[index]
        self._roster.joining.discard(index)
        self._roster.lost.add(index)
        return [(self._roster.senders[index], m.dropped(f"the job goes on without this node: {error}")),
                *((self._roster.senders[worker], m.NewcomerGone(node=index)) for worker in self._roster.workers)]
