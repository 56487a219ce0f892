"""The communication service: one thread that decides what is written next to each node over a wire.

The engine says what there is to send (`EVENT_FORWARD`: a partial to its owner, `EVENT_RESULT`: a result to every
node with ranks) and what has arrived at the other side (`EVENT_DELIVERED`). In between stands one
`CreditQueue` per destination: most urgent first, never more bytes under way than its credit. Moving the bytes is
the native streams' work; this thread never touches them.
"""
from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..orchestration.credit_queue import CreditQueue, write_order
from ..orchestration.errors import StallError
from ..pyx.engine import EVENT_DELIVERED, EVENT_FORWARD, EVENT_LOST, EVENT_RESULT, Engine
from ..transport import WireLink

log = logging.getLogger("bpsfast.node")

#: How long one call of `Engine.events` sleeps; only a bound, `stop` wakes it.
_SLEEP_S = 1.0
_DETOUR_TIMEOUT_S = 30.0


class Write(NamedTuple):
    """One write to one node: the bytes of `part` in `round`, its partial or its result. `flags` as in lane entries."""

    part: int
    round: int
    flags: int
    address: int
    nbytes: int
    is_result: bool


class Detour(NamedTuple):
    """From now on `link` leads to `source`, which has not got `awaited` (part -> round) over the link before."""

    source: int
    link: WireLink
    awaited: Mapping[int, int]
    taken: threading.Event


class Destination:
    """A node behind a wire: its link, what waits for it, and what was posted last of each part. The dispatcher's own.

    `lost` is set from the control loop's thread, too: nothing is posted from then on.
    """

    def __init__(self, link: WireLink, has_ranks: bool, credit_nbytes: int) -> None:
        self.link = link
        self.has_ranks = has_ranks
        self.queue: CreditQueue[Write] = CreditQueue(credit_nbytes)
        self.posted: dict[int, Write] = {}
        self.lost = False


