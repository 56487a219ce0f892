"""Executes the scheduler's plans on a node in two phases: prepare and answer Ready, then commit or forget."""
from __future__ import annotations

import logging
import time

from ..orchestration import messages
from ..orchestration.errors import CapacityError, ProtocolError
from .control_loop import ControlLoop
from .event_loop import EventLoop
from .generation import Generation
from .local_ranks import LocalRanks
from .owner_changes import OwnerTransfer
from .runtime import NodeRuntime
from .transport import TalkingLink

log = logging.getLogger("bpsfast.node")

#: Between two checks whether what is under way has arrived.
_POLL_S = 0.001


class Plans:
    """Prepares one generation at a time; plans that come before all peers are connected wait."""

    def __init__(self, node: ControlLoop, loop: EventLoop, runtime: NodeRuntime, local_ranks: LocalRanks,
                 timeout_s: float) -> None:
        self._node = node
        self._loop = loop
        self._runtime = runtime
        self._local_ranks = local_ranks
        self._timeout_s = timeout_s
        self._generation: Generation | None = None
        self._early: list[messages.Plan] = []
        self._transfer: OwnerTransfer | None = None  # that of `_generation`, if it is one
        self._remarked = False

    def connected(self) -> None:
        """Prepare the plans that came before the last peer was connected."""
        early, self._early = self._early, []
        for plan in early:
            self.prepare(plan)

    def prepare(self, plan: messages.Plan) -> None:
        """Allocate, bind and share all of *plan*; answer Ready once the peers have sent their addresses."""
        if not self._runtime.connected:
            self._early.append(plan)
            return
        try:
            self._generation = self._node.run_with_heartbeats(lambda: self._runtime.installer.prepare(plan))
        except CapacityError as exc:
            log.warning("generation %d was refused: %s", plan.generation, exc)
            self._node.send(messages.PrepareFailed(
                generation=plan.generation, reason=str(exc), ownable_nbytes=self._runtime.installer.ownable_nbytes))
            return
        self._check_after(self._timeout_s, plan)
        self._announce()

    def peer_message(self, link: TalkingLink, message: messages.Message, fds: tuple[int, ...]) -> None:
        """Handle a message of a peer: it may be the last one that Ready waited for."""
        self._runtime.peer_message(link, message, fds, self._generation)
        self._announce()

    def await_for(self, generation: Generation, transfer: OwnerTransfer) -> None:
        """Answer Ready for *generation*, which is prepared, once peers have sent their addresses and all has arrived.

        If it does not arrive in time, owners that were to give partitions up keep them.
        """
        self._generation = generation
        self._transfer = transfer
        # The scheduler has waited for longer, and ends the job after start_timeout_s.
        self._check_after(self._timeout_s / 2 if transfer.given_up else self._timeout_s, generation.plan)
        self._announce()

    def forget(self) -> None:
        """Release what was prepared and not committed: there will be no commit."""
        if self._generation is not None and not self._generation.is_owner_change:
            self._runtime.installer.drop(self._generation)
        self._generation = None

    def drop_early(self) -> None:
        """Forget the plans that came before the last peer was connected: they are proposed again."""
        self._early.clear()

    def resumed(self) -> None:
        """Forget what was prepared for a scheduler that is lost, and never committed."""
        self.drop_early()
        if self._generation is not None:
            self.forget()
            self.report_room()

    def without(self, index: int) -> None:
        """Wait no longer for messages of node *index*: its link has ended, or it has told everything at once."""
        self._runtime.installer.forget_early(index)
        if self._generation is not None:
            self._generation.awaited.discard(index)
            self._announce()

    def commit(self, message: messages.Commit) -> None:
        """Activate the prepared generation and tell the ranks where its results appear."""
        generation, self._generation = self._generation, None
        if generation is None or generation.plan.generation != message.generation:
            raise ProtocolError(f"the scheduler commits generation {message.generation}, which was not prepared here")
        self._runtime.commit(generation, message.order)
        remark = generation.plan.remark
        if remark and not self._remarked and self._node.name == "node 0" and self._runtime.installer.uses_wires:
            self._remarked = True  # on one node, and once
            log.warning("%s", remark)
        if generation.plan.choice and self._node.name == "node 0":
            log.info("%s", generation.plan.choice)
        self._local_ranks.declare(generation, self._runtime.installer)

    def retired(self, message: messages.Retired) -> None:
        """Release what retired units use, before any plan that uses their numbers again."""
        self._runtime.retire(message.units)
        self.report_room()

    def refused(self, message: messages.DeclareFailed) -> None:
        """Forget the prepared generation if it has one of the refused names; tell the ranks."""
        if self._generation is not None and self._generation.names & set(message.names):
            self._runtime.installer.drop(self._generation)
            self._generation = None
            self.report_room()
        self._local_ranks.tell_all(message)

    def report_room(self) -> None:
        """Tell the scheduler how much this node can own now, if its memory is bounded."""
        nbytes = self._runtime.installer.ownable_nbytes
        if nbytes >= 0:
            self._node.send(messages.MemoryFreed(ownable_nbytes=nbytes))

    def _announce(self) -> None:
        generation = self._generation
        if generation is not None and not generation.awaited and not generation.announced:
            if generation.is_owner_change and self._transfer is not None and not self._transfer.arrived:
                self._loop.call_at(time.monotonic() + _POLL_S, self._announce)
                return
            generation.announced = True
            self._node.send(messages.Ready(generation=generation.plan.generation,
                                           ownable_nbytes=self._runtime.installer.ownable_nbytes))

    def _check_after(self, wait_s: float, plan: messages.Plan) -> None:
        self._loop.call_at(time.monotonic() + wait_s, lambda: self._check(plan, wait_s))

    def _check(self, plan: messages.Plan, wait_s: float) -> None:
        generation = self._generation
        if generation is None or generation.plan is not plan or generation.announced:
            return
        if generation.awaited:
            names = ", ".join(f"node {index}" for index in sorted(generation.awaited))
            reason = f"{names} did not send the addresses of results and slots within {wait_s:g} s"
        else:
            assert self._transfer is not None
            reason = f"what was under way when owners were to change did not arrive within {wait_s:g} s: " \
                     f"{self._transfer.missing}"
        generation.announced = True  # this is the answer
        self._node.send(messages.PrepareFailed(generation=plan.generation, reason=reason,
                                               ownable_nbytes=self._runtime.installer.ownable_nbytes))
