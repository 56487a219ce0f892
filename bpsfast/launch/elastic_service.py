"""The service of an elastic job: a thread of the launcher that answers workers, as the job's coordinator decides.

The launcher's main thread owns the processes, so the service *orders* what concerns them: start a worker, kill a
worker, end the job. The main thread polls `ElasticService.fileno`, carries out `orders`, and reports how its processes
end. The supervisor uses both through `WorkerPool`.
"""
from __future__ import annotations

import logging
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from ..base.job_key import elastic_key
from ..orchestration.elastic import protocol
from ..orchestration.elastic.coordinator import ElasticCoordinator, ElasticRules, Exclude, Fail, Form
from ..orchestration.errors import ProtocolError
from ..orchestration.host_lookup import format_address
from ..orchestration.wake_up import WakeUp
from .processes import Command, Process, ProcessHost

_log = logging.getLogger("bpsfast.elastic")
_MEMBER = "BPSFAST_MEMBER"
_NODE = "BPSFAST_NODE_ID"
_LOOK_S = 1.0
#: How long newcomers wait to join for a replacement that has been started, at most.
_TOGETHER_S = 5.0
#: How long a worker that a job goes on without, although it lives, has to come back: it has lost its node, or hangs.
_COMES_BACK_S = 20.0
_REASON_LENGTH = 500
_DISMISSED = "the training goes on without this worker: the list of hosts has no slot for it any more"


class ReplaceWorker(NamedTuple):
    """Start a worker for the lost *member*."""

    member: int


class StartWorkers(NamedTuple):
    """Start *n_workers* more."""

    n_workers: int


class KillWorker(NamedTuple):
    """Kill *member*, which does not answer."""

    member: int


class StopJob(NamedTuple):
    """End the job: no next one can be formed. Workers that are connected raise *reason*; there may be none.

    *lost* are the members of the last job that are lost, in the order of their ends.
    """

    reason: str
    lost: tuple[int, ...] = ()


Order = ReplaceWorker | StartWorkers | KillWorker | StopJob


