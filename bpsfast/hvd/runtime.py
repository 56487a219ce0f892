"""Process sets, and the state of Horovod's API between `init` and `shutdown`: a session and a service for each set."""
from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from ..base.value_formats import parse_ports
from ..collectives.group import Group, make_group
from ..collectives.group_service import open_channel
from ..orchestration.errors import ConfigError, UnsupportedError
from ..orchestration.priority.negotiation import (
    FollowerChannel,
    Kind,
    LeaderChannel,
    Request,
    Response,
    connect,
    listen,
)
from ..trainer import process
from ..trainer.session import Session
from .errors import NotInitializedError
from .service import NegotiationService, Operation
from .timeline import Timeline

_current: Runtime | None = None


class JoinProxy(Protocol):
    """Takes part in the steps of one optimizer on a rank that has joined (`gradient_exchange.StepProxy`)."""

    def begin(self) -> None:
        """Prepare, before the other ranks hear that this one joins."""

    def take_n_steps(self) -> int:
        """Return how many steps this rank has made since the last call."""

    def start(self, over: threading.Event) -> None:
        """Take part in a thread of its own until all ranks have joined or *over* is set."""

    def wait(self) -> Exception | None:
        """Wait for that thread; return its error."""


class Runtime:
    """This process's part in the job and in its process sets. Any thread.

    Sets are numbered alike on all ranks; 0 is all ranks, and no number is used again.
    """

    def __init__(self, session: Session, owns_session: bool, begun: int) -> None:
        self.session = session
        self.rank, self.size = session.rank, session.size
        #: One for each optimizer, in the order in which they were made.
        self.join_proxies: list[JoinProxy] = []
        self.n_optimizers = 0  # that have had a proxy; the same on all ranks
        self._owns_session = owns_session
        self._begun = begun
        self._timeline: Timeline | None = None
        self._next = 1
        #: The job ranks of each set, by its number.
        self.ranks: dict[int, tuple[int, ...]] = {0: tuple(range(session.size))}
        self._services: dict[int, NegotiationService] = {}
        self._groups: dict[int, Group] = {}
        self._lock = threading.Lock()  # guards the services and the timeline: set 0's thread adds and removes sets
        self._open(0)

    def _open(self, number: int) -> None:
        """Begin to take part in set *number*, if this rank is in it; all its ranks do."""
        ranks = self.ranks[number]
        if self.rank not in ranks:
            return
        try:
            self._connect(number, ranks)
        except BaseException:  # the session may be another owner's, and stay open
            self._close(number)
            raise

    def _connect(self, number: int, ranks: tuple[int, ...]) -> None:
        from .executor import Executor  # here, as it imports PyTorch

        settings = self.session.settings
        group = self._groups[number] = make_group(self.session, ranks)
        title = f"hvd.{self._begun}.{number}:"  # with the colon it is no prefix of another channel's title
        channel = self._channel(ranks, title)
        service = NegotiationService(
            ranks, self.rank, channel, Executor(group, settings.fusion_bytes, self._change), self._check,
            fusion_nbytes=settings.fusion_bytes, warn_s=settings.stall_warn_s, timeout_s=settings.timeout_s)
        with self._lock:
            self._services[number] = service
            service.observer = None if self._timeline is None else self._timeline.note
        # When this barrier ends, all ranks are connected, and hear when one of them ends.
        service.submit(Operation(Request(rank=self.rank, name="barrier.begin", kind="barrier"))).wait()
        if channel is not None and self.rank == ranks[0]:
            self.session.key_values.withdraw(title)  # all have read it, and a rank may publish only a limited number

    def _channel(self, ranks: tuple[int, ...], title: str) -> LeaderChannel | FollowerChannel | None:
        """Return this rank's end of the channel between *ranks*, whose first one publishes its address under *title*.

        None if there is one rank only. Raises as `open_channel`, and `StallError` if the first rank publishes nothing.
        """
        if len(ranks) == 1:
            return None
        session, leader = self.session, f"rank {ranks[0]}"

        def share(address: bytes | None) -> bytes:
            if address is None:
                return session.key_values.lookup(title, session.settings.timeout_s, leader)
            session.key_values.publish(title, address)
            return address

        def host() -> str:
            return "127.0.0.1" if session.n_nodes == 1 else session.host

        return open_channel(self.rank == ranks[0], share, host,
                            partial(listen, ports=parse_ports(session.settings.ports), n_followers=len(ranks)),
                            partial(connect, leader=leader), rank=self.rank, leader=leader,
                            others=f"ranks {list(ranks[1:])}",
                            advertise=session.settings.advertise if session.n_nodes > 1 else "")

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
        """Do what `change` asked for, in the thread of set 0, in the same order on all ranks."""
        if response.kind == "add_process_set":
            number, self._next = self._next, self._next + 1
            self.ranks[number] = response.ranks
            self._open(number)
            return number
        found = self.number_of(response.ranks)
        assert found is not None, "`remove_process_set` has looked it up"
        self._close(found)
        del self.ranks[found]
        return found

    def _close(self, number: int, reason: str = "") -> None:
        with self._lock:
            service = self._services.pop(number, None)
        if service is None or service.close(reason):
            group = self._groups.pop(number, None)
            if group is not None:
                group.close()

    def ranks_of(self, number: int) -> tuple[int, ...]:
        """Return the ranks of set *number*; raises ConfigError if there is none."""
        try:
            return self.ranks[number]
        except KeyError:
            raise ConfigError("Process set does not exist or has not been registered.") from None

    def number_of(self, ranks: Sequence[int]) -> int | None:
        """Return the number of the set of exactly these ranks, if there is one."""
        return next((number for number, each in self.ranks.items() if each == tuple(sorted(ranks))), None)

    def service(self, process_set: Any, kind: str) -> NegotiationService:
        """Return the service of *process_set*, for an operation of this *kind*.

        Raises ConfigError if it is not a process set, was not added to the job, or does not contain this rank.
        """
        number = checked_set(process_set).process_set_id
        if number is None or number not in self.ranks:
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
        try:
            self.leave_sets()
        finally:
            if self._owns_session:
                process.shutdown()

    def leave_sets(self) -> None:
        """Leave all sets."""
        reason = process.failure() or ""
        while self._services:  # including sets that are opened meanwhile
            self._close(max(self._services), reason)
        self.stop_timeline()


