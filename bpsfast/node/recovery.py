"""A node's recovery from the loss of a helper (node without ranks, `Recovery`) or the scheduler (`SchedulerFailover`).

A change of epoch, because a helper is lost or has joined:

    freeze      stop summing; disconnect lost nodes, connect new ones; report the progress of each partition
                (`FreezeReport`)
    prepare     allocate and bind for the new owners (`owner_changes`); wait for what is under way to or from owners
                that give a partition up; then send Ready
    commit      go on, and first send what is owed of the last round

If another node is lost in between, all of it starts again: until the commit the engine stays frozen. A node that is
still connecting drops the lost node at once, connects to the others, and freezes then.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..orchestration import messages
from ..orchestration.errors import CapacityError, ProtocolError
from ..orchestration.failover.control_log import ControlLog
from .control_loop import ControlLoop
from .generation import Generation
from .owner_changes import OwnerTransfer
from .peers import Peers
from .plans import Plans
from .runtime import NodeRuntime
from .transport import Epochs

log = logging.getLogger("bpsfast.node")

#: A node without a scheduler that is done waits this long, to answer a scheduler that comes back.
_LAST_WAIT_S = 2.0


class Recovery:
    """Executes changes of epoch on *node*, one after the other. For the control loop's thread.

    *drop_peer*: called with the index of each lost node before its connection is closed: stop watching it. *add_peer*:
    called with the index of each node that has joined: make it a peer, unless it is one. *tell_ranks*: called before
    the first sum without lost ranks. *epochs*: the epochs that this
    node knows: each change begins one, and its commit ends the earlier ones.
    """

    def __init__(self, node: ControlLoop, runtime: NodeRuntime, plans: Plans, drop_peer: Callable[[int], None],
                 add_peer: Callable[[int], None], epochs: Epochs,
                 tell_ranks: Callable[[messages.RanksLost], None]) -> None:
        self._node = node
        self._runtime = runtime
        self._plans = plans
        self._drop_peer = drop_peer
        self._add_peer = add_peer
        self._tell_ranks = tell_ranks
        self._begins: tuple[tuple[int, int], ...] = ()
        self._lost_ranks: set[int] = set()  # that ranks here have been told of
        self._early: messages.Freeze | None = None
        self._epochs = epochs
        self._frozen: messages.Freeze | None = None
        self._since = 0.0
        self._prepared: tuple[Generation, OwnerTransfer] | None = None
        #: How often this node has gone on without a lost node, and how many nodes have joined.
        self.count = self.n_joined = 0
        #: The epoch that the last change began; 0: there was none.
        self.epoch = 0

    def freeze(self, message: messages.Freeze) -> None:
        """Stop summing, disconnect lost nodes, connect joined ones, and answer FreezeReport."""
        if not self._runtime.connected:
            self._early = message
            self._plans.drop_early()  # their owners may be lost; the scheduler has withdrawn them
            for index in message.lost:
                self._drop_peer(index)
            return
        if self._frozen is None:
            self._since = time.monotonic()
        self._frozen = message
        self._epochs.freeze(message.epoch, message.joined)
        self._plans.forget()
        if self._prepared is not None:
            self._runtime.installer.drop(self._prepared[0])
            self._prepared = None
        self._runtime.freeze(f"the job cannot go on with other owners ({message.reason})")
        for index in message.lost:
            self._drop_peer(index)
            self._node.run_with_heartbeats(lambda index=index: self._runtime.exclude(index))  # type: ignore[misc]
        for index in message.joined:
            self._add_peer(index)
        if message.lost_ranks:
            self._runtime.lose_ranks(message.lost_ranks)
        installer = self._runtime.installer
        self._node.send(messages.FreezeReport(epoch=message.epoch, near=installer.near,
                                              progress=installer.progress(message.lost, message.reports_all)))

    def connected(self) -> None:
        """Execute a Freeze that came before all peers were connected."""
        early, self._early = self._early, None
        if early is not None:
            self.freeze(early)

    def prepare(self, message: messages.Recover) -> None:
        """Prepare for the new owners; answer Ready once the peers have sent their addresses."""
        if self._frozen is None or self._frozen.epoch != message.epoch:
            raise ProtocolError(f"the scheduler recovers in epoch {message.epoch}, for which this node is not frozen")
        try:
            self._prepared = self._node.run_with_heartbeats(
                lambda: self._runtime.installer.prepare_owner_change(message))
        except CapacityError as exc:
            self._node.send(messages.PrepareFailed(
                generation=message.generation, reason=str(exc), ownable_nbytes=self._runtime.installer.ownable_nbytes,
                room_nbytes=self._runtime.installer.room_nbytes))
            return
        self._begins = message.begins
        generation, transfer = self._prepared
        self._plans.await_for(generation, transfer)

    def commit(self, message: messages.Commit) -> bool:
        """Go on if *message* is the commit of what was prepared here; return whether it is."""
        if self._prepared is None or self._prepared[0].plan.generation != message.generation:
            return False
        assert self._frozen is not None
        generation, transfer = self._prepared
        frozen, begins = self._frozen, self._begins
        self._frozen, self._prepared = None, None
        self._epochs.commit()
        self._plans.forget()
        pause_s = time.monotonic() - self._since
        if set(frozen.lost_ranks) > self._lost_ranks:
            self._tell_ranks(messages.RanksLost(ranks=frozen.lost_ranks, reason=frozen.reason, begins=begins,
                                                pause_s=pause_s))
        self._lost_ranks.update(frozen.lost_ranks)
        self._runtime.succeed(generation, transfer, message.order)
        self._plans.report_room()
        self.epoch = frozen.epoch
        self.count += not frozen.joined
        self.n_joined += len(frozen.joined)
        if self._node.name == "node 0":
            moved = [part for unit in generation.plan.units for part in unit.parts if part.part in transfer.parts]
            new_owners = ", ".join(f"node {owner}" for owner in sorted({part.owner for part in moved}))
            what = f"{len(moved)} partitions are summed by {new_owners} from now on" if moved else (
                "nothing was summed there" if frozen.lost else "all partitions keep their owners")
            how = ("with joined nodes" if frozen.joined else "without lost nodes" if frozen.lost
                   else "without lost ranks")
            log.log(logging.INFO if frozen.joined else logging.WARNING, "the job goes on %s (%s): %s; epoch %d, after "
                    "%.0f ms", how, frozen.reason, what, frozen.epoch, pause_s * 1e3)
        return True


class SchedulerFailover:
    """Keeps the job going while *node*, which has joined it, has no scheduler. Used by the control loop's thread.

    lost       the connection has ended: another one is dialled, and `ControlLog.report` is sent first
    recall     a scheduler lacks information of this or other nodes: the same is sent over the existing connection
    resume     the scheduler knows everything; what was prepared and not committed is dropped
    the end    all ranks have left and no scheduler can say so: the nodes tell each other over their data ports
    """

    def __init__(self, node: ControlLoop, control_log: ControlLog, peers: Peers, plans: Plans,
                 timeout_s: float) -> None:
        self._node = node
        self._control_log = control_log
        self._peers = peers
        self._plans = plans
        self._timeout_s = timeout_s
        self._since: float | None = None
        self._has_announced = False
        self._welcome: messages.Welcome | None = None

    @property
    def lasts(self) -> bool:
        """Whether the scheduler is lost, and no other one has yet taken over."""
        return self._since is not None

    def welcomed(self, message: messages.Welcome) -> None:
        """Note the members of the job; there is a scheduler."""
        self._welcome, self._since = message, None

    def begin(self, address: str) -> None:
        """Note that the connection to the scheduler at *address* is lost; send the report over the next one."""
        if self._since is None:
            self._since = time.monotonic()
            self._log("the scheduler at %s is lost: the job goes on without it, and waits up to %g s (start_timeout_s) "
                      "for another one there", address, self._timeout_s)
        self._send_account(0)

    def recalled(self, message: messages.RejoinRequest) -> None:
        """Send the report to the scheduler that asks for it."""
        self._since = self._since or time.monotonic()
        if self._welcome is not None:
            self._send_account(message.number)

    def resumed(self, message: messages.Resume) -> None:
        """Note that the scheduler knows everything: the failover is over."""
        if self._since is not None:
            self._log("the job has a scheduler again, after %.1f s", time.monotonic() - self._since)
        self._since = None
        self._plans.resumed()

    def is_over(self) -> bool:
        """Return whether, without a scheduler, all ranks of the job have left; announce it if all ranks here have."""
        if self._since is None or self._welcome is None or not self._node.runtime.connected:
            return False
        me = self._welcome.nodes[self._welcome.index]
        if not self._control_log.left >= set(me.ranks):
            return False
        if me.ranks and not self._has_announced:
            self._has_announced = True
            self._peers.announce_shutdown()
        peer_shutdowns = self._peers.peer_shutdowns
        for index in peer_shutdowns:
            self._control_log.record_peer_left(index)
        others = {node.index for node in self._welcome.nodes if node.ranks} - {me.index} - self._control_log.lost
        return (peer_shutdowns >= others and (not me.ranks or self._peers.has_announced_shutdown)
                and time.monotonic() - self._since >= _LAST_WAIT_S)

    def _send_account(self, recall: int) -> None:
        for message in self._control_log.report(recall):
            self._node.send_unrecorded(message)

    def _log(self, words: str, *values: object) -> None:
        is_first = self._welcome is not None and self._welcome.index == 0
        log.log(logging.WARNING if is_first else logging.INFO, words, *values)
