"""The node's communication thread: decides which partition is sent next over the network, and to which other node.

The engine reports what there is to send (`EVENT_FORWARD`: a partial to its owner, `EVENT_RESULT`: a result to every
node with ranks that push it) and what has arrived at the peer (`EVENT_DELIVERED`). Between the two is the queue of the
network card (`orchestration.priority.nic_queue`): the most urgent write first, and no more bytes under way than there
is credit. The native streams move the bytes; this thread never touches them.
"""
from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

from ..base.trace_records import SendLog
from ..orchestration.errors import StallError
from ..orchestration.priority.send_queue import ArrivalOrder, NicQueue, SendKey, WriteOrder, order_of
from ..pyx.engine import EVENT_DELIVERED, EVENT_FORWARD, EVENT_LOST, EVENT_RESULT, Engine
from .transport import WireLink

log = logging.getLogger("bpsfast.node")

#: How long one call of `Engine.events` sleeps at most; commands wake it.
_SLEEP_S = 1.0
#: How long other threads wait until the service has taken over a link.
_COMMAND_TIMEOUT_S = 30.0

#: Of `Engine.events`: kind, source, part, round, code, address, bytes.
Event = tuple[int, int, int, int, int, int, int]


class Write(NamedTuple):
    """One write to one node: the bytes of `part` in `round`. `send_key`: see `WriteOrder`; `flags` as in lane entries.

    `since_ns`: when it was ready to be sent, if that is traced.
    """

    part: int
    round: int
    flags: int
    address: int
    nbytes: int
    send_key: SendKey
    since_ns: int = 0


class ResultResend(NamedTuple):
    """The result of `round` of `part`, whose owner is lost, for the node behind `source`, which lacks it."""

    source: int
    part: int
    round: int
    address: int
    nbytes: int


