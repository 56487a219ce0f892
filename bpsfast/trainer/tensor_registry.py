"""The tensors of a rank: names that it has declared, and the units (tensors or buckets) that the job has committed.

A push of a name that other ranks have not declared yet is deferred. The thread of this rank that first sees the commit,
while it waits for anything or asks for the unit, starts it.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import msgspec

from ..orchestration.errors import BpsError, BusyError, ConfigError, MismatchError, UnsupportedError
from ..orchestration.messages import Declare, TensorSpec
from .node_connection import Mailbox
from .stall_inspector import StallInspector, StallQuery, StallTimer, Subject
from .unit import Unit

T = TypeVar("T")

_written, _read = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(TensorSpec)


class TensorRegistry:
    """The tensors that *rank* of *size* has declared. Any thread.

    Waits last *timeout_s* by default. *require_open* raises `ClosedError` when the session is closed, or is another
    process's. *mailbox* sends declarations to the node, *stall_query* asks which ranks are missing, and *inspector*
    records long waits. *must_survive*: the job goes on without lost ranks, which not all kinds of tensors do.
    """

    def __init__(self, rank: int, size: int, timeout_s: float, require_open: Callable[[], None],
                 mailbox: Mailbox, stall_query: StallQuery, inspector: StallInspector,
                 must_survive: bool = False) -> None:
        self._rank, self._size = rank, size
        self._timeout_s = timeout_s
        self._must_survive = must_survive
        self._require_open = require_open
        self._mailbox = mailbox
        self._stall_query = stall_query
        self._inspector = inspector
        self._lock = threading.RLock()
        self._specs: dict[str, TensorSpec] = {}
        self._units: dict[str, Unit] = {}
        self._failed: dict[str, BpsError] = {}
        #: Starts of pushes whose names are not committed yet. Only this object changes it.
        self.deferred: dict[str, Callable[[], None]] = {}
        self._order: dict[str, int] = {}  # of names that the program has declared itself
        self._unnamed: dict[str, int] = {}
        self._models: dict[str, int] = {}  # name -> how many models of the trainer have had it

    # -- what the node says: called by the mailbox, one message at a time --------------------------------------------

    def committed(self, unit: Unit) -> None:
        """Note that all ranks have declared the members of *unit*."""
        for name in unit.members:
            self._units[name] = unit

    def refused(self, names: Sequence[str], error: BpsError) -> None:
        """Note that the job has refused to sum *names*."""
        for name in names:
            self._failed[name] = error

    # -- names -----------------------------------------------------------------------------------------------------

    def declare(self, specs: Sequence[TensorSpec], lenient: bool = False) -> None:
        """Declare tensors to the job. Returns at once; rounds start when all ranks have declared them.

        Ranks may declare in any order. Declaring the same again does nothing; *lenient*: also with other priorities, of
        which the first ones count. Raises `ConfigError` if a field has a wrong type, which the node could not read.
        Raises `MismatchError` if this rank has declared one of the names differently, or the ranks disagreed about it
        before. Raises `UnsupportedError` if the job is to go on without lost ranks, and could not with such a tensor.
        """
        self._require_open()
        with self._lock:
            new = [spec for spec in specs if self._is_new(spec, lenient)]
            for spec in new:
                _check_types(spec)
                if self._must_survive:
                    _check_survives(spec)
            for spec in new:
                self._specs[spec.name] = spec
        if new:
            self._mailbox.send(Declare(rank=self._rank, tensors=tuple(new)))

    def retire(self, names: Sequence[str]) -> None:
        """Remove *names*, whose units are retired."""
        with self._lock:
            for name in names:
                del self._specs[name], self._units[name]

    def is_relayout(self, names: Sequence[str]) -> bool:
        """Whether the tensors *names* of one unit belong to a gradient layout that may be replaced."""
        return any(name in self._specs and bool(self._specs[name].edition_of) for name in names)

    def knows(self, spec: TensorSpec) -> bool:
        """Return whether this was declared before, on a device or not, to be waited for or not: the short way of a
        repeated push.
        """
        known = self._specs.get(spec.name)
        return known == spec or (known is not None and msgspec.structs.replace(
            known, on_device=spec.on_device, direct=spec.direct) == spec)

    def _is_new(self, spec: TensorSpec, lenient: bool) -> bool:
        if spec.name in self._failed:
            raise self._failed[spec.name]
        known = self._specs.get(spec.name)
        if known is None:
            return True
        for field in ("shape", "dtype", "average", "group", "priority", "partition_nbytes", "fusion_nbytes",
                      "n_streams", "edition_of", "op", "ranks", "codec", "max_rows", "store", "islands"):
            before, now = getattr(known, field), getattr(spec, field)
            if before != now and not (field == "priority" and (lenient or now is None)):
                raise MismatchError(f"{field} of tensor {spec.name!r} differs: it was {before!r} when rank "
                                    f"{self._rank} first used the name, now {now!r}; use one name for one kind of "
                                    "tensor")
        return False

    def unnamed(self, prefix: str) -> str:
        """Return the next automatic name that begins with *prefix*: prefix.0, prefix.1, ... on this rank."""
        with self._lock:
            number = self._unnamed.get(prefix, 0)
            self._unnamed[prefix] = number + 1
        return f"{prefix}.{number}"

    def note_order(self, name: str) -> None:
        """Note that *name* is needed after the names that were noted before (`bpsfast.torch.declare`)."""
        self._order.setdefault(name, len(self._order))

    def noted_priority(self, name: str | None, priority: int) -> int:
        """Return *priority*; if it is 0 and *name* was noted, the priority of its position: the first name's is
        highest.
        """
        place = self._order.get(name) if name is not None and priority == 0 else None
        return priority if place is None else -place

    def order(self) -> list[str]:
        """Return the names that were noted, in their order."""
        return list(self._order)

    def model_number(self, names: Iterable[str]) -> int:
        """Return the number of a new model with tensors *names*: above that of every earlier model on this rank with
        one of them. Ranks that make such models in the same order get the same numbers, even if they have retired the
        earlier models at different times.
        """
        with self._lock:
            names = list(names)
            number = max([0, *(self._models.get(name, 0) for name in names)])
            self._models.update(dict.fromkeys(names, number + 1))
        return number

    # -- units -----------------------------------------------------------------------------------------------------

    def unit(self, name: str, timeout_s: float | None = None) -> Unit:
        """Return the unit that tensor *name* is part of, waiting until all ranks have declared it.

        Raises `StallError` if it was not committed in time: a rank has not declared the name. Raises `MismatchError` or
        another error with which the job has refused the declaration.
        """
        self._require_open()
        found = self._units.get(name)
        if found is not None and name not in self.deferred:
            return found
        spec = self._specs.get(name)
        who = f"ranks {spec.ranks}" if spec is not None and spec.ranks else f"all {self._size} ranks"
        answer = self.wait(lambda: self._units.get(name) or self._failed.get(name), timeout_s,
                           f"for tensor {name!r} to be declared by {who}", name)
        if isinstance(answer, BpsError):
            raise answer
        return cast("Unit", answer)

    def unit_nowait(self, name: str) -> Unit | None:
        """Return the unit that tensor *name* is part of, or None if it is not committed yet."""
        self._require_open()
        if name not in self._units or name in self.deferred:
            try:
                self._mailbox.pump()
            except BpsError as exc:
                raise self._failed.get(name, exc) from None  # the reason why the name failed may be why the job ended
            self._start_deferred()
        failed = self._failed.get(name)
        if failed is not None:
            raise failed
        return self._units.get(name)

    def units(self) -> set[Unit]:
        return set(self._units.values())

    # -- pushes before the commit ----------------------------------------------------------------------------------

    def defer(self, name: str, start: Callable[[], None]) -> None:
        """Call *start* in the thread that first sees that *name* is committed. *start* raises nothing."""
        with self._lock:
            if name in self.deferred:
                raise BusyError(f"{name!r} is pushed again, but its first push was not waited for: synchronize the "
                                "handle first, or use another name")
            self.deferred[name] = start
        self._start_deferred()

    def start_committed(self) -> bool:
        """Start deferred pushes whose commit has arrived; return whether some are left."""
        if self.deferred:
            self._require_open()  # before any lock: a forked child may have inherited it locked
            self._mailbox.pump()
            self._start_deferred()
        return bool(self.deferred)

    def wait(self, ready: Callable[[], T | None], timeout_s: float | None, what: str, name: str) -> T:
        """Wait until ``ready()`` is not None and return that, starting deferred pushes meanwhile: others may wait for
        them.

        Raises `StallError` if it is not in time, or cannot be any more; the text tells what the job knows about *name*.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        with StallTimer(f"rank {self._rank}", timeout_s, self._stall_query, self._inspector, what) as patience:
            while True:
                self._mailbox.wait(lambda: ready() or self._startable(), patience.rest_s)
                self._start_deferred()
                found = ready()
                if found is not None:
                    patience.succeeded = not isinstance(found, BpsError)
                    return found
                patience.look(lambda: (Subject(name), self._stall_query.ask_about(name)), lambda: ready() is not None)

    def _start_deferred(self) -> None:
        while self.deferred:
            with self._lock:
                known = self._startable()
                start = self.deferred.pop(known) if known is not None else None
            if start is None:
                return
            start()

    def _startable(self) -> str | None:
        """Return a name whose deferred push can start."""
        with self._lock:
            return next((name for name in self.deferred if name in self._units or name in self._failed), None)

    def forget(self) -> None:
        """Drop all units and deferred pushes, at the end of the session."""
        for unit in self.units():
            unit.forget()
        self._units.clear()
        self.deferred.clear()


def _check_survives(spec: TensorSpec) -> None:
    """Raise `UnsupportedError` if sums of *spec* cannot go on without a lost rank."""
    lacks = ("is compressed, and what a codec keeps of lost ranks cannot be taken back" if spec.codec is not None
             else "is kept by its owners (asynchronous training, outer steps), and these may be lost"
             if spec.store is not None
             else "is summed among the GPUs of each machine first, where a lost rank cannot be replaced" if spec.islands
             else "")
    if lacks:
        raise UnsupportedError(f"tensor {spec.name!r} {lacks}: unset BPSFAST_ON_WORKER_LOSS = continue, or this option")


def _check_types(spec: TensorSpec) -> None:
    try:
        _read.decode(_written.encode(spec))
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeEncodeError) as exc:
        raise ConfigError(f"tensor {spec.name!r} cannot be declared: {exc}") from exc
