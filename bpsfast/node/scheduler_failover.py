"""The time without a scheduler, as one node goes through it: data goes on, and the next scheduler is told everything.

    lost       the connection is over: another one is dialled, over which `ControlLog.account` goes first
    recall     a scheduler has missed something, or others have: the same over the connection that stands
    resume     it knows all; what was prepared and not committed is dropped
    the end    all ranks have left, and there is nobody to say so: nodes tell each other, over their data ports
"""
from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from ..orchestration import messages
from ..orchestration.failover.control_log import ControlLog
from .peers import Peers
from .plans import Plans

if TYPE_CHECKING:
    from .main import Node

log = logging.getLogger("bpsfast.node")

#: A scheduler that comes back so soon should find somebody to tell it that all is over.
_LAST_WAIT_S = 2.0


class SchedulerFailover:
    """All times without a scheduler of *node*, which has joined. Called by the control loop's thread."""

    def __init__(self, node: Node, ledger: ControlLog, peers: Peers, plans: Plans, timeout_s: float) -> None:
        self._node = node
        self._ledger = ledger
        self._peers = peers
        self._plans = plans
        self._timeout_s = timeout_s
        self._since: float | None = None
        self._has_announced = False
        self._welcome: messages.Welcome | None = None

    @property
    def lasts(self) -> bool:
        """Whether the scheduler is lost, and no other one knows yet what this node knows."""
        return self._since is not None

    def welcomed(self, message: messages.Welcome) -> None:
        """Know who is in the job; a scheduler is there."""
        self._welcome, self._since = message, None

    def begin(self, address: str) -> None:
        """The connection to the scheduler at *address* is lost: tell whoever answers over the next one."""
        if self._since is None:
            self._since = time.monotonic()
            self._say("the scheduler at %s is lost: the job goes on without it, and waits up to %g s (start_timeout_s) "
                      "for another one there", address, self._timeout_s)
        self._tell_all(0)

    def recalled(self, message: messages.RejoinRequest) -> None:
        """Tell the scheduler that asks."""
        self._since = self._since or time.monotonic()
        if self._welcome is not None:
            self._tell_all(message.number)

    def resumed(self, message: messages.Resume) -> None:
        """A scheduler knows all that there is to know."""
        if self._since is not None:
            self._say("the job has a scheduler again, after %.1f s", time.monotonic() - self._since)
        self._since = None
        self._plans.resumed()

    def is_over(self) -> bool:
        """Take leave if all ranks here have left; whether all of the job have, while there is no scheduler."""
        if self._since is None or self._welcome is None or not self._node.runtime.connected:
            return False
        me = self._welcome.nodes[self._welcome.index]
        if not self._ledger.left >= set(me.ranks):
            return False
        if me.ranks and not self._has_announced:
            self._has_announced = True
            self._peers.announce_shutdown()
        peer_shutdowns = self._peers.peer_shutdowns
        for index in peer_shutdowns:
            self._ledger.record_peer_left(index)
        others = {node.index for node in self._welcome.nodes if node.ranks} - {me.index}
        return (peer_shutdowns >= others and (not me.ranks or self._peers.has_announced_shutdown)
                and time.monotonic() - self._since >= _LAST_WAIT_S)

    def _tell_all(self, recall: int) -> None:
        for message in self._ledger.account(recall):
            self._node.say(message)

    def _say(self, words: str, *values: object) -> None:
        one_voice = self._welcome is not None and self._welcome.index == 0
        log.log(logging.WARNING if one_voice else logging.INFO, words, *values)
