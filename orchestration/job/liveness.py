"""Tells which nodes live, by their messages (`HeartbeatMonitor`) and by probes of their ports (`NodeProbes`). Pure.

A *message* comes from a node's control loop: a node that sends none for `lease_s` hangs. A *pulse* is any byte of its
connection, at the time at which the kernel received it. libzmq's native threads send heartbeats by themselves, so
neither a busy interpreter there nor a delay here makes a living node seem dead. A helper without a pulse for
`helper_lease_s` is dropped: losing it costs little, even if it comes back, and otherwise all ranks wait for it. A node
with ranks has the whole lease, because its loss ends the job.

A node that is not heard, or whose connection has closed, may be cut off from the scheduler alone. So others are asked
to connect to its data port (`ProbeRequest`, `ProbeResult`). While it answers one of them it lives, and has
`start_timeout_s` to reach the scheduler again; else `lease_s`. It counts as lost sooner only if its process is proven
dead: its connection to the scheduler has closed, and its data port refuses connections. One of the two alone may be a
reset connection, or a firewall whose rules are changing.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .. import messages as m


class HeartbeatMonitor:
    """When each node of one job was heard; *now*, in seconds, is any monotonic clock. Owner thread only.

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
        """Note a message of *sender*, which is watched from its first message on."""
        self.seen[sender] = now

    def forget(self, sender: bytes) -> None:
        """Stop watching *sender*."""
        del self.seen[sender]
        self._pulses.pop(sender, None)

    def restart(self, now: float, senders: Iterable[bytes]) -> None:
        """Watch *senders*, and no others, from *now* on."""
        self.seen = dict.fromkeys(senders, now)
        self._pulses.clear()

    def pulse(self, sender: bytes, at: float | None) -> None:
        """Note when the last byte of *sender* came; None: not known, also no more what was known."""
        if at is None:
            self._pulses.pop(sender, None)
        elif sender in self.seen:
            self._pulses[sender] = at

    def tick(self, now: float) -> None:
        """Note that the clock was looked at: after a delay here, messages sent meanwhile are still unread."""
        slept_s, self._last_tick = now - self._last_tick, now
        if slept_s > self._lease_s / 2:
            self.seen = {sender: seen + slept_s for sender, seen in self.seen.items()}
        if slept_s > self._helper_lease_s / 2:
            self._awake_since = now  # this machine may have been suspended, and the kernel with it

    def quiet(self, now: float, is_helper: Callable[[bytes], bool]) -> list[bytes]:
        """Return the helpers whose pulse is needed now, because they have sent nothing for a while."""
        if not self._helper_lease_s:
            return []
        return [sender for sender, seen in self.seen.items()
                if now - seen >= self._helper_lease_s / 4 and is_helper(sender)]

    def silent(self, now: float, is_helper: Callable[[bytes], bool]) -> list[tuple[bytes, str]]:
        """Return the lost connections with the reason: "silent for 10.0 s (lease_s = 10)"."""
        found = []
        for sender, seen in self.seen.items():
            if now - seen >= self._lease_s:
                found.append((sender, f"silent for {now - seen:.1f} s (lease_s = {self._lease_s:g})"))
            elif sender in self._pulses and self._helper_lease_s and is_helper(sender):
                # only the time counts in which this process was awake to listen
                silent_s = now - max(seen, self._pulses[sender], self._awake_since)
                if silent_s >= self._helper_lease_s:
                    found.append((sender, f"silent for {silent_s:.1f} s (helper_lease_s = {self._helper_lease_s:g})"))
        return found


#: Time for which both signs of death must last for a node with ranks: reloading a firewall takes less.
DEAD_S = 1.0
#: The same where the job goes on without the node, as the mistake would cost less: its ranks, and not the job.
GOES_ON_DEAD_S = 0.25
#: The most nodes at a time that probe one node.
_MOST_PROBING = 3
_NEVER = float("-inf")


class NodeProbes:
    """What is known of the nodes of one job, by index; *now* is any monotonic clock. Owner thread only.

    *dead_s*: for how long both signs of death must last for a node with ranks.
    """

    def __init__(self, lease_s: float, timeout_s: float, now: float, dead_s: float = DEAD_S) -> None:
        self._dead_s = dead_s
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._last_tick = now
        self._closed: dict[int, float] = {}
        self._answered: dict[int, float] = {}
        self._refused: dict[int, tuple[float, float]] = {}  # the first and the last time in a row
        self._asked: dict[int, float] = {}

    def tick(self, now: float) -> None:
        """Note that the clock was looked at: after a delay here, nodes that reconnected meanwhile are still unread."""
        slept_s, self._last_tick = now - self._last_tick, now
        if slept_s > DEAD_S / 2:
            self._closed = {index: since + slept_s for index, since in self._closed.items()}

    def closed(self, now: float, index: int) -> None:
        """Note that the connection of node *index* to the scheduler has closed."""
        self._closed.setdefault(index, now)

    def probed(self, now: float, message: m.ProbeResult) -> None:
        """Take the result of a probe."""
        if message.outcome == "answers":
            self._answered[message.node] = now
            self._refused.pop(message.node, None)
        elif message.outcome == "refused":
            since = self._refused[message.node][0] if self.is_refused(now, message.node) else now
            self._refused[message.node] = since, now

    def is_closed(self, index: int) -> bool:
        """Whether the connection of node *index* has closed, without a new one."""
        return index in self._closed

    def is_refused(self, now: float, index: int) -> bool:
        """Whether the data port of node *index* has just refused a connection."""
        return index in self._refused and now - self._refused[index][1] <= DEAD_S

    def is_dead(self, now: float, index: int, has_ranks: bool) -> bool:
        """Whether node *index* is proven dead: its connection is closed and its data port refuses.

        If it *has_ranks*, both must have lasted.
        """
        return (index in self._closed and self.is_refused(now, index)
                and now - max(self._closed[index], self._refused[index][0]) >= (self._dead_s if has_ranks else 0.0))

    def lives(self, now: float, index: int, seen: float) -> bool:
        """Whether node *index*, last heard at *seen*, is known to live, and still has time to reconnect."""
        return now - self._answered.get(index, _NEVER) < self._lease_s and now - seen < self._timeout_s

    def ask(self, now: float, index: int, seen: float, others: Callable[[], Sequence[tuple[int, bytes]]]) -> m.Outgoing:
        """Return the probes of node *index*, last heard at *seen*, that are due now; *others*: who is to ask."""
        is_closed = index in self._closed
        if not is_closed and now - seen < self._lease_s / 2:
            return []
        if now - self._asked.get(index, _NEVER) < min(self._dead_s / 2 if is_closed else self._lease_s,
                                                      self._lease_s / 8):
            return []
        self._asked[index] = now
        after = sorted(others(), key=lambda other: (other[0] <= index, other[0]))
        return [(sender, m.ProbeRequest(node=index)) for _, sender in after[:_MOST_PROBING]]
