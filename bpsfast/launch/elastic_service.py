"""The muster of an elastic job, in a thread of the launcher: hears workers, decides (`orchestration.muster`), answers.

What it cannot do itself, because the launcher's main thread owns the processes, it *orders*: start somebody, end
somebody, end the job. The launcher polls `fileno` and takes `orders`, and tells what became of its processes.
"""
from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..orchestration import security
from ..orchestration.elastic import protocol as line_of
from ..orchestration.elastic.coordinator import ElasticCoordinator, ElasticRules, Exclude, Fail, Form
from ..orchestration.elastic.protocol import (
    Add,
    Added,
    Come,
    Done,
    Formed,
    Newcomers,
    Over,
    Put,
    Refused,
    Value,
    Void,
    Wait,
    Want,
)
from ..orchestration.errors import ProtocolError
from .process_role import format_address

_log = logging.getLogger("bpsfast.muster")
_LOOK_S = 1.0
_REASON_LENGTH = 500


class Replace(NamedTuple):
    """Start a worker for the lost *member*."""

    member: int


class Start(NamedTuple):
    """Start *n_workers* more."""

    n_workers: int


class End(NamedTuple):
    """Kill *member*, which is silent."""

    member: int


class Stop(NamedTuple):
    """There is no next job: the workers who have come are told, and raise it. Nobody may be left to do so."""

    reason: str


Order = Replace | Start | End | Stop


def elastic_key(key: bytes) -> bytes:
    """Return the key of the muster's line, which follows from the job's."""
    return security.prove(key, "muster")


