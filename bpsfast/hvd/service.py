"""One thread for each process set of this rank: it says what this rank wants, hears what all execute, and executes it.

Any thread submits operations under names; the first rank of the set coordinates (`orchestration.order.negotiation`).
What an operation does is the executor's: the service only keeps the order, the deadlines and the errors.
"""
from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..orchestration import errors
from ..orchestration.errors import BpsError, ClosedError, MismatchError, PeerLostError, StallError
from ..orchestration.priority import negotiation as says
from ..orchestration.priority.negotiation import Coordinator, FollowerChannel, LeaderChannel, Request, Response
from ..orchestration.wake_up import WakeUp
from .errors import DuplicateNameError, internal

log = logging.getLogger("bpsfast.hvd")

_TICK_S = 0.5
#: How long `close` waits for what is being executed.
_CLOSE_TIMEOUT_S = 5.0
#: How much longer the others wait than the first rank, which knows who is missing.
_GRACE_S = 5.0
#: How long the first rank goes on to tell those who are still connecting that it has ended: less than `_CLOSE_TIMEOUT_S`.
_LATE_NOTICE_S = 3.0
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


class NegotiationService:
    """The part of job rank *rank* in the set of *ranks*. Any thread submits and closes; made and closed by all of them.

    Parameters
    ----------
    line
        To the other ranks: the first rank's end, another one's, or None where there is nobody else.
    execute
        Called by the service's thread, in one order on all ranks. Sets results; an exception ends the service.
    check
        Called now and then: raises if the job is broken; returns whether this rank is still in it.
    fusion_nbytes, warn_s, timeout_s
        See `Coordinator`; the first rank's count.
    """

    def __init__(self, ranks: Sequence[int], rank: int, line: LeaderChannel | FollowerChannel | None, execute: Execute,
                 check: Callable[[], bool], *, fusion_nbytes: int, warn_s: float, timeout_s: float) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self._line = line
        self._execute, self._check = execute, check
        self._timeout_s = timeout_s
        leads = rank == self.ranks[0]
        self._coordinator = Coordinator(ranks, fusion_nbytes, warn_s, timeout_s) if leads else None
        self._lock = threading.Lock()  # of what both threads write: open operations, outbox, names, error
        self._open: dict[str, Operation] = {}
        self._outbox: list[Request] = []
        self._unnamed: Counter[str] = Counter()
        self._error: BpsError | None = None
        self._closing = False
        self._reason = ""
        self._leader_has_left = False
        self._heard = time.monotonic()
        #: Hears of negotiated and executed responses: (response, this rank's operations, when begun, when over). Who
        #: raises hears no more.
        self.observer: Callable[[Response, list[Operation | None], float, float], None] | None = None
        self._wake = WakeUp()
        self._thread = threading.Thread(target=self._run, name="bpsfast-hvd", daemon=True)
        try:
            if isinstance(line, FollowerChannel):
                line.tell(says.Hello(rank))
            self._thread.start()
        except BaseException:
            self._free()
            raise

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
        if operation.request.name in self._open:
            raise DuplicateNameError(operation.request.name)
        self._open[operation.request.name] = operation
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

    def _run(self) -> None:
        try:
            while not self._closing and self._check():
                self._sleep()
                self._turn(time.monotonic())
            if self._reason:
                raise PeerLostError(f"rank {self.rank} is lost: {self._reason}")
            self._leave(says.Left(self.rank), ClosedError(_SHUT_DOWN))
        except BpsError as exc:
            self._fail(exc)
        except Exception as exc:
            log.exception("rank %d: an operation failed", self.rank)
            self._fail(PeerLostError(f"an operation of rank {self.rank} failed: {type(exc).__name__}: {exc}"))
        finally:
            self._free()

    def _sleep(self) -> None:
        if self._line is not None and not self._leader_has_left:
            self._line.wait(self._wake.fileno(), _TICK_S)
        else:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            poll.poll(_TICK_S * 1000)
        self._wake.clear()

    def _turn(self, now: float) -> None:
        with self._lock:
            asked, self._outbox = self._outbox, []
            waits = bool(self._open)
        if self._coordinator is not None:
            self._coordinate(self._coordinator, asked, now)
        elif not self._leader_has_left:
            self._follow(asked, now)
        elif waits:
            raise self._left_by_leader()

    def _coordinate(self, coordinator: Coordinator, asked: list[Request], now: float) -> None:
        """As the first rank: decide, tell the others, execute."""
        for request in asked:
            coordinator.submit(request, now)
        for message in self._line.recv_nowait() if self._line is not None else ():
            if isinstance(message, says.Requests):
                for request in message.requests:
                    coordinator.submit(request, now)
            elif isinstance(message, says.Left):
                coordinator.leave(message.rank)
            elif isinstance(message, says.Failed):
                raise _error_of(message)
        coordinator.look_at_the_clock(now)
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
        assert isinstance(self._line, FollowerChannel), "the first rank coordinates"
        if asked:
            self._say(says.Requests(tuple(asked)))
        for message in self._line.recv_nowait():
            self._heard = time.monotonic()
            if isinstance(message, says.Responses):
                for response in message.responses:
                    self._answer(response)
            elif isinstance(message, says.Failed):
                raise _error_of(message)
            elif isinstance(message, says.Left):
                self._leader_has_left = True
        if self._leader_has_left and self._open:
            raise self._left_by_leader()
        oldest = min((operation.begun for operation in list(self._open.values())
                      if not operation.request.is_patient), default=now)
        silent_s = now - max(oldest, self._heard)
        if silent_s > self._timeout_s + _GRACE_S:
            raise StallError(
                f"rank {self.ranks[0]}, which coordinates {len(self.ranks)} ranks at {self._line.address}, has not "
                f"answered rank {self.rank} for {silent_s:.3g} s (timeout_s = {self._timeout_s:g}); it waits for "
                f"{', '.join(list(self._open)[:3])}")

    def _answer(self, response: Response) -> None:
        """Execute *response*, and end this rank's operations of its names."""
        with self._lock:
            operations = [self._open.get(name) for name in response.names]
            if response.kind == "join":
                self._unnamed.clear()  # ranks that joined early have counted less far
        begun = time.monotonic()
        if not response.error:
            self._execute(response, operations)
        with self._lock:
            for name in response.names:
                self._open.pop(name, None)
        observer = self.observer  # another thread may take it away
        if observer is not None:
            try:
                observer(response, operations, begun, time.monotonic())
            except Exception:  # of a full disk, for example: training goes on
                self.observer = None
                log.exception("rank %d: what was executed cannot be noted, and no longer is", self.rank)
        for operation in operations:
            if operation is not None:
                operation.finish(MismatchError(response.error) if response.error else None)

    def _left_by_leader(self) -> BpsError:
        return PeerLostError(f"{_SHUT_DOWN} Rank {self.ranks[0]} has left, which coordinates: nothing comes of "
                             f"{', '.join(list(self._open)[:3])}")

    def _say(self, message: says.Message) -> None:
        if isinstance(self._line, LeaderChannel):
            self._line.tell(message)  # whoever is gone is missed by the job, or has left
        elif self._line is not None and not self._leader_has_left:
            self._line.tell(message)

    def _fail(self, error: BpsError) -> None:
        self._leave(says.Failed(type(error).__name__, str(error)), error)

    def _leave(self, message: says.Failed | says.Left, error: BpsError) -> None:
        """Let the others hear of the end, and this rank's operations end with *error*."""
        told = self._line.present if isinstance(self._line, LeaderChannel) else set[int]()
        try:
            self._say(message)
        except Exception as exc:  # the end of this rank's operations must come, whatever the line does
            log.debug("rank %d could not say that it ends: %s", self.rank, exc)
        finally:
            self._end(error)
        if isinstance(self._line, LeaderChannel) and not isinstance(error, StallError):
            # who has not come in all the time of a stall comes no more
            self._line.send_to_late_joiners(message, told, len(self.ranks) - 1, time.monotonic() + _LATE_NOTICE_S)

    def _end(self, error: BpsError) -> None:
        with self._lock:
            self._error = error
            abandoned = list(self._open.values())
            self._open.clear()
        for operation in abandoned:
            operation.finish(type(error)(str(error)))

    def _free(self) -> None:
        if self._line is not None:
            self._line.close()
        self._wake.close()


def _error_of(message: says.Failed) -> BpsError:
    return getattr(errors, message.error, PeerLostError)(message.reason)
