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

from collections.abc import Callable, Iterable


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