class _BegunCount:
    """How often this API was begun in a job: it tells the channels of one `init` from those of an earlier one."""

    def __init__(self, session: Session) -> None:
        self.n = 0


def begin() -> Runtime:
    """Join the job unless this process has, and return its `Runtime`; raises as `bpsfast.init`."""
    global _current
    if _current is not None and not _current.session.closed:
        _current.session.require_open()
        return _current
    owns_session = process.session() is None
    process.init()
    try:
        count = process.current().extension(_BegunCount)
        count.n += 1  # the same on all ranks
        _current = Runtime(process.current(), owns_session, count.n)
    except BaseException:
        if owns_session:
            process.shutdown()
        raise
    atexit.register(end)
    return _current


def end() -> None:
    """Undo `begin`. Does nothing without a runtime, and in a fork."""
    found = _forgotten()
    if found is not None:
        found.close()


def leave() -> None:
    """As `end`, for a caller that leaves the job itself, which may have lost ranks."""
    found = _forgotten()
    if found is not None:
        found.leave_sets()


def _forgotten() -> Runtime | None:
    """Return the present runtime, which is no longer `current`; None if there is none, and in a fork."""
    global _current
    found, _current = _current, None
    atexit.unregister(end)
    return found if found is not None and found.session.pid == os.getpid() else None


def is_begun() -> bool:
    """Return whether `current` returns a runtime."""
    return _current is not None and process.session() is not None


def current() -> Runtime:
    """Return the runtime that `begin` made; raises NotInitializedError if there is none."""
    if _current is None:
        raise NotInitializedError
    _current.session.require_open()
    return _current


class ProcessSet:
    """Some ranks of the job, sorted. `init` or `add_process_set` adds it to the job and gives it its number."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ConfigError(
                "Apparently you tried to build a ProcessSet from an MPI communicator, but Horovod has not been built "
                "with MPI support: bpsfast.hvd needs the list of its ranks instead.")
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ConfigError("ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object; "
                              f"got {ranks}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Return the number of ranks in the set; None before it is added to the job."""
        return None if self.process_set_id is None else len(current().ranks_of(self.process_set_id))

    def rank(self) -> int | None:
        """Return the index of this rank in the set; None before it is added to the job. (Root ranks are job ranks.)

        Raises ConfigError if this rank is not in the set.
        """
        if self.process_set_id is None:
            return None
        found = current()
        ranks = found.ranks_of(self.process_set_id)
        if found.rank not in ranks:
            raise ConfigError("Process is not part of provided process set.")
        return ranks.index(found.rank)

    def included(self) -> bool | None:
        """Return whether this process is in the set."""
        return None if self.ranks is None else current().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


#: All ranks; number 0. `init` fills in its ranks.
global_process_set = ProcessSet([])


def checked_set(process_set: Any) -> ProcessSet:
    """Return *process_set*; raises ConfigError if it is something else."""
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(f"process_set={process_set!r} is a {type(process_set).__name__}, not a ProcessSet: give what "
                          "add_process_set has returned")
    return process_set


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a set of some ranks to the job, and return it: operations can be limited to it. All ranks of the job call it.

    Raises
    ------
    ConfigError
        If the job has a set of these ranks already, or does not have one of the ranks.
    HorovodInternalError
        If the ranks named different sets.
    """
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    found = current()
    assert new.ranks is not None, "the constructor sets them"
    if not new.ranks or new.ranks[0] < 0 or new.ranks[-1] >= found.size or len(set(new.ranks)) < len(new.ranks):
        raise ConfigError(f"a process set of ranks {new.ranks} cannot be: the job has ranks 0 to {found.size - 1}, and "
                          "a set at least one of them, each once")
    if found.number_of(new.ranks) is not None:
        raise ConfigError(f"Attempted to add a duplicate process set: {new}")
    new.process_set_id = found.change("add_process_set", tuple(new.ranks))
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove *process_set* from the job; all ranks of the job call it. Returns False if it is not there, or global."""
    if not process_set.process_set_id:
        return False
    found, number = current(), process_set.process_set_id
    ranks = found.ranks.get(number)
    if ranks is not None:
        found.change("remove_process_set", ranks)  # raises if ranks disagree: then the set stays
    process_set.process_set_id = None
    return ranks is not None


def begin_sets(process_sets: Any) -> None:
    """Add the sets that were given to `init`: none for "dynamic" and None, as sets can always be added later."""
    global_process_set.process_set_id = 0
    global_process_set.ranks = list(range(current().size))
    if process_sets is None:
        return
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ConfigError(f"process_sets={process_sets!r}: expected None, \"dynamic\" or a list of ProcessSet")
        return
    for place, each in enumerate(process_sets):
        if not isinstance(each, ProcessSet):
            raise UnsupportedError(f"process_sets entry number {place} is a {type(each).__name__}, not a ProcessSet")
        if current().number_of(each.ranks or []) is not None:
            raise ConfigError(f"Horovod could not be initialized because process_sets entry number {place} is a "
                              f"duplicate: {each}")
        add_process_set(each)
