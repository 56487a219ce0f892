"""A change of epoch as one node goes through it: a helper is lost, or has come, and others sum from then on.

    freeze      sum and pass on nothing; part with who is lost, take in who has come; say how far everything has come
                here (`FreezeReport`)
    prepare     memory and lanes for the new owners (`succession`); what is on its way to or from owners that give up
                arrives; then Ready
    commit      go on, with what is owed of the last round first

If another one is lost in between, all of it begins anew: until the commit the engine is as it was frozen. A node that
is still connecting parts with who is lost at once, connects to the others, and freezes then.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..orchestration import messages
from ..orchestration.errors import CapacityError, ProtocolError
from .generation import Generation
from .owner_changes import Succession
from .plans import Plans
from .runtime import NodeRuntime
from .transport import Epochs

if TYPE_CHECKING:
    from .main import Node

log = logging.getLogger("bpsfast.node")


class Recovery:
    """The recoveries of *node*, one after the other. Called by the control loop's thread.

    Parameters
    ----------
    part_with
        Called with the index of each lost node before its connection is closed: watch and expect it no more.
    take_in
        Called with the index of each node that has come: let it be a peer, unless it is already.
    epochs
        Those that this node knows: each change begins one, and its commit ends those before.
    """

    def __init__(self, node: Node, runtime: NodeRuntime, plans: Plans, part_with: Callable[[int], None],
                 take_in: Callable[[int], None], epochs: Epochs) -> None:
        self._node = node
        self._runtime = runtime
        self._plans = plans
        self._part_with = part_with
        self._take_in = take_in
        self._early: messages.Freeze | None = None
        self._epochs = epochs
        self._frozen: messages.Freeze | None = None
        self._since = 0.0
        self._prepared: tuple[Generation, Succession] | None = None
        #: How often this node has gone on without somebody, and how many it has taken in.
        self.count = self.n_joined = 0
        #: The epoch that the last of them began; 0: there was none.
        self.epoch = 0

    def freeze(self, message: messages.Freeze) -> None:
        """Stop, part with who is lost, and say so."""
        if not self._runtime.connected:
            self._early = message
            self._plans.drop_early()  # it may be of owners who are lost; the scheduler has withdrawn it
            for index in message.lost:
                self._part_with(index)
            return
        if self._frozen is None:
            self._since = time.monotonic()
        self._frozen = message
        self._epochs.freeze(message.epoch, message.joined)
        self._plans.forget()
        if self._prepared is not None:
            self._runtime.plan_installer.drop(self._prepared[0])
            self._prepared = None
        self._runtime.freeze(f"the job cannot go on with others summing ({message.reason})")
        for index in message.lost:
            self._part_with(index)
            self._node.run_with_heartbeats(lambda index=index: self._runtime.exclude(index))  # type: ignore[misc]
        for index in message.joined:
            self._take_in(index)
        plan_installer = self._runtime.plan_installer
        self._node.send(messages.FreezeReport(epoch=message.epoch, near=plan_installer.near,
                                        progress=plan_installer.progress(message.lost, everything=bool(message.joined))))

    def connected(self) -> None:
        """Do what the scheduler has asked for before all peers were connected."""
        early, self._early = self._early, None
        if early is not None:
            self.freeze(early)

    def prepare(self, message: messages.Recover) -> None:
        """Prepare for the new owners; answer Ready once peers have said where they write to."""
        if self._frozen is None or self._frozen.epoch != message.epoch:
            raise ProtocolError(f"the scheduler recovers in epoch {message.epoch}, for which this node is not frozen")
        try:
            self._prepared = self._plans.make(lambda: self._runtime.plan_installer.prepare_owner_change(message))
        except CapacityError as exc:
            self._node.send(messages.PrepareFailed(
                generation=message.generation, reason=str(exc), ownable_nbytes=self._runtime.plan_installer.ownable_nbytes,
                room_nbytes=self._runtime.plan_installer.room_nbytes))
            return
        generation, succession = self._prepared
        self._plans.await_for(generation, succession)

    def commit(self, message: messages.Commit) -> bool:
        """Go on if *message* is the commit of what was prepared here; whether it is."""
        if self._prepared is None or self._prepared[0].plan.generation != message.generation:
            return False
        assert self._frozen is not None
        generation, succession = self._prepared
        frozen, self._frozen, self._prepared = self._frozen, None, None
        self._epochs.commit()
        self._plans.forget()
        self._runtime.succeed(generation, succession, message.order)
        self._plans.say_room()
        self.epoch = frozen.epoch
        self.count += bool(frozen.lost)
        self.n_joined += len(frozen.joined)
        if self._node.name == "node 0":
            moved = [part for unit in generation.plan.units for part in unit.parts if part.part in succession.parts]
            heirs = ", ".join(f"node {owner}" for owner in sorted({part.owner for part in moved}))
            what = f"{len(moved)} partitions are summed by {heirs} from now on" if moved else (
                "nothing was summed there" if frozen.lost else "everybody sums what he did")
            log.log(logging.WARNING if frozen.lost else logging.INFO, "the job goes on %s (%s): %s; epoch %d, after "
                    "%.0f ms", "without what it has lost" if frozen.lost else "with who has come", frozen.reason, what,
                    frozen.epoch, (time.monotonic() - self._since) * 1e3)
        return True
