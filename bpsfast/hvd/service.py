"""Negotiates with other ranks, and executes, the Horovod operations of one process set, in one thread of this rank.

Any thread submits operations under names. The first rank of the set coordinates (`orchestration.priority.negotiation`).
The service handles order, deadlines and errors; the executor does the work of an operation.
"""
from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..collectives.group_service import GroupService
from ..orchestration.errors import BpsError, ClosedError, MismatchError, PeerLostError, StallError
from ..orchestration.priority import negotiation
from ..orchestration.priority.negotiation import Coordinator, FollowerChannel, LeaderChannel, Request, Response
from .errors import DuplicateNameError, internal

log = logging.getLogger("bpsfast.hvd")

_TICK_S = 0.5
#: How long `close` waits for the operation that is being executed, in seconds.
_CLOSE_TIMEOUT_S = 5.0
#: How much longer, in seconds, the others wait than the first rank, which can name the missing ranks.
_GRACE_S = 5.0
_SHUT_DOWN = ("Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to "
              "allreduce, allgather or broadcast a tensor after one of the ranks finished execution.")


class Operation:
    """One submitted request of this rank. The service's thread finishes it; any thread waits.

    `inputs` and `outputs` are for the executor, and are kept until the operation is over.
    """

    def __init__(self, request: Request, inputs: Sequence[Any] = (), outputs: Sequence[Any] = ()) -> None:
        self.request = request
        self.inputs = inputs
        self.outputs = outputs
        self.result: Any = None
        self.error: BpsError | None = None
        self.begun = time.monotonic()
        self._pid = os.getpid()
        self._over = threading.Event()

    def finish(self, error: BpsError | None = None) -> None:
        """End the waits: they return `result`, or raise *error*."""
        self.error = error
        self.inputs = ()
        self._over.set()

    def done(self) -> bool:
        """Return whether `wait` will not block."""
        return self._over.is_set()

    def wait(self) -> Any:
        """Wait for the end and return the result. The service ends every operation at its deadline."""
        while not self._over.wait(_TICK_S):
            if self._pid != os.getpid():
                raise internal(ClosedError(f"{self.request.name} was submitted by process {self._pid}, of which this "
                                           "one is a fork: wait for it there"))
        if self.error is not None:
            raise internal(self.error)
        return self.result


#: Executes a response, given this rank's operation for each of its names; None: this rank has joined.
Execute = Callable[[Response, list[Operation | None]], None]
Observer = Callable[[Response, list[float | None], float, float], None]


