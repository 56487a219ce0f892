"""The communication service: one thread that decides what is written next to each node over a wire.

The engine says what there is to send (`EVENT_FORWARD`: a partial to its owner, `EVENT_RESULT`: a result to every
node with ranks that push it) and what has arrived at the other side (`EVENT_DELIVERED`). In between stands the queue of
the card (`orchestration.order.card_queue`): most urgent first, never more bytes under way than there is credit. Moving
the bytes is the native streams' work; this thread never touches them.
"""
from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ..orchestration.errors import StallError
from ..orchestration.priority.send_queue import ArrivalOrder, NicQueue, SendKey, WriteOrder, order_of
from ..pyx.engine import EVENT_DELIVERED, EVENT_FORWARD, EVENT_LOST, EVENT_RESULT, Engine
from ..trace import SendLog
from .transport import WireLink

log = logging.getLogger("bpsfast.node")

#: How long one call of `Engine.events` sleeps; only a bound, `stop` wakes it.
_SLEEP_S = 1.0
_DETOUR_TIMEOUT_S = 30.0


class Write(NamedTuple):
    """One write to one node: the bytes of `part` in `round`. `place`: see `write_order`; `flags` as in lane entries.

    `since_ns`: when it was ready to leave, if that is traced.
    """

    part: int
    round: int
    flags: int
    address: int
    nbytes: int
    place: SendKey
    since_ns: int = 0


class ResultResend(NamedTuple):
    """The result of `round` of `part`, of which the owner is lost and which the node behind `source` lacks."""

    source: int
    part: int
    round: int
    address: int
    nbytes: int


class ReplaceLink(NamedTuple):
    """From now on `link` leads to `source`, which has not got `awaited` (part -> round) over the link before."""

    source: int
    link: WireLink
    awaited: Mapping[int, int]
    taken: threading.Event


class AddLink(NamedTuple):
    """From now on the node behind `source` is written to over `link`."""

    source: int
    link: WireLink
    place: int
    taken: threading.Event


class Destination:
    """A node behind a wire: its link, and what was posted last of each part, until it is to be posted again.

    The dispatcher's own.
    """

    def __init__(self, link: WireLink) -> None:
        self.link = link
        self.posted: dict[int, Write] = {}


