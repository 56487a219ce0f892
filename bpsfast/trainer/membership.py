"""Which ranks take part in a job that goes on without lost ranks (the setting on_worker_loss).

The node tells its ranks of a loss before the first sum without the lost ranks is there. A rank reads that at the end of
the wait for such a sum at the latest, so what it learns here is true of the result that it gets.
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

    `pause_s`: how long nothing was summed on this rank's machine. `first_rounds`: by the name of each tensor that the
    lost ranks pushed, its first round without them, counted from 1 (modulo 2^32).
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
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Loss], object]] = []
        self._n_called = 0  # losses that the callbacks have been called for
        #: All ranks that the job goes on without.
        self.lost: frozenset[int] = frozenset()
        self.members = tuple(range(size))
        #: In the order in which they came.
        self.losses: list[Loss] = []

    def note(self, message: RanksLost) -> None:
        """Take what the node says of a loss. The mailbox calls it with one message at a time."""
        lost = frozenset(message.ranks)
        self.members = tuple(rank for rank in range(self._size) if rank not in lost)
        first_rounds: dict[str, int] = {}
        for unit, round in message.begins:
            first_rounds |= self._begin(unit, round, lost)
        self.losses.append(Loss(ranks=tuple(sorted(lost - self.lost)), members=self.members, reason=message.reason,
                                pause_s=message.pause_s, first_rounds=first_rounds))
        self.lost = lost  # last: other threads wait for it

    def update(self) -> None:
        """Learn of all losses that have preceded what this rank has waited for, and call the callbacks."""
        if not self.goes_on:
            return
        try:
            n_lost = self._n_lost()
        except ValueError:  # another thread has closed the session
            return
        if len(self.lost) < n_lost:
            self._mailbox.wait(lambda: True if len(self.lost) >= n_lost else None, self._timeout_s)
        while self._n_called < len(self.losses):
            with self._lock:
                due = self.losses[self._n_called:]
                self._n_called += len(due)
            for loss in due:
                for callback in list(self._callbacks):
                    callback(loss)

    def require(self, ranks: Collection[int], what: str) -> None:
        """Raise `PeerLostError` if one of *ranks* is lost, each of which *what* needs."""
        self.update()
        if not self.lost.isdisjoint(ranks):
            gone = ", ".join(map(str, sorted(self.lost.intersection(ranks))))
            raise PeerLostError(f"{what} needs rank {gone}, which is lost: {self.losses[-1].reason}. The job goes on "
                                "without it (on_worker_loss = continue), but only sums do without a rank")

    def call_on_loss(self, callback: Callable[[Loss], object]) -> None:
        """See `process.on_ranks_lost`."""
        if not callable(callback):
            raise ConfigError(f"on_ranks_lost({callback!r}): expected a function of one argument, the loss")
        self._callbacks.append(callback)

