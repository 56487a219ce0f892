"""Negotiates and executes the operations of one process set on this rank, in one thread.

Any thread submits operations under names. The first rank of the set coordinates (`orchestration.priority.negotiation`).
What an operation does is the executor's; the service keeps the order, the deadlines and the errors.
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
from ..orchestration.priority import negotiation as says
from ..orchestration.priority.negotiation import Coordinator, FollowerChannel, LeaderChannel, Request, Response
from .errors import DuplicateNameError, internal

log = logging.getLogger("bpsfast.hvd")

_TICK_S = 0.5
#: How long `close` waits for what is being executed.
_CLOSE_TIMEOUT_S = 5.0
#: How much longer the others wait than the first rank, which knows who is missing.
_GRACE_S = 5.0
_SHUT_DOWN = ("Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to "
              "allreduce, allgather or broadcast a tensor after one of the ranks finished execution.")


class Operation:
    """One request of this rank on its way. Made by the caller, finished by the service's thread; any thread waits.

    `inputs` and `outputs` are the executor's, and kept until the operation is over.
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
        """Let the waiters go: what they get is `result`, unless there is an *error*."""
        self.error = error
        self.inputs = ()
        self._over.set()

    def done(self) -> bool:
        """Return whether `wait` will not block."""
        return self._over.is_set()

    def wait(self) -> Any:
        """Wait for the end and return the result. The service ends every operation: it keeps the deadlines."""
        while not self._over.wait(_TICK_S):
            if self._pid != os.getpid():
                raise internal(ClosedError(f"{self.request.name} was submitted by process {self._pid}, of which this "
                                           "one is a fork: wait for it there"))
        if self.error is not None:
            raise internal(self.error)
        return self.result


#: Executes a response; of each of its names the operation of this rank, None: it has joined, and stands aside.
Execute = Callable[[Response, list[Operation | None]], None]
Observer = Callable[[Response, list[float | None], float, float], None]


class NegotiationService(GroupService[Operation]):
    """The part of job rank *rank* in the set of *ranks*. Any thread submits and closes; made and closed by all of them.

    Parameters
    ----------
    channel
        To the other ranks; None if there are none.
    execute
        Called by the service's thread, in one order on all ranks. Sets results; an exception ends the service.
    check
        Called now and then: raises if the job is broken; returns whether this rank is still in it.
    fusion_nbytes, warn_s, timeout_s
        See `Coordinator`; the first rank's count.
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

        Raises
        ------
        DuplicateNameError
            If the name is under way on this rank.
        HorovodInternalError
            If nothing more is executed: this is closed, or what happened to the set.
        """
        with self._lock:
            self._enter(operation)
        self._wake.ring()
        return operation

    def submit_unnamed(self, kind: str, make: Callable[[str], Operation]) -> Operation:
        """As `submit` of what *make* returns for the name of this rank's next operation of this *kind* without one.

        The number counts only if the operation is submitted: a call that fails leaves the ranks in step.
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
        """Leave the set: operations that are still open fail, here and on the other ranks, which are told the *reason*.

        Returns whether the thread has ended. It has not where it executes what other ranks keep it waiting in: that
        ends with the session, or with their deadline. Calling this again does nothing else.
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
        self._end(ClosedError(_SHUT_DOWN), says.Left(self.rank))

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
            if isinstance(message, says.Requests):
                for request in message.requests:
                    coordinator.submit(request, now)
            elif isinstance(message, says.Left):
                coordinator.leave(message.rank)
        coordinator.check_timeouts(now)
        text = coordinator.warning(now)
        if text is not None:
            log.warning("%s", text)
        responses = coordinator.responses()
        if responses:
            self._say(says.Responses(tuple(responses)))
            for response in responses:
                self._answer(response)
        if coordinator.failure is not None:
            raise coordinator.failure

    def _follow(self, asked: list[Request], now: float) -> None:
        """As another rank: ask, and execute what the first rank says."""
        assert isinstance(self._channel, FollowerChannel), "the first rank coordinates"
        if asked:
            self._say(says.Requests(tuple(asked)))
        for message in self._received():
            self._heard = time.monotonic()
            if isinstance(message, says.Responses):
                for response in message.responses:
                    self._answer(response)
            elif isinstance(message, says.Left):
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
        observer = self.observer  # another thread may take it away
        if observer is not None:
            try:
                observer(response, [None if each is None else each.begun for each in operations], begun,
                         time.monotonic())
            except Exception:  # of a full disk, for example: training goes on
                self.observer = None
                log.exception("rank %d: what was executed cannot be noted, and no longer is", self.rank)
        for operation in operations:
            if operation is not None:
                operation.finish(MismatchError(response.error) if response.error else None)

    def _left_by_leader(self) -> BpsError:
        return PeerLostError(f"{_SHUT_DOWN} Rank {self.ranks[0]} has left, which coordinates: nothing comes of "
                             f"{', '.join(list(self._operations)[:3])}")

    def _say(self, message: msgspec.Struct) -> None:
        if self._reads_channel:  # a rank that is gone is missed by the job, or has left
            super()._say(message)
