"""Which ranks take part in a job that goes on without lost ranks (the setting on_worker_loss).

The node tells its ranks of a loss before the first sum without the lost ranks is there. For the program a rank is a
member until a sum without it is waited for: programs that wait for the same sums in the same order see the same members
at the same places, whatever each of them knows already.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import msgspec

from ..orchestration.errors import ConfigError, PeerLostError
from ..orchestration.messages import RanksLost
from .node_connection import Mailbox


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A loss that the job has survived: `ranks` are lost because of `reason`, `members` are left.

    `pause_s`: from when this rank's machine heard of the loss to when it went on to sum. `first_rounds`: by the name of
    each tensor that the lost ranks pushed, its first round without them, counted from 1 (modulo 2^32).
    """

    ranks: tuple[int, ...]
    members: tuple[int, ...]
    reason: str
    pause_s: float
    first_rounds: dict[str, int]


class Membership:
    """The ranks of a job of *size*, as one of them knows them. Any thread.

    *n_lost* returns how many the job goes on without; *mailbox* reads who they are. *begin* notes in a unit, by its
    number, the first round without some ranks, and returns the names of its tensors with the number of that round.
    """

    def __init__(self, size: int, goes_on: bool, n_lost: Callable[[], int], mailbox: Mailbox,
                 timeout_s: float, begin: Callable[[int, int, frozenset[int]], dict[str, int]]) -> None:
        self.goes_on = goes_on
        self._size = size
        self._n_lost = n_lost
        self._mailbox = mailbox
        self._timeout_s = timeout_s
        self._begin = begin
        self._lock = threading.RLock()
        self._callbacks: list[Callable[[Loss], object]] = []
        #: All ranks that the job goes on without, as far as this one knows.
        self.known_lost: frozenset[int] = frozenset()
        self._known: list[Loss] = []
        #: What the program has been told, and the losses behind that, the earliest first.
        self.members = tuple(range(size))
        self.losses: list[Loss] = []

    def note(self, message: RanksLost) -> None:
        """Take what the node says of a loss. The mailbox calls it with one message at a time."""
        lost = frozenset(message.ranks)
        members = tuple(rank for rank in range(self._size) if rank not in lost)
        first_rounds: dict[str, int] = {}
        for unit, round in message.begins:
            first_rounds |= self._begin(unit, round, lost)
        self._known.append(Loss(ranks=tuple(sorted(lost - self.known_lost)), members=members, reason=message.reason,
                                pause_s=message.pause_s, first_rounds=first_rounds))
        self.known_lost = lost  # last: other threads wait for it

    def waited_for(self, lost: frozenset[int]) -> None:
        """Note that a sum without the ranks *lost* is returned to the program: tell it of their loss first."""
        while len(self.losses) < len(self._known) and lost.issuperset(self._known[len(self.losses)].ranks):
            with self._lock:  # other threads that get such a sum wait until the callbacks have returned
                if len(self.losses) == len(self._known):
                    return
                loss = self._known[len(self.losses)]
                if not lost.issuperset(loss.ranks):
                    return
                self.members = loss.members
                self.losses.append(loss)
                for callback in list(self._callbacks):
                    callback(loss)

    def learn(self) -> None:
        """Learn of all losses that have preceded what this rank has waited for."""
        if not self.goes_on:
            return
        try:
            n_lost = self._n_lost()
        except ValueError:  # another thread has closed the session
            return
        if len(self.known_lost) < n_lost:
            self._mailbox.wait(lambda: True if len(self.known_lost) >= n_lost else None, self._timeout_s)

    def require(self, ranks: Collection[int], what: str) -> None:
        """Raise `PeerLostError` if one of *ranks* is lost, each of which *what* needs."""
        self.learn()
        if not self.known_lost.isdisjoint(ranks):
            gone = ", ".join(map(str, sorted(self.known_lost.intersection(ranks))))
            raise PeerLostError(f"{what} needs rank {gone}, which is lost: {self._known[-1].reason}. The job goes on "
                                "without it (on_worker_loss = continue), but only sums do without a rank")

    def call_on_loss(self, callback: Callable[[Loss], object]) -> None:
        """See `process.on_ranks_lost`."""
        if not callable(callback):
            raise ConfigError(f"on_ranks_lost({callback!r}): expected a function of one argument, the loss")
        self._callbacks.append(callback)

