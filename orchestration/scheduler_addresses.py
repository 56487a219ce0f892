"""The addresses at which a job's scheduler may be: those of a list, with all addresses of each name."""
from __future__ import annotations

import contextlib
from collections.abc import Sequence

from .host_lookup import HostLookup, format_address, is_address

#: Interval of look-ups of a name while no scheduler answers.
_LOOK_AGAIN_S = 1.0


class _Entry:
    """One address of the list; `found`: what its host means, as far as it is known."""

    def __init__(self, host: str, port: int, now: float) -> None:
        self.host, self.port = host, port
        self.found: list[str] = [host] if is_address(host) else []
        self.look_at = now
        self.lookup: HostLookup | None = None


class SchedulerAddresses:
    """Chooses one of *addresses* to dial, and the next one in turn. Owner thread only; *now* is a monotonic clock.

    The first one comes first, though its name may be resolved later than others, until `keep` is called.
    A thread looks up each name, again and again while `look_up` is called; until the resolver answers, its last answer
    counts. `str` gives the list.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], now: float) -> None:
        self._entries = [_Entry(host, port, now) for host, port in addresses]
        self._chosen: tuple[_Entry, str] | None = None
        #: Whether the first address of the list is to be chosen as soon as it is known.
        self.awaits_first = True

    def __str__(self) -> str:
        return ", ".join(format_address(entry.host, entry.port) for entry in self._entries)

    @property
    def _all(self) -> list[tuple[_Entry, str]]:
        return [(entry, host) for entry in self._entries for host in entry.found]

    @property
    def are_several(self) -> bool:
        """Whether there is more than one address to try, as far as names are resolved."""
        return len(self._entries) > 1 or len(self._all) > 1

    def choose(self) -> tuple[str, int] | None:
        """Return the IP address and port to dial; None while no name is resolved."""
        first = self._entries[0]
        if self.awaits_first and first.found:
            self.awaits_first, self._chosen = False, (first, first.found[0])
        if self._chosen not in self._all:
            # A name has other addresses now: those are tried first.
            same = [each for each in self._all if self._chosen is not None and each[0] is self._chosen[0]]
            self._chosen = next(iter([*same, *self._all]), None)
        return None if self._chosen is None else (self._chosen[1], self._chosen[0].port)

    def keep(self) -> None:
        """Note that a scheduler answers at the chosen address: the first one need not be tried before."""
        self.awaits_first = False

    @property
    def is_at_first(self) -> bool:
        """Whether the chosen address is one of the first of the list."""
        return self._chosen is not None and self._chosen[0] is self._entries[0]

    def advance(self) -> None:
        """Choose the next address, after the last one the first."""
        found = self._all
        if self.choose() is not None and self._chosen is not None:
            self._chosen = found[(found.index(self._chosen) + 1) % len(found)]

    @property
    def unresolved(self) -> list[str]:
        """The names of which no address is known."""
        return [entry.host for entry in self._entries if not entry.found]

    def look_up(self, now: float) -> None:
        """Begin to look up the names whose turn it is."""
        for entry in self._entries:
            if entry.lookup is None and now >= entry.look_at and not is_address(entry.host):
                entry.lookup, entry.look_at = HostLookup(entry.host), now + _LOOK_AGAIN_S

    def take_answers(self, timeout_s: float = 0.0) -> None:
        """Take the resolver's answers; wait for the first name for up to *timeout_s*."""
        for entry in self._entries:
            lookup, entry_s, timeout_s = entry.lookup, timeout_s, 0.0
            if lookup is None or not lookup.wait(entry_s):
                continue
            entry.lookup = None
            with contextlib.suppress(OSError):
                lookup.address(0.0)
                # In the order that is known: a resolver may give several in any order.
                entry.found = [*(host for host in entry.found if host in lookup.addresses),
                               *(host for host in lookup.addresses if host not in entry.found)]