class Dispatcher:
    """Runs the communication service of one node.

    Parameters
    ----------
    engine
        Its events are read here, and nowhere else.
    credit_nbytes
        Bytes that may be under way to one node.
    fifo
        Send in the order of arrival; else the most urgent first.
    on_lost
        Called from the dispatcher's thread with (source, errno) when a connection has ended.
    sends
        Log of when each write was ready and was sent; None: not traced. Only this thread writes into it.
    """

    def __init__(self, engine: Engine, credit_nbytes: int, on_lost: Callable[[int, int], None],
                 sends: SendLog | None = None, *, fifo: bool = False) -> None:
        self._engine = engine
        self._on_lost = on_lost
        self._sends = sends
        self._nic_queue: NicQueue[Write] = NicQueue(credit_nbytes)
        self._credit_nbytes = credit_nbytes
        self._links: dict[int, WireLink] = {}  # by source
        self._posted: dict[int, dict[int, Write]] = {}  # by source: the last write of each part, to be repeated if lost
        self._write_order: WriteOrder | ArrivalOrder = ArrivalOrder() if fifo else WriteOrder()
        self._order: tuple[int, ...] = ()
        self._first_parts: Mapping[int, int] = {}
        self._readers: Mapping[int, tuple[int, ...]] = {}
        self._commands: deque[Callable[[], None]] = deque()  # of other threads
        self._events: list[Event] = []  # read, and not handled yet
        self._stopping = self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="bpsfast-dispatch", daemon=True)
        self.error: Exception | None = None
        self._n_events = self._n_batches = self._n_partitions = self._n_reconnects = self._n_resent = 0
        self._cpu_ns = self._peak_queued = 0

    # -- any thread but the service's; all but `hold` and `abandon` take effect in this order, before later events -----

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, source: int, link: WireLink, turn: int = 0) -> None:
        """Add the node that the engine knows as *source*; return when that is done. *turn*: `place` of `NicQueue.add`.

        Raises `StallError` as `replace_link` does.
        """
        def add() -> None:
            self._links[source], self._posted[source] = link, {}
            self._nic_queue.add(source, turn)

        if self._thread.is_alive():
            self._do_now(add)
        else:
            add()

    def commit(self, order: tuple[int, ...], first_parts: Mapping[int, int], shares: Mapping[int, int],
               readers: Mapping[int, tuple[int, ...]]) -> None:
        """Use these integer ranks from now on: called just before the engine's own commit.

        *first_parts* gives, for each partition, the first one of its unit; *shares* by source the bytes of all
        partitions that are written to it; *readers*, for each partition that is summed here, who gets its result.
        """
        first_parts, shares, readers = dict(first_parts), dict(shares), dict(readers)  # the caller changes its own

        def commit() -> None:
            self._order, self._first_parts, self._readers = order, first_parts, readers
            self._nic_queue.plan(shares)

        self._commands.append(commit)

    def retire(self, parts: Collection[int], shares: Mapping[int, int]) -> None:
        """Forget *parts* as `forget` does: their numbers will be used again. *shares* as in `commit`, without them."""
        self._commands.append(partial(self._nic_queue.plan, dict(shares)))
        self.forget(parts)

    def forget(self, parts: Collection[int]) -> None:
        """Drop all knowledge of *parts*, of which nothing waits or is under way.

        For parts that were retired or given up: if they, or others with their numbers, come back, earlier writes of
        them must not be repeated over another link.
        """
        def forget() -> None:
            for part in parts:
                self._write_order.forget(part)
                for posted in self._posted.values():
                    posted.pop(part, None)

        self._do(forget)

    def set_credit(self, nbytes: int) -> None:
        """Allow *nbytes* under way to one node from now on."""
        def set_credit() -> None:
            self._credit_nbytes = nbytes
            self._nic_queue.set_credit(nbytes)

        self._do(set_credit)

    def hold(self, source: int) -> None:
        """Post nothing more to *source* until `replace_link`: its link is about to be closed. Takes effect at once."""
        self._nic_queue.hold(source)
        self._engine.wake()  # the next write may be another node's

    def replace_link(self, source: int, link: WireLink, awaited: Mapping[int, int]) -> None:
        """Go on writing to *source* over *link*, which is started here; its predecessor is held and closed.

        *awaited* gives for each part the round that has not arrived there: it is written again if it was written
        before. Its bytes are still in place: a partial until its result is published, a result until the round after
        the next, and both need what was not delivered. Returns when that is done.

        Raises `StallError` if the service does not answer.
        """
        self._do_now(partial(self._replace_link, source, link, awaited))

    def drop(self, source: int) -> None:
        """Post nothing more to *source*, which is lost, and forget what waits for it."""
        if source in self._links:
            def drop() -> None:
                self._links.pop(source, None)
                self._posted.pop(source, None)
                self._nic_queue.remove(source)

            self._nic_queue.hold(source)
            self._do(drop)

    def resend(self, resend: ResultResend) -> None:
        """Write a result to a node that lacks it, after its owner is lost. After `commit`."""
        def put() -> None:
            self._put(resend.source, Write(resend.part, resend.round, 0, resend.address, resend.nbytes,
                                           self._send_key_of(resend.part, is_result=True), time.monotonic_ns()))
            self._n_resent += 1

        self._do(put)

    def abandon(self) -> None:
        """Post nothing more: the job is over and links are being cut. Takes effect at once."""
        self._abandoned = True

    def stop(self) -> None:
        """End the thread and wait for it. What still waits is not sent."""
        self._stopping = True
        self._engine.wake()
        if self._thread.is_alive():
            self._thread.join()

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._engine.wake()

    def _do_now(self, command: Callable[[], None]) -> None:
        """Have the service's thread run *command*, and wait until it has."""
        done = threading.Event()

        def run() -> None:
            command()
            done.set()

        self._do(run)
        deadline = time.monotonic() + _COMMAND_TIMEOUT_S
        while not done.wait(0.05):
            if self.error is not None or time.monotonic() > deadline:
                raise StallError("the communication service did not take over a new link within "
                                 f"{_COMMAND_TIMEOUT_S:g} s, or failed ({self.error!r})")

    def counters(self) -> dict[str, int]:
        """Return counters: events, batches and partitions handled, links replaced ("reconnects"), results resent after
        the loss of an owner ("lent"), the queue's state, and the thread's CPU time in nanoseconds.
        """
        return {
            "events": self._n_events,
            "batches": self._n_batches,
            "partitions": self._n_partitions,
            "reconnects": self._n_reconnects,
            "lent": self._n_resent,
            "cpu_ns": self._cpu_ns,
            "queued": self._nic_queue.queued,
            "peak_queued": self._peak_queued,
            "credit_nbytes": self._credit_nbytes,
            "in_flight_nbytes": self._nic_queue.in_flight_nbytes,
            "peak_in_flight_nbytes": self._nic_queue.peak_nbytes,
        }

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                batch = self._engine.events(_SLEEP_S)
                self.handle(batch)
                if batch:
                    self._cpu_ns = time.thread_time_ns()
        except Exception as exc:
            # Without the dispatcher all ranks would hang: the control loop must know.
            log.exception("the communication service failed")
            self.error = exc
            self._on_lost(-1, 0)

    def handle(self, batch: list[Event]) -> None:
        """Run the commands of other threads, then handle the events of *batch*, and post what credit allows."""
        self._events += batch
        self._n_batches += bool(batch)
        self._run_commands()
        self._handle_events()
        self._pump()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _handle_events(self) -> None:
        """Queue what events ask for, and give credit back."""
        batch, self._events = self._events, []
        now_ns = time.monotonic_ns() if self._sends is not None else 0
        for kind, source, part, round_, code, address, nbytes in batch:
            if kind in (EVENT_DELIVERED, EVENT_FORWARD) and source not in self._links:
                continue  # it is lost; the new owner gets the write
            if kind == EVENT_DELIVERED:
                self._nic_queue.release(source, nbytes)
            elif kind == EVENT_FORWARD:
                key = self._send_key_of(part, is_result=False)
                self._put(source, Write(part, round_, code, address, nbytes, key, now_ns))
                self._n_partitions += 1
            elif kind == EVENT_RESULT:
                key = self._send_key_of(part, is_result=True)
                write = Write(part, round_, code, address, nbytes, key, now_ns)
                for peer in self._readers[part]:
                    self._put(peer, write)
                self._n_partitions += 1
            elif kind == EVENT_LOST:
                self._lose(source, code)
        self._n_events += len(batch)

    def _send_key_of(self, part: int, is_result: bool) -> SendKey:
        rank = self._order[self._first_parts[part]]
        return self._write_order.enter(part, rank, is_result, self._nic_queue.first_order)

    def _urgent_order(self, write: Write) -> int:
        """Return the order of *write* by urgency where it has none (fifo): traces show what ignoring it costs."""
        return order_of(write.round, self._order[self._first_parts[write.part]], False)

    def _put(self, source: int, write: Write) -> None:
        self._nic_queue.put(source, write, order=write.send_key.order, key=write.send_key.key, nbytes=write.nbytes)

    def _pump(self) -> None:
        """Post what credit allows."""
        while not self._abandoned and (found := self._nic_queue.pop()) is not None:
            source, write = found
            self._posted[source][write.part] = write
            if self._sends is not None:
                self._sends.add(write.since_ns, time.monotonic_ns(), source, write.part, write.round, write.nbytes,
                                write.send_key.order or self._urgent_order(write))
            stream = self._links[source].stream_of(write.part)
            try:
                stream.post(write.part, write.round, write.flags, write.address, write.nbytes)
            except ValueError:
                if not (self._abandoned or self._nic_queue.is_held(source)):  # else it was cut after the check
                    raise
        self._peak_queued = max(self._peak_queued, self._nic_queue.queued)

    def _replace_link(self, source: int, link: WireLink, awaited: Mapping[int, int]) -> None:
        self._events += self._engine.events(0.0)  # the last events of the old link, which is closed
        self._run_commands()  # those that came before these events: partitions of a commit, others that are retired
        self._handle_events()
        if source not in self._links:
            return  # it was lost meanwhile: there is nothing to write
        self._links[source], posted = link, self._posted[source]
        link.start(self._engine, source)
        self._nic_queue.resume(source)
        for part, round_ in awaited.items():
            write = posted.get(part)
            if write is not None and write.round == round_:
                del posted[part]  # queued below: a link that ends before must not queue it once more
                self._put(source, write)
        self._pump()
        self._n_reconnects += 1

    def _lose(self, source: int, code: int) -> None:
        if source in self._links:
            if self._nic_queue.is_held(source):
                return  # it is being replaced or dropped, or this comes from another of its streams
            self._nic_queue.hold(source)
        self._on_lost(source, code)