class Dispatcher:
    """Runs the communication service of one node.

    Parameters
    ----------
    engine
        Whose events it reads; nobody else may.
    credit_nbytes
        Bytes that may be under way to one node.
    on_lost
        Called from the dispatcher's thread with (source, errno) when a connection is gone.
    """

    def __init__(self, engine: Engine, credit_nbytes: int, on_lost: Callable[[int, int], None]) -> None:
        self._engine = engine
        self._credit_nbytes = credit_nbytes
        self._on_lost = on_lost
        self._destinations: dict[int, Destination] = {}
        self._order: tuple[int, ...] = ()
        self._first_parts: dict[int, int] = {}
        self._detours: deque[Detour] = deque()
        self._stopping = self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="bpsfast-dispatch", daemon=True)
        self.error: Exception | None = None
        self._n_events = self._n_batches = self._n_partitions = self._n_detours = self._cpu_ns = 0

    def add(self, source: int, link: WireLink, has_ranks: bool) -> None:
        """Add the node that the engine knows as *source*. Before `start`."""
        self._destinations[source] = Destination(link, has_ranks, self._credit_nbytes)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def commit(self, order: tuple[int, ...], first_parts: Mapping[int, int]) -> None:
        """Use these integer ranks from now on: called just before the engine's own commit, from any thread.

        *first_parts* gives, for each partition, the first one of its unit.
        """
        self._order, self._first_parts = order, dict(first_parts)

    def hold(self, source: int) -> None:
        """Post nothing more to *source* until `detour`: its link is about to be closed. Any thread."""
        self._destinations[source].lost = True

    def detour(self, source: int, link: WireLink, awaited: Mapping[int, int]) -> None:
        """Go on writing to *source* over *link*, which is started here; its predecessor is held and closed.

        *awaited* says, part by part, which round has not arrived there: it is written again if it was written before.
        Its bytes are where they were: a partial until its result is published, a result until the round after the
        next, and both need what was not delivered. Any thread but the service's; returns when that has taken over.

        Raises
        ------
        StallError
            If the service does not answer.
        """
        detour = Detour(source, link, awaited, threading.Event())
        self._detours.append(detour)
        self._engine.wake()
        if not detour.taken.wait(_DETOUR_TIMEOUT_S):
            raise StallError(f"the communication service did not take over a new link within {_DETOUR_TIMEOUT_S:g} s")

    def abandon(self) -> None:
        """Post nothing more: the job is over and links are being cut. Any thread."""
        self._abandoned = True

    def stop(self) -> None:
        """End the thread and wait for it. What still waits is not sent."""
        self._stopping = True
        self._engine.wake()
        if self._thread.is_alive():
            self._thread.join()

    def counters(self) -> dict[str, int]:
        """Return events, batches, partitions and detours handled, and the thread's own CPU time in nanoseconds."""
        queues = [destination.queue for destination in self._destinations.values()]
        return {
            "events": self._n_events,
            "batches": self._n_batches,
            "partitions": self._n_partitions,
            "detours": self._n_detours,
            "cpu_ns": self._cpu_ns,
            "queued": sum(queue.queued for queue in queues),
            "in_flight_nbytes": sum(queue.in_flight_nbytes for queue in queues),
            "peak_in_flight_nbytes": max((queue.peak_nbytes for queue in queues), default=0),
        }

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                batch = self._engine.events(_SLEEP_S)
                if batch:
                    self.handle(batch)
                    self._cpu_ns = time.thread_time_ns()
                while self._detours:
                    self._take(self._detours.popleft())
        except Exception as exc:
            # A dead dispatcher is a hang for everybody: the control loop must hear of it.
            log.exception("the communication service failed")
            self.error = exc
            self._on_lost(-1, 0)

    def handle(self, batch: list[tuple[int, int, int, int, int, int, int]]) -> None:
        """Queue what the events of *batch* ask for, give credit back, and post what credit allows."""
        touched: set[int] = set()
        for kind, source, part, round_, code, address, nbytes in batch:
            if kind == EVENT_DELIVERED:
                self._destinations[source].queue.release(nbytes)
                touched.add(source)
            elif kind == EVENT_FORWARD:
                self._put(source, Write(part, round_, code, address, nbytes, is_result=False))
                touched.add(source)
                self._n_partitions += 1
            elif kind == EVENT_RESULT:
                write = Write(part, round_, code, address, nbytes, is_result=True)
                for peer, destination in self._destinations.items():
                    if destination.has_ranks:
                        self._put(peer, write)
                        touched.add(peer)
                self._n_partitions += 1
            elif kind == EVENT_LOST:
                self._lose(source, code)
        self._n_events += len(batch)
        self._n_batches += 1
        for source in touched:
            self._pump(self._destinations[source])

    def _put(self, source: int, write: Write) -> None:
        order = write_order(self._order, self._first_parts[write.part], write.is_result)
        self._destinations[source].queue.put(write, order=order, key=write.part, nbytes=write.nbytes)

    def _pump(self, destination: Destination) -> None:
        while not (destination.lost or self._abandoned) and (write := destination.queue.pop()) is not None:
            destination.posted[write.part] = write
            lane = destination.link.lane_of(write.part)
            try:
                lane.post(write.part, write.round, write.flags, write.address, write.nbytes)
            except ValueError:
                if not (self._abandoned or destination.lost):  # else the link was cut between the look and the post
                    raise

    def _take(self, detour: Detour) -> None:
        self.handle(self._engine.events(0.0))  # what the old link had still to say: it is closed, so that is all
        destination = self._destinations[detour.source]
        destination.link, destination.lost = detour.link, False
        detour.link.start(self._engine, detour.source)
        destination.queue.forget_in_flight()
        for part, round_ in detour.awaited.items():
            write = destination.posted.get(part)
            if write is not None and write.round == round_:
                self._put(detour.source, write)
        self._pump(destination)
        self._n_detours += 1
        detour.taken.set()

    def _lose(self, source: int, code: int) -> None:
        destination = self._destinations.get(source)
        if destination is not None:
            if destination.lost:
                return  # its other streams
            destination.lost = True
        self._on_lost(source, code)