class ElasticService:
    """Listens from the start on; `start` begins to answer, `close` ends the thread. Main thread only, but for the
    thread's own part.

    Parameters
    ----------
    members
        Those that are started at first, by rank.
    key, host
        The job's key, and the address of this machine that workers can reach.
    """

    def __init__(self, rules: ElasticRules, members: Sequence[int], key: bytes, host: str) -> None:
        self._muster = ElasticCoordinator(rules, members)
        self._line = line_of.listen(elastic_key(key), host)
        self.address = format_address(host, self._line.port)
        self._facts: deque[Callable[[], None]] = deque()
        self._orders: deque[Order] = deque()
        self._wake, self._waker = socket.socketpair()
        self._ordered, self._orderer = socket.socketpair()
        for each in (self._wake, self._waker, self._ordered, self._orderer):
            each.setblocking(False)
        self._alive = set(members)
        self._asked: set[int] = set()  # to be replaced or ended, and that is not done yet
        self._n_starting = 0  # more were ordered, and are not started yet
        self._store: dict[str, str] = {}
        self._stored_nbytes = 0
        self._wanted: dict[str, set[int]] = {}
        self._next_word_s = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="bpsfast-muster", daemon=True)

    # -- the launcher's side ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that can be read when there are `orders`."""
        return self._ordered.fileno()

    def orders(self) -> list[Order]:
        """Return what is to be done, in order."""
        with contextlib.suppress(BlockingIOError):
            self._ordered.recv(4096)
        found = []
        while self._orders:
            found.append(self._orders.popleft())
        return found

    def started(self, member: int, instead_of: int | None = None) -> None:
        """Be told that *member* runs; for whom, if for a lost one."""
        def enter() -> None:
            self._alive.add(member)
            if instead_of is None:
                self._n_starting -= 1
            else:
                self._asked.discard(instead_of)
                self._muster.replaced(instead_of, member, time.monotonic())

        self._tell(enter)

    def ended(self, member: int, how: str) -> None:
        """Be told that *member* is lost: *how* in words."""
        def enter() -> None:
            self._alive.discard(member)
            self._asked.discard(member)
            self._muster.ended(member, how, time.monotonic())
            if self._muster.has_seat(member):
                self._void(f"worker {member} {how}")

        self._tell(enter)

    def left(self, member: int) -> None:
        """Be told that *member* has ended well."""
        def enter() -> None:
            self._alive.discard(member)
            self._muster.left(member)
            if self._muster.is_over:
                self._say(Over(), self._muster.waiting)

        self._tell(enter)

    def give_up(self, reason: str) -> None:
        """Form no more jobs: whoever comes hears *reason*."""
        def enter() -> None:
            if self._muster.failure is None:
                self._fail(Fail("PeerLostError", reason))

        self._tell(enter)

    @property
    def is_over(self) -> bool:
        """Whether the training has ended on all ranks."""
        return self._muster.is_over

    def has_seat(self, member: int) -> bool:
        """Whether *member* is of the job that was formed last, or is to be of the first."""
        return self._muster.has_seat(member)

    def close(self) -> None:
        """End the thread; what was said to workers is sent, for a second at most."""
        self._closing = True
        self._rouse()
        if self._thread.ident is not None:
            self._thread.join()
        self._line.close()
        for each in (self._wake, self._waker, self._ordered, self._orderer):
            each.close()

    def _tell(self, fact: Callable[[], None]) -> None:
        self._facts.append(fact)
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of calls to wake up
            self._waker.send(b"\0")

    # -- the thread's ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as exc:  # nobody else would notice
            _log.exception("the muster has failed")
            self._order(Stop(f"the muster has failed: {type(exc).__name__}: {exc}"))

    def _turn(self) -> None:
        left_s = self._muster.due_s - time.monotonic()
        self._line.wait(self._wake.fileno(), min(_LOOK_S, max(0.01, left_s)))
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        while self._facts:
            self._facts.popleft()()
        try:
            messages = self._line.recv_nowait()
        except ProtocolError as exc:
            messages = []  # those before and after it are had by further calls
            _log.warning("%s", exc)
        for message in messages:
            self._hear(message)
        self._decide()
        if (now_s := time.monotonic()) >= self._next_word_s and self._muster.waiting:
            self._next_word_s = now_s + line_of.WORD_EVERY_S
            self._say(Wait(self._muster.awaited), self._muster.waiting)

    def _hear(self, message: object) -> None:
        match message:
            case Come():
                self._come(message)
            case Done():
                self._muster.done()
                self._say(Over(), self._muster.waiting)
            case Put():
                self._put(message)
            case Want():
                self._want(message)
            case Add():
                self._add(message)

    def _come(self, message: Come) -> None:
        muster, was_running = self._muster, self._muster.is_running
        muster.came(message.member, message.node, time.monotonic(), message.has_state, message.n_commits,
                    message.reason[:_REASON_LENGTH])
        if muster.is_over:
            self._say(Over(), [message.member])
        elif muster.failure is not None:
            self._say(Refused(*muster.failure), [message.member])
        elif muster.is_running and muster.newcomers:
            self._say(Newcomers(muster.number, len(muster.newcomers)), [seat.member for seat in muster.seats])
        elif was_running and not muster.is_running:
            self._void(f"worker {message.member} has left it")

    def _put(self, message: Put) -> None:
        if message.job != self._muster.number or not self._muster.has_seat(message.member):
            return
        nbytes = line_of.stored_nbytes(message.key, message.value)
        before = self._store.get(message.key)
        kept_nbytes = self._stored_nbytes - (0 if before is None else line_of.stored_nbytes(message.key, before))
        if nbytes > line_of.MOST_VALUE_NBYTES or kept_nbytes + nbytes > line_of.MOST_STORED_NBYTES:
            _log.warning("worker %d stores %d bytes beside %d, which is more than a job needs: ignored",
                         message.member, nbytes, kept_nbytes)
            return
        self._store[message.key] = message.value
        self._stored_nbytes = kept_nbytes + nbytes
        self._say(Value(message.job, message.key, message.value), self._wanted.pop(message.key, ()))

    def _want(self, message: Want) -> None:
        if message.job != self._muster.number or not self._muster.has_seat(message.member):
            return
        if message.key in self._store:
            self._say(Value(message.job, message.key, self._store[message.key]), [message.member])
        elif len(self._wanted) < line_of.MOST_WANTED and len(message.key) <= line_of.MOST_KEY_LENGTH:
            self._wanted.setdefault(message.key, set()).add(message.member)
        else:
            _log.warning("worker %d wants a value of which nobody has heard, beside %d others: ignored",
                         message.member, len(self._wanted))

    def _add(self, message: Add) -> None:
        most = self._muster.rules.max_ranks
        n_replacing = len({*self._muster.to_replace, *(self._asked - self._alive)})
        n_workers = len(self._alive) + self._n_starting + n_replacing
        count = max(0, min(message.count, most - n_workers))
        if self._muster.is_over or self._muster.failure is not None:
            count, reason = 0, "the training has ended"
        else:
            reason = "" if count == message.count else (
                f"{n_workers} workers run, and the job may have {most} (--max-ranks)")
        if count:
            self._n_starting += count
            self._order(Start(count))
        self._say(Added(count, reason), [message.member])

    def _decide(self) -> None:
        muster = self._muster
        while (found := muster.decide(time.monotonic())) is not None:
            if isinstance(found, Form):
                self._form(found)
            elif isinstance(found, Fail):
                self._fail(found)
            elif isinstance(found, Exclude):
                self._ask([End(member) for member in found.members])
                break
        self._ask([Replace(member) for member in muster.to_replace])

    def _form(self, form: Form) -> None:
        self._store.clear()
        self._stored_nbytes = 0
        self._wanted.clear()
        for rank, member in enumerate(form.members):
            self._say(Formed(form.number, rank, len(form.members), self._muster.rules.lost_worker), [member])

    def _fail(self, fail: Fail) -> None:
        self._muster.failure = fail
        self._say(Refused(*fail), self._muster.waiting)
        self._order(Stop(fail.reason))

    def _void(self, reason: str) -> None:
        """Tell the members of the last job that it is over, if it was not complete yet."""
        if self._muster.number:
            self._say(Void(self._muster.number, reason), [seat.member for seat in self._muster.seats])

    def _ask(self, orders: Sequence[Replace | End]) -> None:
        for order in orders:
            if order.member not in self._asked:
                self._asked.add(order.member)
                self._order(order)

    def _order(self, order: Order) -> None:
        self._orders.append(order)
        with contextlib.suppress(BlockingIOError):
            self._orderer.send(b"\0")

    def _say(self, message: object, members: Sequence[int] | set[int] | tuple[int, ...]) -> None:
        for member in members:
            self._line.tell(message, but=self._line.present - {member})  # type: ignore[arg-type]
