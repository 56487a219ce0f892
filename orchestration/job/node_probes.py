"""Signs that a node lives, or does not, besides what the scheduler hears of it: what other nodes find out. Pure.

A node that is not heard, or whose connection has closed, may be cut off from the scheduler alone. So others are asked
to visit it: to have its data port prove that it is that node's (`Visit`, `Visited`). While it answers one of them it
lives, and has as long to reach the scheduler again as a node has that has lost it: `start_timeout_s`. Else `lease_s`
counts. Sooner than that it is gone only if its process is proven dead: its connection to the scheduler has closed, and
nobody listens at its data port. One of the two alone is a reset, or a firewall whose rules are changing.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import messages as m

Outgoing = list[tuple[bytes, m.Message]]

#: A node with ranks must give both signs of death for so long: firewalls are reloaded in less.
DEAD_S = 1.0
#: So many nodes at a time are asked to visit one.
_MOST_VISITORS = 3
_NEVER = float("-inf")


class NodeProbes:
    """Of the nodes of one job, by index; *now* is any clock that only moves forward. Owner thread only."""

    def __init__(self, lease_s: float, timeout_s: float, now: float) -> None:
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._last_tick = now
        self._closed: dict[int, float] = {}
        self._answered: dict[int, float] = {}
        self._refused: dict[int, tuple[float, float]] = {}  # the first and the last time in a row
        self._asked: dict[int, float] = {}

    def tick(self, now: float) -> None:
        """Note that the time is looked at: after a sleep, who has come back meanwhile is still to be read."""
        slept_s, self._last_tick = now - self._last_tick, now
        if slept_s > DEAD_S / 2:
            self._closed = {index: since + slept_s for index, since in self._closed.items()}

    def closed(self, now: float, index: int) -> None:
        """Note that the connection of node *index* to the scheduler has closed."""
        self._closed.setdefault(index, now)

    def visited(self, now: float, message: m.Visited) -> None:
        """Take what a node has found where another one should be."""
        if message.outcome == "answers":
            self._answered[message.node] = now
            self._refused.pop(message.node, None)
        elif message.outcome == "refused":
            since = self._refused[message.node][0] if self.is_refused(now, message.node) else now
            self._refused[message.node] = since, now

    def is_closed(self, index: int) -> bool:
        """Whether the connection of node *index* has closed, and none has taken its place."""
        return index in self._closed

    def is_refused(self, now: float, index: int) -> bool:
        """Whether somebody has just found that nobody listens at the data port of node *index*."""
        return index in self._refused and now - self._refused[index][1] <= DEAD_S

    def is_dead(self, now: float, index: int, dead_s: float = DEAD_S) -> bool:
        """Whether node *index* is proven dead: for *dead_s* its connection is closed, and its data port refuses."""
        return (index in self._closed and self.is_refused(now, index)
                and now - max(self._closed[index], self._refused[index][0]) >= dead_s)

    def lives(self, now: float, index: int, seen: float) -> bool:
        """Whether node *index*, which the scheduler has heard last when it was *seen*, is known to live, and has time.
        """
        return now - self._answered.get(index, _NEVER) < self._lease_s and now - seen < self._timeout_s

    def ask(self, now: float, index: int, seen: float, others: Callable[[], Sequence[tuple[int, bytes]]]) -> Outgoing:
        """Return who is to visit node *index* now, of *others* (index and sender), if it was not *seen* for a while."""
        is_closed = index in self._closed
        if not is_closed and now - seen < self._lease_s / 2:
            return []
        if now - self._asked.get(index, _NEVER) < (min(DEAD_S / 2, self._lease_s / 8) if is_closed else
                                                   self._lease_s / 8):
            return []
        self._asked[index] = now
        after = sorted(others(), key=lambda other: (other[0] <= index, other[0]))
        return [(sender, m.Visit(node=index)) for _, sender in after[:_MOST_VISITORS]]
