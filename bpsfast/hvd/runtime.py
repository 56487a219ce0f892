"""What a process has between `init` and `shutdown`: its session with the job, and a service for each process set."""
from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..collectives.group import Group, make_group
from ..orchestration.errors import ClosedError, ConfigError
from ..orchestration.priority.negotiation import Kind, Request, Response
from ..trainer import process
from ..trainer.session import Session
from .errors import NotInitializedError
from .meeting import meet
from .service import NegotiationService, Operation
from .timeline import Timeline

if TYPE_CHECKING:
    from .gradient_exchange import JoinProxy

_current: Runtime | None = None
_n_begun = 0  # of all ranks alike, so that meetings of an earlier `init` are not mistaken for this one's


class Runtime:
    """Any thread. Process sets have numbers, 0 is all ranks; they are the same on all ranks, and never used again."""

    def __init__(self, session: Session, owns_session: bool, begun: int) -> None:
        self.session = session
        self.rank, self.size = session.rank, session.size
        #: What takes part in the optimizers' sums after this rank has joined, in the order in which they were made.
        self.join_proxies: list[JoinProxy] = []
        self.n_optimizers = 0  # that have had one, of all ranks alike
        self._owns_session = owns_session
        self._begun = begun
        self._timeline: Timeline | None = None
        self._next = 1
        self._ranks: dict[int, tuple[int, ...]] = {0: tuple(range(session.size))}
        self._services: dict[int, NegotiationService] = {}
        self._groups: dict[int, Group] = {}
        self._lock = threading.Lock()  # of the services and their timeline: sets come and go in a thread of their own
        self._open(0)

    def _open(self, number: int) -> None:
        """Begin to take part in set *number*; all its ranks do."""
        ranks = self._ranks[number]
        if self.rank not in ranks:
            return
        try:
            self._meet(number, ranks)
        except BaseException:  # the session may be another's, and go on
            self._close(number)
            raise

    def _meet(self, number: int, ranks: tuple[int, ...]) -> None:
        from .executor import Executor  # and with it PyTorch

        settings = self.session.settings
        group = self._groups[number] = make_group(self.session, ranks)
        title = f"hvd.{self._begun}.{number}:"  # the colon: as a prefix, too, it is this meeting's only
        line = meet(self.session, ranks, title)
        service = NegotiationService(
            ranks, self.rank, line, Executor(group, settings.fusion_bytes, self._change), self._check,
            fusion_nbytes=settings.fusion_bytes, warn_s=settings.stall_warn_s, timeout_s=settings.timeout_s)
        with self._lock:
            self._services[number] = service
            service.observer = None if self._timeline is None else self._timeline.note
        # From here on every rank hears of another one's end: all are connected.
        service.submit(Operation(Request(rank=self.rank, name="barrier.begin", kind="barrier"))).wait()
        if line is not None and self.rank == ranks[0]:
            self.session.notices.withdraw(title)  # all have found it, and what a rank may leave there is limited

    def _check(self) -> bool:
        """Raise if the job is broken; return whether this process still takes part in it."""
        if self.session.closed:
            return False
        self.session.port.check()
        return True

    def change(self, kind: Kind, ranks: tuple[int, ...]) -> int:
        """Add or remove the set of *ranks*, as all ranks of the job do now; return its number."""
        request = Request(rank=self.rank, name=kind, kind=kind, ranks=ranks)
        return int(self._services[0].submit(Operation(request)).wait())

    def _change(self, response: Response) -> int:
        """Carry out what `change` asked for: in the thread of the set of all ranks, in one order everywhere."""
        if response.kind == "add_process_set":
            number, self._next = self._next, self._next + 1
            self._ranks[number] = response.ranks
            self._open(number)
            return number
        found = self.number_of(response.ranks)
        assert found is not None, "who asked for it has looked"
        self._close(found)
        del self._ranks[found]
        return found

    def _close(self, number: int, reason: str = "") -> None:
        with self._lock:
            service = self._services.pop(number, None)
        if service is None or service.close(reason):
            group = self._groups.pop(number, None)
            if group is not None:
                group.close()

    def has(self, number: int) -> bool:
        """Return whether there is a set of this number."""
        return number in self._ranks

    def ranks_of(self, number: int) -> tuple[int, ...]:
        """Return the ranks of set *number*; raises ConfigError if there is none."""
        try:
            return self._ranks[number]
        except KeyError:
            raise ConfigError("Process set does not exist or has not been registered.") from None

    def number_of(self, ranks: Sequence[int]) -> int | None:
        """Return the number of the set of exactly these ranks, if there is one."""
        return next((number for number, each in self._ranks.items() if each == tuple(sorted(ranks))), None)

    def service(self, number: int | None, kind: str) -> NegotiationService:
        """Return the service of set *number*, for an operation of this *kind*; raises as `service_of`."""
        if number is None or number not in self._ranks:
            raise ConfigError(f"{kind.capitalize()}: Process set provided does not exist, or has not been registered.")
        if number not in self._services:
            raise ConfigError(f"{kind.capitalize()}: Rank {self.rank} is not a member of the provided process set.")
        return self._services[number]

    def start_timeline(self, path: str) -> None:
        """Write what this rank negotiates and executes to *path* from now on; only rank 0 does."""
        self.stop_timeline()
        if self.rank == 0:
            self._observe(Timeline(path))

    def stop_timeline(self) -> None:
        """End the file. Does nothing if there is none."""
        self._observe(None)

    def _observe(self, timeline: Timeline | None) -> None:
        with self._lock:
            before, self._timeline = self._timeline, timeline
            for service in self._services.values():
                service.observer = None if timeline is None else timeline.note
        if before is not None:
            before.close()

    def close(self) -> None:
        """Leave all sets, and the job if this joined it."""
        reason = process.failure() or ""
        try:
            while self._services:  # also those that are opened meanwhile
                self._close(max(self._services), reason)
            self.stop_timeline()
        finally:
            if self._owns_session:
                process.shutdown()


def begin() -> Runtime:
    """Join the job, unless that is done, and return what there is; raises as `bpsfast.init`."""
    global _current, _n_begun
    if _current is not None and not _current.session.closed:
        _current.session.require_open()
        return _current
    owns_session = not _is_running()
    process.init()
    _n_begun += 1
    try:
        _current = Runtime(process.current(), owns_session, _n_begun)
    except BaseException:
        if owns_session:
            process.shutdown()
        raise
    atexit.register(end)
    return _current


def end() -> None:
    """Undo `begin`. Does nothing if there is nothing, or in a fork."""
    global _current
    found, _current = _current, None
    atexit.unregister(end)
    if found is not None and found.session.pid == os.getpid():
        found.close()


def is_begun() -> bool:
    """Return whether `current` will return."""
    return _current is not None and _is_running()


def current() -> Runtime:
    """Return what `begin` made; raises NotInitializedError if there is nothing."""
    if _current is None:
        raise NotInitializedError
    _current.session.require_open()
    return _current


def service_of(process_set: Any, kind: str) -> NegotiationService:
    """Return the service of *process_set*, for an operation of this *kind*.

    Raises
    ------
    NotInitializedError
        If `init` was not called.
    ConfigError
        If it is no process set, does not count, or this rank is not in it.
    """
    found = current()
    try:
        number = process_set.process_set_id
    except AttributeError:
        raise ConfigError(f"process_set={process_set!r} is a {type(process_set).__name__}, not a ProcessSet: give what "
                          "add_process_set has returned") from None
    return found.service(number, kind)


def _is_running() -> bool:
    try:
        process.current()
    except ClosedError:
        return False
    return True