class NegotiationService(GroupService[Operation]):
    """Job rank *rank*'s service for the set of *ranks*; all of them make one. Any thread submits and closes.

    *channel* leads to the other ranks; None if there are none. The service's thread calls *execute*, in the same order
    on all ranks: it sets results, and an exception ends the service. *check* is called now and then: it raises if the
    job is broken, and returns whether this rank is still in it. The others, of which the first rank's values count: see
    `Coordinator`.
    """

    _LATE_NOTICE_S = 3.0  # less than _CLOSE_TIMEOUT_S

    def __init__(self, ranks: Sequence[int], rank: int, channel: LeaderChannel | FollowerChannel | None,
                 execute: Execute, check: Callable[[], bool], *, fusion_nbytes: int, warn_s: float,
                 timeout_s: float) -> None:
        super().__init__(ranks, rank, channel, "bpsfast-hvd")
        self._execute, self._check = execute, check
        self._timeout_s = timeout_s
        leads = rank == self.ranks[0]
        self._coordinator = Coordinator(ranks, fusion_nbytes, warn_s, timeout_s) if leads else None
        self._outbox: list[Request] = []
        self._unnamed: Counter[str] = Counter()
        self._reason = ""
        self._heard = time.monotonic()
        #: Called with negotiated and executed responses: (response, when this rank's operations began, when the
        #: execution began and ended). It is not called again after it has raised.
        self.observer: Observer | None = None
        self._start()

    def submit(self, operation: Operation) -> Operation:
        """Let *operation* be executed when all ranks of the set have asked for its name.

        Raises DuplicateNameError if the name is under way on this rank, and HorovodInternalError if the service is
        closed or has failed.
        """
        with self._lock:
            self._enter(operation)
        self._wake.ring()
        return operation

    def submit_unnamed(self, kind: str, make: Callable[[str], Operation]) -> Operation:
        """As `submit` of what *make* returns for the name of this rank's next operation of this *kind* without one.

        A call that fails uses no number, so that the ranks' numbers stay equal.
        """
        with self._lock:
            number = self._unnamed[kind] + 1
            operation = make(f"{kind}.noname.{number}")
            self._enter(operation)
            self._unnamed[kind] = number
        self._wake.ring()
        return operation

    def _enter(self, operation: Operation) -> None:
        if self._error is not None:
            raise internal(type(self._error)(str(self._error)))
        if self._closing:
            raise internal(ClosedError(_SHUT_DOWN))
        if operation.request.name in self._operations:
            raise DuplicateNameError(operation.request.name)
        self._operations[operation.request.name] = operation
        self._outbox.append(operation.request)

    def close(self, reason: str = "") -> bool:
        """Leave the set: open operations fail, here and on the other ranks, which are told the *reason*. Idempotent.

        Returns whether the thread has ended. If it waits for other ranks in an operation, it ends later, with the
        session or at their deadline.
        """
        with self._lock:
            self._closing = True
            self._reason = self._reason or reason
        self._wake.ring()
        self._thread.join(_CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    # -- the thread ---------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._closing or not self._check()

    def _leave(self) -> None:
        if self._reason:
            raise PeerLostError(f"rank {self.rank} is lost: {self._reason}")
        self._end(ClosedError(_SHUT_DOWN), negotiation.Left(self.rank))

    def _fail(self, operation: Operation, error: BpsError) -> None:
        operation.finish(type(error)(str(error)))

    def _turn(self, now: float) -> None:
        with self._lock:
            asked, self._outbox = self._outbox, []
            waits = bool(self._operations)
        if self._coordinator is not None:
            self._coordinate(self._coordinator, asked, now)
        elif self._reads_channel:
            self._follow(asked, now)
        elif waits:
            raise self._left_by_leader()

    def _coordinate(self, coordinator: Coordinator, asked: list[Request], now: float) -> None:
        """As the first rank: decide, tell the others, execute."""
        for request in asked:
            coordinator.submit(request, now)
        for message in self._received():
            if isinstance(message, negotiation.Requests):
                for request in message.requests:
                    coordinator.submit(request, now)
            elif isinstance(message, negotiation.Left):
                coordinator.leave(message.rank)
        coordinator.check_timeouts(now)
        text = coordinator.warning(now)
        if text is not None:
            log.warning("%s", text)
        responses = coordinator.responses()
        if responses:
            self._send(negotiation.Responses(tuple(responses)))
            for response in responses:
                self._answer(response)
        if coordinator.failure is not None:
            raise coordinator.failure

    def _follow(self, asked: list[Request], now: float) -> None:
        """As another rank: ask, and execute what the first rank decides."""
        assert isinstance(self._channel, FollowerChannel), "the first rank coordinates"
        if asked:
            self._send(negotiation.Requests(tuple(asked)))
        for message in self._received():
            self._heard = time.monotonic()
            if isinstance(message, negotiation.Responses):
                for response in message.responses:
                    self._answer(response)
            elif isinstance(message, negotiation.Left):
                self._reads_channel = False
        if not self._reads_channel and self._operations:
            raise self._left_by_leader()
        oldest = min((operation.begun for operation in list(self._operations.values())
                      if not operation.request.is_patient), default=now)
        silent_s = now - max(oldest, self._heard)
        if silent_s > self._timeout_s + _GRACE_S:
            raise StallError(
                f"rank {self.ranks[0]}, which coordinates {len(self.ranks)} ranks at {self._channel.address}, has not "
                f"answered rank {self.rank} for {silent_s:.3g} s (timeout_s = {self._timeout_s:g}); it waits for "
                f"{', '.join(list(self._operations)[:3])}")

    def _answer(self, response: Response) -> None:
        """Execute *response*, and end this rank's operations of its names."""
        with self._lock:
            operations = [self._operations.get(name) for name in response.names]
            if response.kind == "join":
                self._unnamed.clear()  # ranks that joined early have counted less far
        begun = time.monotonic()
        if not response.error:
            self._execute(response, operations)
        with self._lock:
            for name in response.names:
                self._operations.pop(name, None)
        observer = self.observer  # another thread may set it to None
        if observer is not None:
            try:
                observer(response, [None if each is None else each.begun for each in operations], begun,
                         time.monotonic())
            except Exception:  # of a full disk, for example, which must not end training
                self.observer = None
                log.exception("rank %d: what was executed cannot be noted, and no longer is", self.rank)
        for operation in operations:
            if operation is not None:
                operation.finish(MismatchError(response.error) if response.error else None)

    def _left_by_leader(self) -> BpsError:
        return PeerLostError(f"{_SHUT_DOWN} Rank {self.ranks[0]} has left, which coordinates: nothing comes of "
                             f"{', '.join(list(self._operations)[:3])}")

    def _send(self, message: msgspec.Struct) -> None:
        if self._reads_channel:  # else the first rank has left
            super()._send(message)
