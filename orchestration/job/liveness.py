"""Whose silence is too long. Pure: it is told what was heard of whom, and when.

Two things show that a node lives. A *message*, which its control loop has made, and which was read here: who sends none
for `lease_s` hangs, whatever else of it moves. And a *pulse*: any byte of its connection, at the time at which the
kernel got it. libzmq's native threads beat by themselves, so neither a busy interpreter there nor a late look here lets
anybody seem dead who is not.

A helper without a pulse for `helper_lease_s` is done without: a machine that was switched off or cut off, a process
that was stopped. That costs little, also if it comes back, and all wait for it otherwise. A node with ranks has the
whole lease, for its loss ends the job.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .. import messages as m


class HeartbeatMonitor:
    """Of the nodes of one job; *now*, in seconds, is any clock that only moves forward. Owner thread only.

    *helper_lease_s* 0: helpers have the whole lease, too.
    """

    def __init__(self, lease_s: float, helper_lease_s: float, now: float) -> None:
        self._lease_s = lease_s
        self._helper_lease_s = min(helper_lease_s, lease_s)
        self._last_tick = self._awake_since = now
        self._pulses: dict[bytes, float] = {}
        #: When a message of each node was read last.
        self.seen: dict[bytes, float] = {}

    def __contains__(self, sender: bytes) -> bool:
        return sender in self.seen

    def heard(self, now: float, sender: bytes) -> None:
        """Note a message of *sender*, who counts among the nodes from the first one on."""
        self.seen[sender] = now

    def forget(self, sender: bytes) -> None:
        """Await nothing more of *sender*."""
        del self.seen[sender]
        self._pulses.pop(sender, None)

    def restart(self, now: float, senders: Iterable[bytes]) -> None:
        """Await *senders*, and nobody else, from *now* on."""
        self.seen = dict.fromkeys(senders, now)
        self._pulses.clear()

    def pulse(self, sender: bytes, at: float | None) -> None:
        """Note when the last byte of *sender* came; None: nobody knows, and what was known counts no more."""
        if at is None:
            self._pulses.pop(sender, None)
        elif sender in self.seen:
            self._pulses[sender] = at

    def tick(self, now: float) -> None:
        """Note that the time is looked at: who is late himself has not read what others said meanwhile."""
        slept_s, self._last_tick = now - self._last_tick, now
        if slept_s > self._lease_s / 2:
            self.seen = {sender: seen + slept_s for sender, seen in self.seen.items()}
        if slept_s > self._helper_lease_s / 2:
            self._awake_since = now  # this machine may have stood still, and the kernel with it

    def quiet(self, now: float, is_helper: Callable[[bytes], bool]) -> list[bytes]:
        """Return the helpers whose pulse is to be felt now: they have said nothing for a while."""
        if not self._helper_lease_s:
            return []
        return [sender for sender, seen in self.seen.items()
                if now - seen >= self._helper_lease_s / 4 and is_helper(sender)]

    def silent(self, now: float, is_helper: Callable[[bytes], bool]) -> list[tuple[bytes, str]]:
        """Return who is to be called lost, and why: "silent for 10.0 s (lease_s = 10)"."""
        found = []
        for sender, seen in self.seen.items():
            if now - seen >= self._lease_s:
                found.append((sender, f"silent for {now - seen:.1f} s (lease_s = {self._lease_s:g})"))
            elif sender in self._pulses and self._helper_lease_s and is_helper(sender):
                # Nor was anything to be heard in the time in which this one sat up and listened.
                silent_s = now - max(seen, self._pulses[sender], self._awake_since)
                if silent_s >= self._helper_lease_s:
                    found.append((sender, f"silent for {silent_s:.1f} s (helper_lease_s = {self._helper_lease_s:g})"))
        return found


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

    def visited(self, now: float, message: m.ProbeResult) -> None:
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

    def ask(self, now: float, index: int, seen: float, others: Callable[[], Sequence[tuple[int, bytes]]]) -> m.Outgoing:
        """Return who is to visit node *index* now, of *others* (index and sender), if it was not *seen* for a while."""
        is_closed = index in self._closed
        if not is_closed and now - seen < self._lease_s / 2:
            return []
        if now - self._asked.get(index, _NEVER) < (min(DEAD_S / 2, self._lease_s / 8) if is_closed else
                                                   self._lease_s / 8):
            return []
        self._asked[index] = now
        after = sorted(others(), key=lambda other: (other[0] <= index, other[0]))
        return [(sender, m.ProbeRequest(node=index)) for _, sender in after[:_MOST_VISITORS]]
