"""The node's dispatcher: which partition is sent next over the network, and to which other node.

The engine gives `bpsfast.pyx.dispatch.Dispatch` what there is to send, a partial for its owner or a result for every
node with ranks that push it, and the streams give credit back: the most urgent write first, and no more bytes under way
than there is credit (`orchestration.priority.send_queue`). That runs in the engine's and the streams' threads, without
Python. Here are the decisions that come with a plan or with the loss of a node, and the thread that hears of losses.
"""
from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeVar

from ..base.trace_records import Limits, SendLog
from ..orchestration.errors import BpsError, CapacityError, ProtocolError
from ..pyx.dispatch import Dispatch
from ..pyx.engine import EVENT_LOST, NOBODY, Engine
from .transport import WireLink

log = logging.getLogger("bpsfast.node")

T = TypeVar("T")

#: How long one call of `Engine.events` sleeps at most; `stop` wakes it.
_SLEEP_S = 1.0


class ResultResend(NamedTuple):
    """The result of `round` of `part`, whose owner is lost, for the node behind `source`, which lacks it."""

    source: int
    part: int
    round: int
    address: int
    nbytes: int


class Dispatcher:
    """Sends what the engine of one node has summed. For the control loop's thread; `handle` is the dispatcher's own.

    Parameters
    ----------
    engine
        Its events are read here, and nowhere else.
    credit_nbytes
        Bytes that may be under way to one node.
    fifo
        Send in the order of arrival; else the most urgent first.
    on_lost
        Called from the dispatcher's thread with (source, errno) when a connection has ended; (-1, 0): nothing is sent
        any more because of `error`.
    limits
        Of which rounds, and how many records, a trace is kept; see `sends`.
    """

    def __init__(self, engine: Engine, credit_nbytes: int, on_lost: Callable[[int, int], None],
                 limits: Limits | None = None, *, fifo: bool = False) -> None:
        self._engine = engine
        self._on_lost = on_lost
        self._limits = limits or Limits(0)
        self._native = Dispatch(credit_nbytes, engine, fifo=fifo, **self._limits._asdict())
        self._links: dict[int, WireLink] = {}  # by source
        self._numbers: dict[int, int] = {}  # of the links: each that replaces another has the next one
        self._lock = threading.Lock()  # a loss is handled before or after a link is replaced
        self._lost_early: dict[int, int] = {}  # source -> errno: its new link has ended before it was used
        self._first_parts: dict[int, int] = {}  # as the native dispatch knows them
        self._readers: dict[int, tuple[int, ...]] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="bpsfast-dispatch", daemon=True)
        self.error: Exception | None = None
        self._n_reconnects = self._n_resent = 0

    def start(self) -> None:
        """Start the thread that hears of losses."""
        self._thread.start()

    def add(self, source: int, link: WireLink, turn: int = 0) -> None:
        """Add the node that the engine knows as *source*. *turn*: `place` of `NicQueue.add`."""
        self._links[source], self._numbers[source] = link, 0
        self._native.add(source, turn)

    def commit(self, order: tuple[int, ...], first_parts: Mapping[int, int], shares: Mapping[int, int],
               readers: Mapping[int, tuple[int, ...]]) -> None:
        """Use these integer ranks from now on: called just before the engine's own commit, when all links are started.

        *first_parts* gives, for each partition, the first one of its unit; *shares* by source the bytes of all
        partitions that are written to it; *readers*, for each partition that is summed here, who gets its result.
        """
        for source, link in self._links.items():
            link.route(self._native, source)
        self._native.commit(order, _news(self._first_parts, first_parts), _news(self._readers, readers))
        self._native.plan(shares)

    def retire(self, parts: Collection[int], shares: Mapping[int, int]) -> None:
        """Forget *parts* as `forget` does: their numbers will be used again. *shares* as in `commit`, without them."""
        self._native.plan(shares)
        self.forget(parts)

    def forget(self, parts: Collection[int]) -> None:
        """Drop all knowledge of *parts*, of which nothing waits or is under way.

        For parts that were retired or given up: if they, or others with their numbers, come back, earlier writes of
        them must not be repeated over another link.
        """
        self._native.forget(parts)

    def set_credit(self, nbytes: int) -> None:
        """Allow *nbytes* under way to one node from now on."""
        self._native.set_credit(nbytes)

    def hold(self, source: int) -> None:
        """Post nothing more to *source* until `resume`: its link is about to be closed. Takes effect at once."""
        self._native.hold(source)

    def start_link(self, source: int, link: WireLink) -> bool:
        """Start *link* in place of its predecessor, which is held and closed; return whether *source* is still there.

        Nothing is written over it before `resume`.
        """
        if source not in self._links:
            return False  # it was lost meanwhile
        with self._lock:
            self._links[source] = link
            self._numbers[source] += 1
            self._lost_early.pop(source, None)
        link.start(self._engine, source, self._numbers[source])
        return True

    def resume(self, source: int, awaited: Mapping[int, int]) -> None:
        """Go on writing to *source* over its new link, which `start_link` has started.

        *awaited* gives for each part the round that has not arrived there: it is written again if it was written
        before. Its bytes are still in place: a partial until its result is published, a result until the round after
        the next, and both need what was not delivered.
        """
        if source not in self._links:
            return
        self._links[source].route(self._native, source)
        with self._lock:
            code = self._lost_early.pop(source, None)
            self._native.resume(source, awaited)
            if code is not None:
                self._native.hold(source)
        self._n_reconnects += 1
        if code is not None:
            self._on_lost(source, code)

    def drop(self, source: int) -> None:
        """Post nothing more to *source*, which is lost, and forget what waits for it."""
        self._links.pop(source, None)
        self._native.remove(source)

    def resend(self, resend: ResultResend) -> None:
        """Write a result to a node that lacks it, after its owner is lost. After `commit`."""
        self._n_resent += self._native.send_result(*resend)

    def abandon(self) -> None:
        """Post nothing more: the job is over and links are being cut. Takes effect at once."""
        self._native.abandon()

    def stop(self) -> None:
        """End the thread and wait for it; what still waits is not sent."""
        self._native.abandon()
        self._stopping = True
        self._engine.wake()
        if self._thread.is_alive():
            self._thread.join()

    def sends(self) -> SendLog:
        """Return what was sent and when, within the limits. After `stop`."""
        found = SendLog(self._limits)
        for since_ns, posted_ns, source, part, round_, nbytes, order in self._native.sent():
            found.add(since_ns, posted_ns, source, part, round_, nbytes, order)
        return found

    def counters(self) -> dict[str, int]:
        """Return counters: events and partitions handled, links replaced ("reconnects"), results resent after the loss
        of an owner ("lent"), the queue's state.
        """
        return {**self._native.counters(), "reconnects": self._n_reconnects, "lent": self._n_resent}

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.handle(self._engine.events(_SLEEP_S))
        except Exception as exc:
            # Without the dispatcher all ranks would hang: the control loop must know.
            self._fail(exc)

    def handle(self, events: Collection[tuple[int, int, int, int, int, int, int]]) -> None:
        """Report what was lost, once for each source."""
        for kind, source, _, _, code, _, link_number in events:
            assert kind == EVENT_LOST, "others are the native dispatch's"
            if source == NOBODY and self._native.failure is not None:
                self._fail(_error_of(*self._native.failure))
            elif self._is_news(source, code, link_number):
                self._on_lost(source, code)

    def _is_news(self, source: int, code: int, link_number: int) -> bool:
        """Post nothing more to *source*, which is lost; return whether its loss is reported for the first time."""
        with self._lock:
            if source not in self._links:
                return True
            is_engines = code == errno.EPROTO and link_number == 0  # which knows of no links
            if link_number != self._numbers[source] and not is_engines:
                return False  # the link was replaced meanwhile
            if self._native.hold(source):
                return True
            self._lost_early[source] = code  # by this link it is being replaced, or another of its streams has told
            return False

    def _fail(self, error: Exception) -> None:
        log.error("the communication service failed: %s", error, exc_info=error)
        self.error = error
        self._on_lost(-1, 0)