class ElasticService:
    """Listens from construction on; `start` begins to answer, `close` ends the thread. Called by the main thread only.

    *members* are the first workers, by rank, *key* is the job's key, *host* an address of this machine for workers; "":
    all addresses. *ports*: the first and the last one of those it may listen at; 0: any.

    Raises `ConfigError` if there is no free port.
    """

    def __init__(self, rules: ElasticRules, members: Sequence[int], key: bytes, host: str,
                 ports: tuple[int, int] = (0, 0)) -> None:
        self._coordinator = ElasticCoordinator(rules, members)
        self._server = protocol.listen(elastic_key(key), host, ports)
        self.port = self._server.port
        self.address = format_address(host, self.port)
        self._calls: deque[Callable[[], None]] = deque()
        self._orders: deque[Order] = deque()
        self._wake, self._ordered = WakeUp(), WakeUp()
        self._alive = set(members)
        self._gone: set[int] = set()  # has ended, or counts as lost
        self._asked: set[int] = set()  # to be replaced or killed, and still open
        self._n_starting = 0  # ordered, and not started yet
        self._told = protocol.Newcomers(0, 0)  # what the members of a job know
        self._left_behind: dict[int, float] = {}  # members that a job went on without -> when they are ended
        self._newcomers_since_s = 0.0
        self._preparing: dict[int, protocol.Come] = {}  # members that will be ready to be let into the running job
        self._store: dict[str, str] = {}
        self._stored_nbytes = 0
        self._wanted: dict[str, set[int]] = {}
        self._next_word_s = 0.0
        #: Why `bpsfast add` adds no workers to this job; "" if it does.
        self.no_adding = ""
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="bpsfast-elastic", daemon=True)

    # -- the launcher's side ---------------------------------------------------------------------------------------

    def expect(self, rules: ElasticRules, members: Sequence[int]) -> None:
        """Set the rules and the first workers, if they were not known at construction, before one is started."""
        self._alive = set(members)
        self._coordinator = ElasticCoordinator(rules, members)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that can be read when there are `orders`."""
        return self._ordered.fileno()

    def orders(self) -> list[Order]:
        """Return the orders since the last call, oldest first."""
        self._ordered.clear()
        return [self._orders.popleft() for _ in range(len(self._orders))]

    def started(self, member: int, instead_of: int | None = None, was_ordered: bool = True) -> None:
        """Note that *member* runs, *instead_of* a lost one if given. *was_ordered*: by one of `orders`."""
        def enter() -> None:
            self._alive.add(member)
            if instead_of is None:
                self._n_starting -= was_ordered
            else:
                self._asked.discard(instead_of)
                self._coordinator.replaced(instead_of, member, time.monotonic())

        self._run_in_thread(enter)

    def ended(self, member: int, how: str, is_own_failure: bool = False) -> None:
        """Note that *member* is lost: *how* in words. *is_own_failure*: it ended with an error of its own."""
        def enter() -> None:
            self._alive.discard(member)
            self._gone.add(member)
            self._asked.discard(member)
            self._preparing.pop(member, None)
            self._coordinator.ended(member, how, time.monotonic(), is_own_failure)
            if self._coordinator.holds_rank(member):
                self._void(f"worker {member} {how}")

        self._run_in_thread(enter)

    def left(self, member: int) -> None:
        """Note that *member* has ended with exit code 0, or was not needed."""
        def enter() -> None:
            self._alive.discard(member)
            self._preparing.pop(member, None)
            self._coordinator.left(member)
            if self._coordinator.is_over:
                self._send(protocol.Over(), self._coordinator.waiting)

        self._run_in_thread(enter)

    def leave(self, members: Sequence[int]) -> None:
        """Let *members* leave at the next commit, as their host is taken away."""
        def enter() -> None:
            self._send(protocol.Dismissed(_DISMISSED), self._coordinator.leave(members))

        self._run_in_thread(enter)

    def give_up(self, reason: str) -> None:
        """Form no more jobs: workers that wait or connect later raise *reason*."""
        def enter() -> None:
            if self._coordinator.failure is None:
                self._fail(Fail("PeerLostError", reason))

        self._run_in_thread(enter)

    @property
    def is_over(self) -> bool:
        """Whether the training has ended on all ranks."""
        return self._coordinator.is_over

    @property
    def has_failed(self) -> bool:
        """Whether no further job is formed."""
        return self._coordinator.failure is not None

    def holds_rank(self, member: int) -> bool:
        """Whether *member* belongs to the job that was formed last, or to the first one that is being formed."""
        return self._coordinator.holds_rank(member)

    def close(self) -> None:
        """End the thread; messages to workers are still sent, for at most a second."""
        self._closing = True
        self._wake.ring()
        if self._thread.ident is not None:
            self._thread.join()
        self._server.close()
        self._wake.close()
        self._ordered.close()

    def _run_in_thread(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wake.ring()

    # -- the thread's ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as exc:  # no other thread would notice
            _log.exception("the elastic service has failed")
            self._order(StopJob(f"the elastic service has failed: {type(exc).__name__}: {exc}"))

    def _turn(self) -> None:
        left_s = self._coordinator.due_s - time.monotonic()
        self._server.wait(self._wake.fileno(), min(_LOOK_S, max(0.01, left_s)))
        self._wake.clear()
        while self._calls:
            self._calls.popleft()()
        try:
            messages = self._server.recv_nowait()
        except ProtocolError as exc:
            messages = []  # further calls return those before and after it
            _log.warning("%s", exc)
        for message in messages:
            self._handle(message)
        while self._preparing and not self._has_running_job:
            self._on_come(self._preparing.popitem()[1])
        self._decide()
        self._announce(now_s := time.monotonic())
        self._end_left_behind(now_s)
        if now_s >= self._next_word_s and (self._coordinator.waiting or self._preparing):
            self._next_word_s = now_s + protocol.WORD_EVERY_S
            self._send(protocol.Wait(self._coordinator.awaited), self._coordinator.waiting)
            self._send(protocol.Wait(self._coordinator.awaited, prepares=True), self._preparing)

    def _handle(self, message: object) -> None:
        match message:
            case protocol.Come():
                self._on_come(message)
            case protocol.Prepared() if message.member in self._preparing:
                self._on_come(msgspec.structs.replace(self._preparing.pop(message.member), is_ready=True))
            case protocol.Done():
                self._on_lost(message.member, message.lost)
                self._coordinator.done()
                self._send(protocol.Over(), self._coordinator.waiting)
            case protocol.Put():
                self._on_put(message)
            case protocol.Want():
                self._on_want(message)
            case protocol.Add():
                self._on_add(message)

    def _on_come(self, message: protocol.Come) -> None:
        coordinator, was_running = self._coordinator, self._coordinator.is_running
        if message.member in self._gone and not coordinator.is_over:  # an old message, or it runs on a lost host
            reason = f"worker {message.member} counts as lost, and the others go on without it"
            self._send(protocol.Refused("PeerLostError", reason), [message.member])
            return
        if self._has_running_job and not message.is_ready and not coordinator.holds_rank(message.member):
            self._preparing[message.member] = message
            self._send(protocol.Wait(coordinator.awaited, prepares=True), [message.member])
            return
        self._preparing.pop(message.member, None)
        self._on_lost(message.member, message.lost)
        coordinator.came(message.member, message.node, time.monotonic(), message.has_state, message.n_commits,
                    message.reason[:_REASON_LENGTH])
        if coordinator.is_over:
            self._send(protocol.Over(), [message.member])
        elif coordinator.failure is not None:
            self._send(protocol.Refused(*coordinator.failure), [message.member])
        elif coordinator.is_dismissed(message.member):
            self._send(protocol.Dismissed(_DISMISSED), [message.member])
        elif was_running and not coordinator.is_running:
            self._void(f"worker {message.member} has left it")

    def _on_lost(self, member: int, ranks: Sequence[int]) -> None:
        """Note that the job of *member* went on without *ranks*: their workers come back soon, or hang."""
        if self._coordinator.holds_rank(member):
            due_s = time.monotonic() + _COMES_BACK_S
            for left_behind in self._coordinator.left_behind(ranks):
                self._left_behind.setdefault(left_behind, due_s)

    def _end_left_behind(self, now_s: float) -> None:
        """End the workers that a job has gone on without, and that have not come back in time."""
        for member, due_s in list(self._left_behind.items()):
            if member not in self._alive or member in self._coordinator.waiting:
                del self._left_behind[member]
            elif now_s >= due_s:
                self._ask([KillWorker(member)])

    def was_left_behind(self, member: int) -> bool:
        """Whether the last job went on without *member*, which has not come back."""
        return member in self._left_behind

    def _announce(self, now_s: float) -> None:
        """Tell the members of the running job how many members wait to join or are to leave, if that has changed.

        A replacement that has been started may still come: for some time newcomers are not announced, as one new job is
        enough for several. Members that may still train when the others have come back are told to leave, too.
        """
        coordinator = self._coordinator
        if coordinator.is_over or coordinator.failure is not None:
            return
        if self._told.job != coordinator.number:
            self._told = protocol.Newcomers(coordinator.number, 0)
        now = protocol.Newcomers(coordinator.number, int(coordinator.is_calling_back))
        if coordinator.is_running:
            now = protocol.Newcomers(coordinator.number, len(coordinator.newcomers), len(coordinator.departing))
        if now.count <= self._told.count:
            self._newcomers_since_s = now_s
        elif coordinator.is_replacing and coordinator.is_running and now_s - self._newcomers_since_s < _TOGETHER_S:
            now = msgspec.structs.replace(now, count=self._told.count)
        if now != self._told:
            self._told = now
            self._send(now, [holder.member for holder in coordinator.holders])

    @property
    def _has_running_job(self) -> bool:
        coordinator = self._coordinator
        return coordinator.is_running and not coordinator.is_over and coordinator.failure is None

    def _on_put(self, message: protocol.Put) -> None:
        if message.job != self._coordinator.number or not self._coordinator.holds_rank(message.member):
            return
        nbytes = protocol.stored_nbytes(message.key, message.value)
        before = self._store.get(message.key)
        other_nbytes = self._stored_nbytes - (0 if before is None else protocol.stored_nbytes(message.key, before))
        if nbytes > protocol.MOST_VALUE_NBYTES or other_nbytes + nbytes > protocol.MOST_STORED_NBYTES:
            _log.warning("worker %d stores %d bytes beside %d, more than the limit: ignored",
                         message.member, nbytes, other_nbytes)
            return
        self._store[message.key] = message.value
        self._stored_nbytes = other_nbytes + nbytes
        self._send(protocol.Value(message.job, message.key, message.value), self._wanted.pop(message.key, ()))

    def _on_want(self, message: protocol.Want) -> None:
        if message.job != self._coordinator.number or not self._coordinator.holds_rank(message.member):
            return
        if message.key in self._store:
            self._send(protocol.Value(message.job, message.key, self._store[message.key]), [message.member])
        elif len(self._wanted) < protocol.MOST_WANTED and len(message.key) <= protocol.MOST_KEY_LENGTH:
            self._wanted.setdefault(message.key, set()).add(message.member)
        else:
            _log.warning("worker %d asks for an unknown value, beside %d others: ignored",
                         message.member, len(self._wanted))

    def _on_add(self, message: protocol.Add) -> None:
        most = self._coordinator.rules.max_ranks
        n_replacing = len({*self._coordinator.to_replace, *(self._asked - self._alive)})
        n_workers = len(self._alive) + self._n_starting + n_replacing
        count = max(0, min(message.count, most - n_workers))
        if self._coordinator.is_over or self._coordinator.failure is not None:
            count, reason = 0, "the training has ended"
        elif self.no_adding:
            count, reason = 0, self.no_adding
        else:
            reason = "" if count == message.count else (
                f"{n_workers} workers run, and the job may have {most} (--max-ranks)")
        if count:
            self._n_starting += count
            self._order(StartWorkers(count))
        self._send(protocol.Added(count, reason), [message.member])

    def _decide(self) -> None:
        coordinator = self._coordinator
        self._ask([ReplaceWorker(member) for member in coordinator.to_replace])  # a new job knows no earlier losses
        while (found := coordinator.decide(time.monotonic())) is not None:
            if isinstance(found, Form):
                self._form(found)
            elif isinstance(found, Fail):
                self._fail(found)
            elif isinstance(found, Exclude):
                self._ask([KillWorker(member) for member in found.members])
                break
        self._ask([ReplaceWorker(member) for member in coordinator.to_replace])

    def _form(self, form: Form) -> None:
        self._send(protocol.Dismissed(_DISMISSED), form.dismissed)
        self._store.clear()
        self._stored_nbytes = 0
        self._wanted.clear()
        for rank, member in enumerate(form.members):
            self._left_behind.pop(member, None)  # it has come back
            formed = protocol.Formed(form.number, rank, len(form.members), self._coordinator.rules.lost_worker,
                                     form.n_commits)
            self._send(formed, [member])

    def _fail(self, fail: Fail) -> None:
        self._coordinator.failure = fail
        self._send(protocol.Refused(*fail), self._coordinator.waiting)
        self._order(StopJob(fail.reason, self._coordinator.lost))

    def _void(self, reason: str) -> None:
        """Tell the members of the last job that it is void, if it was not complete yet."""
        if self._coordinator.number:
            members = [holder.member for holder in self._coordinator.holders]
            self._send(protocol.Void(self._coordinator.number, reason), members)

    def _ask(self, orders: Sequence[ReplaceWorker | KillWorker]) -> None:
        for order in orders:
            if order.member not in self._asked:
                self._asked.add(order.member)
                self._order(order)

    def _order(self, order: Order) -> None:
        self._orders.append(order)
        self._ordered.ring()

    def _send(self, message: object, members: Iterable[int]) -> None:
        for member in members:
            self._server.tell(message, but=self._server.present - {member})  # type: ignore[arg-type]


class HasFileno(Protocol):
    """A descriptor to watch, or an object that has one."""

    def fileno(self) -> int:
        """Return the descriptor."""


def worker(member: int, command: Command) -> Command:
    """Return *command* as that of worker *member*."""
    return msgspec.structs.replace(command, name=f"worker {member}", environ={**command.environ, _MEMBER: str(member)})


def member_of(command: Command) -> int:
    """Return the member number of the worker that *command* starts."""
    return int(command.environ[_MEMBER])


def is_own_failure(process: Process) -> bool:
    """Whether *process* ended with an error of its own, and was not killed or lost with its host.

    A shell or a container around a worker that was killed ends with the code 128 + signal.
    """
    code = process.code or 0
    return code > 0 and not process.is_lost and code - 128 not in signal.valid_signals()


class WorkerPool:
    """An elastic job's workers, for the supervisor: which ones the job can lose, what to start. Main thread only.

    *workers* are the commands of the first workers. *goes_on*: whether the job can lose workers (policy not abort).
    """

    def __init__(self, service: ElasticService, workers: Sequence[Command], goes_on: bool) -> None:
        self._service = service
        self._commands = {member_of(command): command for command in workers}
        self._goes_on = goes_on
        self._running = set(self._commands)
        self._next = len(self._commands)
        self._launches: list[tuple[Command, ProcessHost | None]] = []
        self.fileno, self.orders, self.give_up = service.fileno, service.orders, service.give_up

    @property
    def sources(self) -> Sequence[tuple[HasFileno, Callable[[], object]]]:
        """What to watch beside `fileno`: descriptors that become readable, and what to call then, before `step`."""
        return ()

    def step(self, now_s: float) -> float:
        """Do what is due while the job runs; return when to call again. New workers are in `launches` then."""
        return float("inf")

    def launches(self) -> list[tuple[Command, ProcessHost | None]]:
        """Return the workers to start now, and where (None: here), since the last call. They count as running."""
        found, self._launches = self._launches, []
        return found

    def adopted(self) -> list[ProcessHost]:
        """Return hosts that were connected since the last call, to open."""
        return []

    def released(self) -> list[ProcessHost]:
        """Return hosts that are not used any more, since the last call, to close: that does not block."""
        return []

    def take(self, order: ReplaceWorker | StartWorkers) -> None:
        """Carry out *order*: start a lost worker's program on its node, or workers on the nodes with the fewest."""
        if isinstance(order, ReplaceWorker):
            self._start(self._commands[order.member], order.member)
        else:
            for _ in range(order.n_workers):
                self._start(self._least_used())

    def has_ended(self, process: Process) -> bool:
        """Note that *process* has ended; return whether the job goes on without it.

        With a policy for lost workers it does until the training is over, unless no worker is left, which the
        coordinator finds. After the training, the end of a worker that was not in the last job does not matter.
        """
        member, code = member_of(process.command), process.code
        self._running.discard(member)
        if code == 0 or self.is_superfluous(process):
            self._service.left(member)
        elif self._goes_on and not self._service.is_over:
            self._service.ended(member, process.end_in_words(), is_own_failure(process))
        else:
            self.give_up(f"{process.command.name} {process.end_in_words()}")
            return False
        return True

    def is_superfluous(self, process: Process) -> bool:
        """Whether the training has ended without *process*: it joined too late, or not at all."""
        member = member_of(process.command)
        return self._service.is_over and (
            not self._service.holds_rank(member) or self._service.was_left_behind(member))

    def outlives(self, process: Process) -> None:
        """Note that *process* was killed because it was absent, and does not end: it is lost all the same."""
        self._running.discard(member_of(process.command))
        self._service.ended(member_of(process.command), "does not end after SIGKILL")

    def _start(self, like: Command, instead_of: int | None = None, host: ProcessHost | None = None,
               was_ordered: bool = True) -> int:
        """Add a new worker to `launches`, and return its number."""
        member, self._next = self._next, self._next + 1
        self._commands[member] = worker(member, like)
        self._running.add(member)
        self._service.started(member, instead_of, was_ordered)
        self._launches.append((self._commands[member], host))
        return member

    def _least_used(self) -> Command:
        """Return a command of the node with the fewest workers, the first of these."""
        by_node: dict[str, Command] = {}
        for command in self._commands.values():
            by_node.setdefault(command.environ.get(_NODE, ""), command)
        count = Counter(self._commands[member].environ.get(_NODE, "") for member in self._running)
        return by_node[min(by_node, key=lambda node: count[node])]