class Dispatcher:
    """Runs the communication service of one node.

    Parameters
    ----------
    engine
        Whose events it reads; nobody else may.
    credit_nbytes
        Bytes that may be under way to one node.
    fifo
        Send what was there first; else what is most urgent.
    on_lost
        Called from the dispatcher's thread with (source, errno) when a connection is gone.
    sends
        Where to note when each write could leave and did; None: nowhere. Nobody else writes into it.
    """

    def __init__(self, engine: Engine, credit_nbytes: int, on_lost: Callable[[int, int], None],
                 sends: SendLog | None = None, *, fifo: bool = False) -> None:
        self._engine = engine
        self._on_lost = on_lost
        self._sends = sends
        self._card: NicQueue[Write] = NicQueue(credit_nbytes)
        self._destinations: dict[int, Destination] = {}
        self._write_order: WriteOrder | ArrivalOrder = ArrivalOrder() if fifo else WriteOrder()
        self._order: tuple[int, ...] = ()
        self._first_parts: dict[int, int] = {}
        self._shares: dict[int, int] = {}
        self._readers: dict[int, tuple[int, ...]] = {}
        self._planned = self._shares
        self._arrivals: deque[AddLink] = deque()
        self._detours: deque[ReplaceLink] = deque()
        self._forgotten: deque[Collection[int]] = deque()
        self._dropped: deque[int] = deque()
        self._lent: deque[ResultResend] = deque()
        self._credit_nbytes = self._wanted_nbytes = credit_nbytes
        self._stopping = self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="bpsfast-dispatch", daemon=True)
        self.error: Exception | None = None
        self._n_events = self._n_batches = self._n_partitions = self._n_detours = self._n_lent = 0
        self._cpu_ns = self._peak_queued = 0

    def add(self, source: int, link: WireLink, place: int = 0) -> None:
        """Add the node that the engine knows as *source*; *place* as in `NicQueue.add`.

        Any thread but the service's; returns when that knows it. Raises `StallError` as `replace_link` does.
        """
        arrival = AddLink(source, link, place, threading.Event())
        self._arrivals.append(arrival)
        if not self._thread.is_alive():
            self._keep_up()  # not started
        else:
            self._await(arrival.taken)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def commit(self, order: tuple[int, ...], first_parts: Mapping[int, int], shares: Mapping[int, int],
               readers: Mapping[int, tuple[int, ...]]) -> None:
        """Use these integer ranks from now on: called just before the engine's own commit, from any thread.

        *first_parts* gives, for each partition, the first one of its unit; *shares* by source the bytes of all
        partitions that are written to it; *readers*, for each partition that is summed here, who gets its result.
        """
        self._order, self._first_parts, self._shares = order, dict(first_parts), dict(shares)
        self._readers = dict(readers)

    @property
    def order(self) -> tuple[int, ...]:
        """The integer rank of each part; 0 is most urgent."""
        return self._order

    def retire(self, parts: Collection[int], shares: Mapping[int, int]) -> None:
        """Forget *parts*, of which nothing waits or is under way: their numbers will be used again. Any thread.

        *shares* as in `commit`, without them.
        """
        self._shares = dict(shares)
        self.forget(parts)

    def forget(self, parts: Collection[int]) -> None:
        """Know nothing more of *parts*, of which nothing waits or is under way: what comes of them is new. Any thread.

        For parts that were given up: should they, or others under their numbers, come back, what was once written of
        them is not to be written again over a detour.
        """
        self._forgotten.append(parts)
        self._engine.wake()

    def set_credit(self, nbytes: int) -> None:
        """Let *nbytes* be under way to one node from now on. Any thread."""
        self._wanted_nbytes = nbytes
        self._engine.wake()

    def hold(self, source: int) -> None:
        """Post nothing more to *source* until `replace_link`: its link is about to be closed. Any thread."""
        self._card.hold(source)
        self._engine.wake()  # others may have its turn

    def replace_link(self, source: int, link: WireLink, awaited: Mapping[int, int]) -> None:
        """Go on writing to *source* over *link*, which is started here; its predecessor is held and closed.

        *awaited* says, part by part, which round has not arrived there: it is written again if it was written before.
        Its bytes are where they were: a partial until its result is published, a result until the round after the
        next, and both need what was not delivered. Any thread but the service's; returns when that has taken over.

        Raises
        ------
        StallError
            If the service does not answer.
        """
        replace_link = ReplaceLink(source, link, awaited, threading.Event())
        self._detours.append(replace_link)
        self._await(replace_link.taken)

    def _await(self, taken: threading.Event) -> None:
        self._engine.wake()
        deadline = time.monotonic() + _DETOUR_TIMEOUT_S
        while not taken.wait(0.05):
            if self.error is not None or time.monotonic() > deadline:
                raise StallError(f"the communication service did not take over a new link within {_DETOUR_TIMEOUT_S:g} "
                                 f"s, or failed ({self.error!r})")

    def drop(self, source: int) -> None:
        """Post nothing more to *source*, which is lost, and forget what waits for it. Any thread."""
        if source in self._destinations:
            self._card.hold(source)
            self._dropped.append(source)
            self._engine.wake()

    def resend(self, resend: ResultResend) -> None:
        """Write a result to a node that lacks it, after its owner is lost. Any thread, after `commit`."""
        self._lent.append(resend)
        self._engine.wake()

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
        """Return events, batches, partitions and detours handled, results lent to nodes that lacked them when their
        owner was lost, and the thread's own CPU time in nanoseconds.
        """
        return {
            "events": self._n_events,
            "batches": self._n_batches,
            "partitions": self._n_partitions,
            "detours": self._n_detours,
            "lent": self._n_lent,
            "cpu_ns": self._cpu_ns,
            "queued": self._card.queued,
            "peak_queued": self._peak_queued,
            "credit_nbytes": self._credit_nbytes,
            "in_flight_nbytes": self._card.in_flight_nbytes,
            "peak_in_flight_nbytes": self._card.peak_nbytes,
        }

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                batch = self._engine.events(_SLEEP_S)
                self._keep_up()
                if batch:
                    self.handle(batch)
                    self._cpu_ns = time.thread_time_ns()
                else:
                    self._pump()
                while self._detours:
                    self._take(self._detours.popleft())
        except Exception as exc:
            # A dead dispatcher is a hang for everybody: the control loop must hear of it.
            log.exception("the communication service failed")
            self.error = exc
            self._on_lost(-1, 0)

    def handle(self, batch: list[tuple[int, int, int, int, int, int, int]]) -> None:
        """Queue what the events of *batch* ask for, give credit back, and post what credit allows."""
        if self._shares is not self._planned:
            self._planned = self._shares
            self._card.plan(self._planned)
        now_ns = time.monotonic_ns() if self._sends is not None else 0
        for kind, source, part, round_, code, address, nbytes in batch:
            if kind in (EVENT_DELIVERED, EVENT_FORWARD) and source not in self._destinations:
                continue  # it is lost; what was for it goes to its successor
            if kind == EVENT_DELIVERED:
                self._card.release(source, nbytes)
            elif kind == EVENT_FORWARD:
                place = self._place_of(part, is_result=False)
                self._put(source, Write(part, round_, code, address, nbytes, place, now_ns))
                self._n_partitions += 1
            elif kind == EVENT_RESULT:
                place = self._place_of(part, is_result=True)
                write = Write(part, round_, code, address, nbytes, place, now_ns)
                for peer in self._readers[part]:
                    self._put(peer, write)
                self._n_partitions += 1
            elif kind == EVENT_LOST:
                self._lose(source, code)
        self._n_events += len(batch)
        self._n_batches += 1
        self._pump()
        self._peak_queued = max(self._peak_queued, self._card.queued)

    def _keep_up(self) -> None:
        """Take over what other threads have told, before any event that may come of it."""
        while self._arrivals:
            arrival = self._arrivals.popleft()
            self._destinations[arrival.source] = Destination(arrival.link)
            self._card.add(arrival.source, arrival.place)
            arrival.taken.set()
        while self._dropped:
            source = self._dropped.popleft()
            self._destinations.pop(source, None)
            self._card.remove(source)
        while self._forgotten:
            for part in self._forgotten.popleft():
                self._write_order.forget(part)
                for destination in self._destinations.values():
                    destination.posted.pop(part, None)
        while self._lent:
            resend = self._lent.popleft()
            self._put(resend.source, Write(resend.part, resend.round, 0, resend.address, resend.nbytes,
                                         self._place_of(resend.part, is_result=True), time.monotonic_ns()))
            self._n_lent += 1
        if self._wanted_nbytes != self._credit_nbytes:
            self._credit_nbytes = self._wanted_nbytes
            self._card.set_credit(self._credit_nbytes)

    def _place_of(self, part: int, is_result: bool) -> SendKey:
        rank = self._order[self._first_parts[part]]
        return self._write_order.enter(part, rank, is_result, self._card.first_order)

    def _urgent_order(self, write: Write) -> int:
        """Return what the order of *write* would be by urgency, where it has none: a trace is to show what that costs.
        """
        return order_of(write.round, self._order[self._first_parts[write.part]], False)

    def _put(self, source: int, write: Write) -> None:
        self._card.put(source, write, order=write.place.order, key=write.place.key, nbytes=write.nbytes)

    def _pump(self) -> None:
        while not self._abandoned and (found := self._card.pop()) is not None:
            source, write = found
            destination = self._destinations[source]
            destination.posted[write.part] = write
            if self._sends is not None:
                self._sends.add(write.since_ns, time.monotonic_ns(), source, write.part, write.round, write.nbytes,
                                write.place.order or self._urgent_order(write))
            lane = destination.link.stream_of(write.part)
            try:
                lane.post(write.part, write.round, write.flags, write.address, write.nbytes)
            except ValueError:
                if not (self._abandoned or self._card.is_held(source)):  # else it was cut between the look and the post
                    raise

    def _take(self, replace_link: ReplaceLink) -> None:
        if replace_link.source not in self._destinations:
            replace_link.taken.set()  # it is lost meanwhile: nothing is to be written
            return
        batch = self._engine.events(0.0)  # what the old link had still to say: it is closed, so that is all
        self._keep_up()  # after `events`, which takes wake-ups; parts that are retired are not to be written again
        self.handle(batch)
        destination = self._destinations[replace_link.source]
        destination.link = replace_link.link
        replace_link.link.start(self._engine, replace_link.source)
        self._card.resume(replace_link.source)
        for part, round_ in replace_link.awaited.items():
            write = destination.posted.get(part)
            if write is not None and write.round == round_:
                del destination.posted[part]  # it waits: should this link end before its turn, that is once enough
                self._put(replace_link.source, write)
        self._pump()
        self._n_detours += 1
        replace_link.taken.set()

    def _lose(self, source: int, code: int) -> None:
        if source in self._dropped:
            return
        if source in self._destinations:
            if self._card.is_held(source):
                return  # its other streams
            self._card.hold(source)
        self._on_lost(source, code)