def _news(known: dict[int, T], found: Mapping[int, T]) -> dict[int, T]:
    """Return what of *found* is not in *known*, and make *known* the same."""
    news = {key: value for key, value in found.items() if known.get(key) != value}
    known.update(news)
    if len(known) != len(found):
        for key in known.keys() - found.keys():
            del known[key]
    return news


_REASONS = {
    errno.ENOENT: "no plan has told who gets it, or how urgent it is",
    errno.ENOTCONN: "there is no connection to it",
    errno.EDESTADDRREQ: "the peer has not told where it goes",
    errno.EMSGSIZE: "the peer expects another size",
    errno.EFAULT: "its memory is not registered with the card",
    errno.EINVAL: "the connection has no such slot",
    errno.EPROTO: "more was acknowledged than was sent",
    errno.ESHUTDOWN: "the connection was closed",
}


def _error_of(code: int, source: int, part: int, round: int, nbytes: int, address: int) -> BpsError:
    """Return what the failure of the native dispatch means."""
    what = f"round {round} of partition {part} ({nbytes} bytes at {address:#x})"
    if code == errno.ENOMEM:
        return CapacityError(f"there is no memory to send {what}")
    where = "" if source == NOBODY else f" to source {source}"
    return ProtocolError(f"{what} cannot be sent{where}: {_REASONS.get(code, os.strerror(code))}")
