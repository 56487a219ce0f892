"""Makes RDMA links again to peers whose RDMA link has failed; the job goes on by tcp meanwhile.

The node that dials the pair tries again and again, in a few threads for all such peers; the other node accepts. A link
is made as at the start, with a first write each way, and then waits here: `LinkChanges` changes over to it.
"""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .link import RdmaLink

log = logging.getLogger("bpsfast.node")

#: Between two attempts while nothing else connects the pair.
URGENT_PAUSE_S = 0.5
#: The pause before the first attempt; each failed attempt doubles it.
FIRST_PAUSE_S = 1.0
_MOST_PAUSE_S = 8.0
_JOIN_S = 1.0
#: Threads in all, and of those that dial peers which something else connects. While this node's own port is down, an
#: attempt fails at once; over a network that drops packets it takes ten seconds, at most a minute.
_MOST_THREADS, _MOST_IN_BACKGROUND = 32, 16


@dataclass
class _Return:
    """A peer to which an RDMA link is wanted, over *least_rails* of *rails* or more. `link`: the one that was made."""

    rails: Mapping[str, str]
    least_rails: int
    pause_s: float
    is_urgent: bool
    dials: bool
    link: RdmaLink | None = None


class RdmaReturns:
    """The peers of one node that RDMA is to reach again. Any thread.

    *dial*: a function that makes a link to a node over at least this many of these rails, or raises. It is called in
    threads that end once nothing is left to dial.
    *notify*: called from any thread when `take` has something new.
    """

    def __init__(self, dial: Callable[[int, Mapping[str, str], int], RdmaLink], notify: Callable[[], None]) -> None:
        self._dial = dial
        self._notify = notify
        self._changed = threading.Condition()
        self._wanted: dict[int, _Return] = {}
        self._due: dict[int, float] = {}  # when to dial each node that waits for it
        self._threads: list[threading.Thread] = []
        self._n_threads = self._n_waiting = self._n_in_background = 0
        self._closed = False

    def seek(self, index: int, rails: Mapping[str, str], least_rails: int, *, dials: bool,
             pause_s: float = FIRST_PAUSE_S, is_urgent: bool = False) -> None:
        """Seek a link to node *index*, over *least_rails* or more of *rails*, until `stop`; this node *dials* or waits.

        *rails*: those of a link before; see `RdmaLink.rails`. The first attempt comes after *pause_s* seconds, at once
        if *is_urgent*: then nothing else connects the pair.
        """
        self.stop(index)
        with self._changed:
            if self._closed:
                return
            wanted = self._wanted[index] = _Return(rails, least_rails, 0.0 if is_urgent else pause_s, is_urgent, dials)
            self._plan(index, wanted)

    def seeks(self, index: int | None = None) -> bool:
        """Whether a link to node *index* is wanted, or made and not taken (None: to any node)."""
        with self._changed:
            return bool(self._wanted) if index is None else index in self._wanted

    def wanted(self, index: int) -> tuple[Mapping[str, str], int] | None:
        """Return the rails of a link to node *index*, and how many it needs at least; None if no link is wanted now."""
        with self._changed:
            wanted = self._wanted.get(index)
            return (wanted.rails, wanted.least_rails) if wanted is not None and wanted.link is None else None

    def offer(self, index: int, link: RdmaLink) -> None:
        """Keep *link*, which is made, for `take`; close it if it is not wanted any more."""
        with self._changed:
            wanted = self._wanted.get(index)
            if wanted is not None and wanted.link is None and len(link.rails) >= wanted.least_rails:
                wanted.link = link
                self._due.pop(index, None)
        if wanted is not None and wanted.link is link:
            self._notify()
        else:
            link.close()

    def links(self) -> list[RdmaLink]:
        """Return the links that are made and were not taken. They stay this object's until `take`."""
        with self._changed:
            return [wanted.link for wanted in self._wanted.values() if wanted.link is not None]

    def take(self, index: int) -> RdmaLink | None:
        """Hand over the link to node *index*, if one is made; no other one is sought."""
        with self._changed:
            wanted = self._wanted.get(index)
            if wanted is None or wanted.link is None:
                return None
            del self._wanted[index]
            return wanted.link

    def drop(self, index: int) -> None:
        """Close the link to node *index* that was made and has ended; seek another one."""
        with self._changed:
            wanted = self._wanted.get(index)
            link = wanted.link if wanted is not None else None
            if wanted is not None and link is not None:
                wanted.link = None
                self._plan(index, wanted)
        if link is not None:
            link.close()

    def stop(self, index: int) -> None:
        """Seek no link to node *index* any more; close one that was not taken."""
        with self._changed:
            wanted = self._wanted.pop(index, None)
            self._due.pop(index, None)
            self._changed.notify_all()  # a thread may have nothing more to wait for
        if wanted is not None and wanted.link is not None:
            wanted.link.close()

    def close(self) -> None:
        """Stop all. A thread that is dialling ends with the process. Idempotent."""
        with self._changed:
            self._closed = True
            indices = list(self._wanted)
        for index in indices:
            self.stop(index)
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _plan(self, index: int, wanted: _Return) -> None:
        """Have a thread dial node *index* after the pause of *wanted*, if this node does. The caller has the lock."""
        if not wanted.dials or self._closed:
            return
        self._due[index] = time.monotonic() + wanted.pause_s
        if len(self._due) > self._n_waiting and self._n_threads < _MOST_THREADS:
            thread = threading.Thread(target=self._run, name="bpsfast-rdma-return", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:  # a limit is reached; running threads dial the node later
                log.warning("no thread to make an RDMA link to node %d again: %s%s", index, exc,
                            "" if self._n_threads else "; it is tried when the next thread starts")
            else:
                self._n_threads += 1
                self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        self._changed.notify_all()

    def _run(self) -> None:
        while (attempt := self._next()) is not None:
            self._attempt(*attempt)
            del attempt  # else it would keep a closed link while this thread waits

    def _attempt(self, index: int, wanted: _Return) -> None:
        try:
            self.offer(index, self._dial(index, wanted.rails, wanted.least_rails))
        except Exception as exc:  # also of a device that is closed meanwhile: another one may lead there
            log.debug("no RDMA link to node %d yet: %r", index, exc)
            if not wanted.is_urgent:
                wanted.pause_s = min(2 * max(wanted.pause_s, FIRST_PAUSE_S), max(wanted.pause_s, _MOST_PAUSE_S))
        wanted.pause_s = max(wanted.pause_s, URGENT_PAUSE_S)  # also where links are made and end at once
        with self._changed:
            self._n_in_background -= not wanted.is_urgent
            if self._wanted.get(index) is wanted and wanted.link is None and not self._closed:
                self._due[index] = time.monotonic() + wanted.pause_s  # this thread waits for it, too
            self._changed.notify_all()

    def _next(self) -> tuple[int, _Return] | None:
        """Wait for the next attempt, which counts from now on; None if nothing is left to dial, and the thread ends."""
        with self._changed:
            while self._due:
                now = time.monotonic()
                has_room = self._n_in_background < _MOST_IN_BACKGROUND
                open_ = {index: when for index, when in self._due.items()
                         if has_room or self._wanted[index].is_urgent}
                ready = [index for index, when in open_.items() if when <= now]
                if ready:
                    chosen = min(ready, key=lambda index: (not self._wanted[index].is_urgent, self._due[index]))
                    del self._due[chosen]
                    self._n_in_background += not self._wanted[chosen].is_urgent
                    return chosen, self._wanted[chosen]
                self._n_waiting += 1
                self._changed.wait(min(open_.values()) - now if open_ else None)
                self._n_waiting -= 1
            self._n_threads -= 1
            return None
