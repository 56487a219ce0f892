"""The epochs of a job as one node knows them: whose connections are of this job as it is now.

Each loss of a node, and each node that comes, begins an epoch (`orchestration.job.losses`). A dialler says the newest
one that it knows. A node that was left behind hears of none any more, so nobody that has committed the next one lets it
in, whatever else it knows.

Nodes that do belong learn of an epoch at different times. Nobody commits it before all of them have stopped for it, so
who says less than the last commit is old, or has said it a moment ago: it says it anew. A node that comes late hears
only of the changes that it takes part in; until then it has to say no more than what was committed when it was
announced.
"""
from __future__ import annotations

import threading
from collections.abc import Collection


class Epochs:
    """Those of one node, beginning with *epoch*. Any thread."""

    def __init__(self, epoch: int = 0) -> None:
        self._lock = threading.Lock()
        self._known = self._committed = epoch
        self._newcomers: dict[int, int] = {}  # node index -> what was committed when it was announced
        self._taken_in: set[int] = set()

    @property
    def known(self) -> int:
        """The newest epoch, committed or not: what this node says of itself."""
        with self._lock:
            return self._known

    def begin(self, epoch: int) -> None:
        """Begin with *epoch*, the last one that the job has committed: this node is welcome to it."""
        with self._lock:
            self._known = self._committed = epoch

    def expect(self, index: int) -> None:
        """Know that node *index* comes late."""
        with self._lock:
            self._newcomers[index] = self._committed

    def freeze(self, epoch: int, joined: Collection[int]) -> None:
        """Know of *epoch*, for which this node has stopped; the nodes *joined*, which came late, hear of it too."""
        with self._lock:
            self._known = max(self._known, epoch)
            self._taken_in.update(joined)

    def commit(self) -> None:
        """The job goes on in the newest epoch: no less will do from now on."""
        with self._lock:
            self._committed = self._known
            for index in self._taken_in:
                self._newcomers.pop(index, None)
            self._taken_in.clear()

    def least_of(self, index: int) -> int:
        """Return the least epoch that node *index* has to know."""
        with self._lock:
            return self._newcomers.get(index, self._committed)
