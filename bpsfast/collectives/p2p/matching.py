"""Which receive gets which message: MPI's rules (MPI 4.1, section 3.5). Pure.

Of the messages that one rank sends to another on one channel, a receive takes the earliest that it matches; of the
receives that a message matches, it goes to the earliest. So two messages that could meet the same receive never
overtake each other, whatever else is waited for.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R")
A = TypeVar("A")
_Key = tuple[int, int | None, int | None]


@dataclass
class Matching(Generic[R, A]):
    """Receives without a message, and messages without a receive. Source and tag None, of receives: any.

    Looking up takes constant time unless source or tag is any; then it grows with the different (source, tag) of the
    messages that lie on the channel.
    """

    _receives: dict[_Key, deque[tuple[int, R]]] = field(default_factory=dict)
    _arrivals: dict[int, dict[tuple[int, int], deque[tuple[int, A]]]] = field(default_factory=dict)
    _n: int = 0

    def receive(self, channel: int, source: int | None, tag: int | None, receive: R) -> A | None:
        """Return the earliest message that *receive* matches, or keep it until one comes."""
        here = self._arrivals.get(channel)
        if here:
            if source is not None and tag is not None:
                key = (source, tag) if (source, tag) in here else None
            else:
                fitting = [each for each in here if source in (None, each[0]) and tag in (None, each[1])]
                key = min(fitting, key=lambda each: here[each][0][0], default=None)
            if key is not None:
                _, arrival = here[key].popleft()
                if not here[key]:
                    del here[key]
                if not here:
                    del self._arrivals[channel]
                return arrival
        self._n += 1
        self._receives.setdefault((channel, source, tag), deque()).append((self._n, receive))
        return None

    def arrive(self, channel: int, source: int, tag: int, arrival: A) -> R | None:
        """Return the earliest receive that matches the message *arrival*, or keep it until one is posted."""
        receives = self._receives
        best: _Key | None = None
        for key in ((channel, source, tag), (channel, None, tag), (channel, source, None), (channel, None, None)):
            if key in receives and (best is None or receives[key][0][0] < receives[best][0][0]):
                best = key
        if best is not None:
            _, receive = receives[best].popleft()
            if not receives[best]:
                del receives[best]
            return receive
        self._n += 1
        here = self._arrivals.setdefault(channel, {})
        here.setdefault((source, tag), deque()).append((self._n, arrival))
        return None

    def withdraw(self, receive: R) -> bool:
        """Forget *receive*; return False if it has met a message already."""
        return bool(self.take_receives(lambda source, each: each is receive))

    def waits(self, receive: R) -> bool:
        """Return whether *receive* has met no message yet. Looks at all of them."""
        return any(each is receive for queue in self._receives.values() for _, each in queue)

    def take_receives(self, chosen: Callable[[int | None, R], bool]) -> list[R]:
        """Remove the receives for which ``chosen(source, receive)`` holds and return them, the earliest first."""
        found: list[tuple[int, R]] = []
        for key, queue in list(self._receives.items()):
            found += [each for each in queue if chosen(key[1], each[1])]
            kept = deque(each for each in queue if not chosen(key[1], each[1]))
            if kept:
                self._receives[key] = kept
            else:
                del self._receives[key]
        return [receive for _, receive in sorted(found, key=lambda each: each[0])]

    def take_arrivals(self, chosen: Callable[[int, A], bool]) -> list[A]:
        """Remove the messages for which ``chosen(source, message)`` holds and return them, the earliest first."""
        found: list[tuple[int, A]] = []
        for here in self._arrivals.values():
            for key, queue in list(here.items()):
                found += [each for each in queue if chosen(key[0], each[1])]
                kept = deque(each for each in queue if not chosen(key[0], each[1]))
                if kept:
                    here[key] = kept
                else:
                    del here[key]
        self._arrivals = {channel: here for channel, here in self._arrivals.items() if here}
        return [arrival for _, arrival in sorted(found, key=lambda each: each[0])]

    def describe(self, channel: int) -> str:
        """Say which messages lie on *channel* without a receive: "rank 1 tag 7 (3 messages), ..."."""
        here = self._arrivals.get(channel) or {}
        parts = [f"rank {source} tag {tag}" + (f" ({len(queue)} messages)" if len(queue) > 1 else "")
                 for (source, tag), queue in sorted(here.items())[:8]]
        return ", ".join(parts + ["..."] * (len(here) > 8))
