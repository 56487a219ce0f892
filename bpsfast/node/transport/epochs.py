"""The epochs of a job as one node knows them, which decide whose connections are accepted.

Each loss of a node, and each node that joins, begins an epoch. A dialler sends the newest epoch that it knows. A node
that was dropped learns of no further epoch, so nodes that have committed the next one refuse it.

Other nodes learn of an epoch at different times, but none commits it before all of them have stopped for it. So a
connection with an epoch before the last commit is old, or was made a moment too early and is tried again. A joining
node learns only of changes in which it takes part; until then the epoch that was committed when it was announced is
enough.
"""
from __future__ import annotations

import threading
from collections.abc import Collection


class Epochs:
    """The epochs that one node knows, beginning with *epoch*. Any thread."""

    def __init__(self, epoch: int = 0) -> None:
        self._lock = threading.Lock()
        self._known = self._committed = epoch
        self._newcomers: dict[int, int] = {}  # node index -> what was committed when it was announced
        self._taken_in: set[int] = set()

    @property
    def known(self) -> int:
        """The newest epoch, committed or not: what this node sends when it dials."""
        with self._lock:
            return self._known

    def begin(self, epoch: int) -> None:
        """Begin with *epoch*, the last one that the job has committed when this node is admitted."""
        with self._lock:
            self._known = self._committed = epoch

    def expect(self, index: int) -> None:
        """Note that node *index* joins the running job."""
        with self._lock:
            self._newcomers[index] = self._committed

    def freeze(self, epoch: int, joined: Collection[int]) -> None:
        """Note *epoch*, for which this node has stopped; the nodes *joined* learn of it, too."""
        with self._lock:
            self._known = max(self._known, epoch)
            self._taken_in.update(joined)

    def commit(self) -> None:
        """Note that the job goes on in the newest epoch: earlier ones are refused from now on."""
        with self._lock:
            self._committed = self._known
            for index in self._taken_in:
                self._newcomers.pop(index, None)
            self._taken_in.clear()

    def least_of(self, index: int) -> int:
        """Return the lowest epoch that node *index* has to know."""
        with self._lock:
            return self._newcomers.get(index, self._committed)
