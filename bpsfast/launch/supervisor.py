"""Run the processes of one job, on this machine or others: their output, their ends, and the job's exit code.

* Every line names its process.
* The process that failed first is named last, with its reason, which is shown once; the exit code is that process's.
* SIGTERM goes to the ranks first, which may end by themselves within a grace period (`bpsfast.preempted`).
* If the job tolerates lost workers (``on_worker_loss = continue``), it goes on while enough ranks are left.
* Ctrl-C ends everything within two seconds. Nothing survives the launcher, not even its ``kill -9``.

One thread. Everything is an event of a selector: lines from pipes, ends of processes (pidfds), messages of other
hosts, signals, and readers of the output that continue after they had stopped. Processes wait for such readers,
signals do not.
"""
from __future__ import annotations

import functools
import re
import selectors
import signal
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..base import logs
from ..base.end_reports import EndTiming
from ..base.exit_codes import ABORTED, FAILED, JOB_TIMEOUT, LEFT_BEHIND, OK, TIMEOUT
from ..orchestration.roster import is_majority
from .elastic_service import KillWorker, StopJob, WorkerPool, is_own_failure, member_of
from .output import CHAINED, TRACEBACK, Output, Sink, Transcript
from .processes import (
    AFTER_SIGKILL_S,
    Command,
    EndReport,
    Kind,
    LocalProcesses,
    Process,
    ProcessHost,
    SignalEvents,
    set_watched,
)
from .ssh import SILENT_HOST_S

#: The phases in which the job goes on.
_GOES_ON = ("run", "grace", "leaving")
_STOPPED = "got SIGTERM"
#: SIGTERM counts once in this time: some senders (timeout(1)) send it to a process, and then to its group.
_SAME_SIGNAL_S = 1.0
#: Time after SIGTERM for ranks to end by themselves, by default: that of Kubernetes for a pod.
GRACE_S = 30.0
#: How long a launcher that got a signal waits for the reader of its last lines.
_DELIVERY_S = 0.5


class Limits(msgspec.Struct, frozen=True):
    """Deadlines of the supervisor, in seconds. `job_s` None: no limit (the job has deadlines of its own).

    `for_cause_s`: after a failure, for the end of the process that caused it, if all that have ended report another
    one's failure; `for_host_s`: additional time while a host is silent, which may be lost. `grace_s`: after SIGTERM,
    for ranks to end by themselves.
    """

    job_s: float | None = None
    after_failure_s: float = 3.0
    for_cause_s: float = 10.0
    for_host_s: float = SILENT_HOST_S + 5.0
    after_ranks_s: float = 5.0
    after_sigterm_s: float = 1.5
    grace_s: float = 0.0


class SpareScheduler(NamedTuple):
    """A scheduler that can take over: its command and host, and its address for users."""

    command: Command
    host: ProcessHost
    address: str


class Supervisor:
    """Runs *commands* until the job ends; `run` may be called once, from the main thread.

    *commands* are in the order of starting; at least one is of kind RANK. *output* takes the lines; the caller closes
    it. *hosts* has the host of each command, which `run` opens and closes; None: all on this machine. With the
    *workers* of an elastic job, *commands* are the first ones, and more may follow, also on other hosts. *restarts*:
    how many lost helpers, in all, are started again to join the running job. *min_workers*: fewest ranks with which the
    job goes on after it has lost ranks, or nodes with ranks (`Command.node`); None: every such loss ends it. *spares*:
    the schedulers that take over, in this order, when the one before is lost with its host, or is killed too often.
    """

    def __init__(self, commands: Sequence[Command], *, limits: Limits | None = None, output: Output | None = None,
                 hosts: Sequence[ProcessHost] | None = None, workers: WorkerPool | None = None,
                 restarts: int = 0, min_workers: int | None = None, spares: Sequence[SpareScheduler] = ()) -> None:
        self._commands = commands
        self._limits = limits or Limits()
        self._output = output or Output()
        self._by_command = [LocalProcesses()] * len(commands) if hosts is None else hosts
        self._hosts: list[ProcessHost] = list(dict.fromkeys(self._by_command))
        self._selector = selectors.DefaultSelector()
        # separate, as it is not watched while too much output waits for its reader
        self._events = selectors.DefaultSelector()
        self._processes: list[Process] = []
        self._restarts = restarts
        self._min_workers = min_workers
        self._spares = deque(spares)
        self._scheduler_name = spares[0].command.name if spares else ""
        self._present_scheduler: Process | None = None  # the last one that was started, if there are spare ones
        self._started_as: dict[Process, tuple[ProcessHost, Sink]] = {}
        self._restarted: set[Process] = set()
        self._errors: dict[Process, Transcript] = {}
        self._n_restarts: dict[str, int] = {}  # of processes that the job needs, by name
        self._workers = workers
        self._failures = Failures(self._errors)
        self._failed_s = 0.0  # when the first one was seen
        self._given_up: set[Process] = set()  # running even after SIGKILL
        self._lost: list[Process] = []  # the job goes on without these
        self._has_no_next_job = False  # the elastic service forms no further job
        self._killed: dict[Process, float] = {}  # absent workers that were killed -> when their end is due
        self._is_joined = False  # a rank has joined the job
        self._stopped: tuple[str, int] | None = None  # reason and exit code, if the launcher ends the job
        self._told_s: float | None = None  # when the launcher got its first signal
        self._job_ends_s = float("inf")
        self._deadline: float | None = None  # of the present phase
        self._phase = "run"

    def run(self) -> int:
        """Start everything, wait until everything has ended, return the job's exit code."""
        with SignalEvents() as signals, self._selector, self._events, self._output.attending():
            self._selector.register(signals, selectors.EVENT_READ, functools.partial(self._on_signals, signals))
            try:
                self._start()
                # without running workers, the service of an elastic job has yet to order what follows
                while self._running or (self._workers is not None and self._phase == "run"):
                    self._step()
                for host in self._hosts:
                    host.drain()
                self._take_reports()
            finally:
                for host in self._hosts:
                    host.begin_close()
                for host in self._hosts:
                    host.close()
            code = self._verdict()
            self._deliver()
        return code if self._stopped is None else self._stopped[1]

    def _start(self) -> None:
        if self._limits.job_s is not None:
            self._deadline = self._job_ends_s = time.monotonic() + self._limits.job_s
        for host in self._hosts:
            host.open(self._events)
        if self._workers is not None:
            self._selector.register(self._workers.fileno(), selectors.EVENT_READ,
                                    functools.partial(self._on_orders, self._workers))
            for source, handler in self._workers.sources:
                self._selector.register(source, selectors.EVENT_READ, handler)
        for command, host in zip(self._commands, self._by_command):
            self._launch(command, host)

    def _launch(self, command: Command, host: ProcessHost) -> None:
        n_ranks = sum(command.kind is Kind.RANK for command in self._commands)
        rank = sum(process.command.kind is Kind.RANK for process in self._processes)
        out, err = self._output.streams(command.name, rank if command.kind is Kind.RANK else None, n_ranks)
        self._begin(command, host, out, err)

    def _begin(self, command: Command, host: ProcessHost, out: Sink, err: Transcript) -> Process:
        process = host.start(command, out, err)
        self._processes.append(process)
        self._started_as[process] = host, out
        self._errors[process] = err
        if command.name == self._scheduler_name:
            self._present_scheduler = process
        return process

    def _start_again(self, lost: Process) -> None:
        """Start a lost helper again on its host, unless that is lost, too."""
        host, out = self._started_as[lost]
        if host.lost:
            self._output.say(f"{lost.command.name} is not started again, as its host is lost")
            return
        self._restarts -= 1
        try:
            again = self._begin(lost.command, host, out, self._errors[lost])
        except OSError as exc:  # the job goes on without it
            self._output.say(f"{lost.command.name} cannot be started again ({exc})")
            return
        self._restarted.add(again)
        self._output.say(f"{lost.command.name} is started again, to join the job; {self._restarts} restarts are left")

    @property
    def _running(self) -> list[Process]:
        return [process for process in self._processes if process.code is None and process not in self._given_up]

    @property
    def _running_ranks(self) -> list[Process]:
        return [process for process in self._running if process.command.kind is Kind.RANK]

    def _step(self) -> None:
        now = time.monotonic()
        next_s = float("inf")
        for host in list(self._hosts):
            due_s, ended = host.tick(now)
            self._have_ended(ended)
            next_s = min(next_s, now if ended else due_s)  # it may have been the last
        if self._workers is not None:
            next_s = min(next_s, self._attend_to(self._workers, now))
        if self._deadline is not None:  # which the ends above may have set
            next_s = min(next_s, self._deadline)
        set_watched(self._selector, self._events, selectors.EVENT_READ, self._on_processes, not self._output.is_full)
        self._attend(None if next_s == float("inf") else max(0.0, next_s - now))
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._next_phase()

    def _attend(self, timeout_s: float | None) -> None:
        for stream in self._output.out_streams:
            if stream.fd is not None:
                set_watched(self._selector, stream.fd, selectors.EVENT_WRITE, stream.flush, stream.pending_nbytes > 0)
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _on_processes(self) -> None:
        for key, _ in self._events.select(0):
            self._have_ended(key.data())

    def _deliver(self) -> None:
        """Wait until all output is read; only briefly if the launcher got a signal."""
        set_watched(self._selector, self._events, selectors.EVENT_READ, self._on_processes, wanted=False)
        until_s = float("inf")
        while self._output.pending_nbytes and (now := time.monotonic()) < until_s:
            if (self._stopped is not None or self._told_s is not None) and until_s == float("inf"):
                until_s = now + _DELIVERY_S
            self._attend(None if until_s == float("inf") else until_s - now)

    def _have_ended(self, processes: Iterable[Process]) -> None:
        for process in processes:
            if self._phase in ("run", "grace") and self._is_waited_for(process):
                continue
            is_spare = process in self._restarted and process.code != 0
            if self._phase in _GOES_ON and (self._can_lose(process) or is_spare):
                self._output.say(f"{process.command.name} {process.end_in_words()}: the job goes on "
                                 f"{self._remainder() if self._is_lost_worker(process) else 'without it'}")
                self._errors[process].release()
                self._lost.append(process)
                if self._restarts > 0 and self._phase == "run" and process.command.kind is Kind.HELPER:
                    self._start_again(process)
            elif self._phase == "grace" and self._follows_signal(process):
                pass
            elif process.code != 0 and not self._is_left_behind(process) and not self._is_superfluous(process) and (
                    self._phase in (*_GOES_ON, "failed") or (process.is_lost and self._stopped is None)):
                # the loss of a host may be known only after the processes that missed it have ended
                if not self._failures:
                    self._failed_s = time.monotonic()
                    for lost in filter(self._is_lost_worker, self._lost):  # the first failure may be one of these
                        self._failures.add(lost)
                self._failures.add(process)
                if self._phase in _GOES_ON:
                    if self._phase == "run" and self._is_lost_worker(process):
                        self._output.say(f"{process.command.name} {process.end_in_words()}: the job cannot go on "
                                         f"{self._remainder()}")
                    self._enter("failed")
            if self._phase in ("run", "grace") and self._has_trained():
                self._enter("leaving")
                self._dismiss()
            elif self._phase == "grace" and not self._running_ranks:
                self._stop(_STOPPED, 128 + signal.SIGTERM)

    def _is_superfluous(self, process: Process) -> bool:
        """Whether *process* is a worker that the elastic job, whose training is over or goes on, does not need."""
        return self._workers is not None and self._workers.is_superfluous(process)

    def _follows_signal(self, process: Process) -> bool:
        """Whether *process* ended as it was told by SIGTERM, or because another one did: others may still be saving."""
        if process.command.kind is Kind.RANK and process.code in (-signal.SIGTERM, 128 + signal.SIGTERM):
            self._stopped = (_STOPPED, 128 + signal.SIGTERM)
        return process.code != 0 and (
            self._stopped is not None or (process.command.kind is not Kind.RANK and process.code == ABORTED))

    def _dismiss(self) -> None:
        """End the daemons if no rank has ever attached to them: the program does not use bpsfast."""
        self._take_reports()
        if self._is_joined or not self._running:
            return
        self._output.say("no rank has joined the job (bpsfast.init): ending "
                         f"{', '.join(process.command.name for process in self._running)}")
        self._signal_all(signal.SIGTERM)
        self._enter("term")

    def _is_waited_for(self, process: Process) -> bool:
        """Start *process* again if a signal killed it and the job needs it, or another scheduler in its place; return
        whether that was done.
        """
        command, n_before = process.command, self._n_restarts.get(process.command.name, 0)
        host, out = self._started_as[process]
        if (process.code or 0) >= 0 or n_before >= command.n_restarts or host.lost:
            return self._is_replaced(process)
        self._n_restarts[command.name] = n_before + 1
        self._output.say(f"{command.name} {process.end_in_words()}: it is started again ({n_before + 1} of "
                         f"{command.n_restarts} times)")
        self._begin(command, host, out, self._errors[process])
        return True

    def _is_replaced(self, process: Process) -> bool:
        """Start the next scheduler if *process* was one, and the job can go on; return whether it has one."""
        name, code = process.command.name, process.code or 0
        if name != self._scheduler_name or not (process.is_lost or code < 0 or code == LEFT_BEHIND):
            return False
        if self._present_scheduler is not process:
            return True  # another one has taken over
        if process.is_lost and not self._has_majority:
            self._output.say(f"{name} {process.end_in_words()}: no scheduler takes over, as fewer nodes are left than "
                             "may go on without the others")
            return False
        out = self._started_as[process][1]
        while self._spares:
            spare = self._spares.popleft()
            if spare.host.lost:
                continue
            self._output.say(f"{name} {process.end_in_words()}: another one is started at {spare.address}")
            self._n_restarts.pop(name, None)
            self._begin(spare.command, spare.host, out, self._errors[process])
            return True
        return False

    @property
    def _has_majority(self) -> bool:
        """Whether the nodes that run may go on without those that have just ended, if the job tolerates that."""
        nodes = [process for process in self._processes
                 if process.command.kind is Kind.DAEMON and process.command.node >= 0]
        before = {process.command.node for process in nodes if process not in self._lost}
        left = {process.command.node for process in nodes if process.code is None}
        return left == before or (self._min_workers is not None and is_majority(left, before)
                                  and self._n_workers_left >= self._min_workers)

    def _can_lose(self, process: Process) -> bool:
        """Whether the job goes on without *process*, which has failed; the scheduler decides that of helpers."""
        if self._workers is not None:
            return self._workers.has_ended(process) and process.code != 0
        if self._is_left_behind(process):
            return True
        if self._is_lost_worker(process):
            if self._phase == "grace":  # a loss in this phase is a failure, unless it follows from one before
                return process.command.node in self._nodes(self._lost)
            return self._n_workers_left >= (self._min_workers or 0)
        code = process.code or 0
        return process.command.kind is Kind.HELPER and (code < 0 or code == LEFT_BEHIND or process.is_lost)

    def _is_left_behind(self, process: Process) -> bool:
        """Whether *process* is a node that ended because the job, which tolerates that, goes on without its ranks."""
        return (self._min_workers is not None and process.command.kind is Kind.DAEMON and process.command.node >= 0
                and process.code == LEFT_BEHIND)

    def _is_lost_worker(self, process: Process) -> bool:
        """Whether *process* is a failed rank, or a failed node with ranks, of a job that tolerates such losses."""
        return (self._min_workers is not None and process.command.node >= 0 and (process.code or 0) != 0
                and not self._is_left_behind(process))

    def _nodes(self, lost: Iterable[Process]) -> set[int]:
        """Return the nodes whose process is one of *lost*, and has failed: ranks that still run there get an error."""
        return {process.command.node for process in lost
                if process.command.kind is Kind.DAEMON and self._is_lost_worker(process)}

    @property
    def _n_workers_left(self) -> int:
        """Number of ranks that have ended with 0, or may still do so."""
        lost_nodes = self._nodes(self._processes)
        return sum(process.command.kind is Kind.RANK and (
            process.code == 0 or (process.code is None and process.command.node not in lost_nodes))
            for process in self._processes)

    def _remainder(self) -> str:
        n_ranks = self._n_workers_left
        return f"with {n_ranks} rank{'' if n_ranks == 1 else 's'} (min_workers = {self._min_workers})"

    def _has_trained(self) -> bool:
        """Whether all ranks have ended, with 0 except those that the job goes on without; late workers do not count.

        At least *min_workers* of them have ended with 0, as `_can_lose` has seen to that. Ranks that still run, and
        have lost their node, do not count: one that hangs would keep the job for ever.
        """
        without_node = self._nodes(self._processes) | {process.command.node for process in self._processes
                                                       if self._is_left_behind(process)}
        ranks = [process for process in self._processes if process.command.kind is Kind.RANK
                 and not self._is_superfluous(process)
                 and not (process.code is None and process.command.node in without_node)]
        return any(process.code == 0 for process in ranks) and all(
            process.code == 0 or process in self._lost for process in ranks)

    def _attend_to(self, workers: WorkerPool, now: float) -> float:
        """Start the workers that are to start, drop hosts that are not used any more; return when to call again."""
        next_s = workers.step(now) if self._phase == "run" else float("inf")
        for new in workers.adopted():
            if new not in self._hosts:
                new.open(self._events)
                self._hosts.append(new)
        for command, chosen in workers.launches():
            if self._phase != "run":
                continue
            host = self._hosts[0] if chosen is None else chosen
            self._output.say(f"{command.name} is started")
            self._launch(command, host)
        for old in workers.released():
            if old in self._hosts:
                self._take_reports()
                self._hosts.remove(old)
            old.close()
        for process, due_s in list(self._killed.items()):
            if process.code is not None or now >= due_s:
                del self._killed[process]
                if process.code is None:
                    self._output.say(f"{process.command.name} runs {AFTER_SIGKILL_S:g} s after SIGKILL: it counts as "
                                     "lost, and is left behind")
                    self._given_up.add(process)
                    self._lost.append(process)
                    workers.outlives(process)
        return min([next_s, *self._killed.values()])

    def _on_orders(self, workers: WorkerPool) -> None:
        for order in workers.orders():
            if self._phase != "run":
                return
            if isinstance(order, StopJob):
                self._output.say(f"no further job: {order.reason}")
                self._has_no_next_job = True
                self._failed_s = time.monotonic()
                lost = [process for process in self._lost if member_of(process.command) in order.lost]
                if all(map(is_own_failure, lost)):  # the program itself failed everywhere: its exit code is the job's
                    for process in lost:
                        self._failures.add(process)
                self._enter("failed")
            elif isinstance(order, KillWorker):
                for process in self._processes:
                    if process.code is None and member_of(process.command) == order.member:
                        self._output.say(f"{process.command.name} has not joined the others in time: ending it")
                        process.signal_all(signal.SIGKILL)
                        self._killed[process] = time.monotonic() + AFTER_SIGKILL_S
            else:
                workers.take(order)

    def _enter(self, phase: str) -> None:
        limits = self._limits
        duration_s = {"grace": limits.grace_s, "failed": limits.after_failure_s, "leaving": limits.after_ranks_s,
                      "term": limits.after_sigterm_s, "kill": AFTER_SIGKILL_S}[phase]
        self._phase = phase
        self._deadline = time.monotonic() + duration_s
        if phase == "grace":
            self._deadline = min(self._deadline, self._job_ends_s)

    def _next_phase(self) -> None:
        """Enter the next phase: the time of the present one is over."""
        running = self._running
        names = ", ".join(process.command.name for process in running)
        if self._phase == "run" or (self._phase == "grace" and time.monotonic() >= self._job_ends_s):
            self._stop(f"the job has not ended within {self._limits.job_s:g} s", JOB_TIMEOUT)
        elif self._phase == "grace":
            ranks = [process.command.name for process in self._running_ranks]
            self._stop(f"{_STOPPED} {self._limits.grace_s:g} s ago, and {', '.join(ranks)} "
                       f"{'has' if len(ranks) == 1 else 'have'} not ended", 128 + signal.SIGTERM)
        elif self._phase in ("failed", "leaving") and self._output.is_full:
            # the processes' last output waits for the reader: the time starts when it reads on
            self._enter(self._phase)
        elif self._phase == "failed" and self._awaits_cause():
            self._deadline = min(time.monotonic() + self._limits.after_failure_s,
                                 self._failed_s + self._limits.for_cause_s + self._limits.for_host_s)
        elif self._phase in ("failed", "leaving"):
            if self._phase == "leaving" and running:
                self._output.say(f"still running {self._limits.after_ranks_s:g} s after the last rank ended: {names}; "
                                 "ending them (did the program call bpsfast.init and shutdown?)")
            self._signal_all(signal.SIGTERM)
            self._enter("term")
        elif self._phase == "term":
            self._kill()
        else:  # they wait in the kernel, or belong to another user
            self._output.say(f"still running {AFTER_SIGKILL_S:g} s after SIGKILL: {names}; they are left behind. A "
                             "process of another user (sudo), or one that waits for a device (state D in ps), must be "
                             "ended by hand")
            self._given_up.update(running)
            self._deadline = None

    def _awaits_cause(self) -> bool:
        """Whether all failed processes report another one's failure, and that one may still be about to end."""
        self._take_reports()
        is_known = self._failures.first()[1]
        is_silent = any(self._started_as[process][0].is_silent for process in self._running)
        patience_s = self._limits.for_cause_s + (self._limits.for_host_s if is_silent else 0.0)
        return not is_known and bool(self._running_ranks) and (
            time.monotonic() < self._failed_s + patience_s)

    def _take_reports(self) -> None:
        for host in self._hosts:
            reports = host.reports()
            self._is_joined |= any(each.word in ("attached", "joined") for each in reports)
            self._failures.take(reports)

    def _kill(self) -> None:
        if self._phase != "kill":  # else its time already runs
            self._enter("kill")
        self._signal_all(signal.SIGKILL)

    def _on_signals(self, signals: SignalEvents) -> None:
        for number in signals.take():
            now_s = time.monotonic()
            self._told_s = now_s if self._told_s is None else self._told_s
            if self._phase == "grace" and number == signal.SIGTERM and now_s - self._told_s < _SAME_SIGNAL_S:
                continue
            if (number == signal.SIGTERM and self._phase == "run" and self._limits.grace_s > 0
                    and self._running_ranks):
                self._output.hurry()
                self._output.say(f"{_STOPPED}: the ranks have {self._limits.grace_s:g} s to end")
                self._enter("grace")
                for process in self._running_ranks:
                    process.signal(signal.SIGTERM)
            elif self._stopped is None and self._phase != "grace":
                self._stop(f"got {signal.Signals(number).name}", 128 + number)
            else:  # the second one: at once
                if self._phase == "grace":
                    self._output.say(f"got {signal.Signals(number).name}: killing all processes")
                self._stopped = self._stopped or (_STOPPED, 128 + number)
                self._kill()

    def _stop(self, why: str, code: int) -> None:
        self._stopped = (why, code)
        self._output.hurry()
        self._output.say(f"{why}: ending all processes")
        self._signal_all(signal.SIGTERM)
        self._enter("term")

    def _signal_all(self, number: int) -> None:
        for process in self._running:
            process.signal_all(number)

    def _verdict(self) -> int:
        """Write which process ended the job, if one did; return the job's exit code."""
        cause, _ = self._failures.first()
        code = FAILED if self._has_no_next_job else OK
        if cause is not None and cause.code is not None:
            code = 128 - cause.code if cause.code < 0 else cause.code
            if cause.command.name == self._scheduler_name and code == LEFT_BEHIND:
                code = TIMEOUT  # it has left the job to the next one, and no host was left for that
            err = self._errors[cause]
            self._output.say_cause(f"{cause.command.name} failed first: it {cause.end_in_words()}",
                                   traceback_of(err.tail), err)
        return code


#: A line of a process that ended only because of another one: it is not the cause, whatever follows the line.
_CONSEQUENCE = re.compile(
    rb"(?:[\w.]+\.)?(?:PeerLostError: |StallError: .*: has called shutdown)|KeyboardInterrupt\b|" + logs.CONSEQUENCE)


class Failures:
    """Finds the process that failed first among those that have failed. *errors* has the error output of each.

    The order of ends is not enough: a process that raised an exception may take seconds to end, and those that lose it
    end at once. So a process is no cause if it reported another one's failure before its own end began (`end_reports`),
    if a daemon's exit code says so, or, without reports, if its last output blames another process. Of the others the
    cause is the one that began to end first.
    """

    def __init__(self, errors: Mapping[Process, Transcript]) -> None:
        self._errors = errors
        self._failed: list[Process] = []
        self._ends: defaultdict[Process, EndTiming] = defaultdict(EndTiming)

    def __bool__(self) -> bool:
        return bool(self._failed)

    def add(self, process: Process) -> None:
        """Note that *process* has failed, not by the launcher's signal."""
        self._failed.append(process)

    def take(self, reports: Iterable[EndReport]) -> None:
        """Take reports of processes about their ends."""
        for process, word, time_s in reports:
            self._ends[process].take(word, time_s)

    def follows(self, process: Process) -> bool:
        """Whether the failure of *process* follows from another one's."""
        if process.command.kind is not Kind.RANK and process.code == ABORTED:
            return True
        return self._ends[process].follows or any(
            _CONSEQUENCE.match(line) for line in traceback_of(self._errors[process].tail))

    def first(self) -> tuple[Process | None, bool]:
        """Return the process that failed first, and whether it is the cause: not if all failures follow from others.

        A daemon that exits without output probably follows an abort: it is the cause only if no other process is.
        """
        in_order = sorted(self._failed, key=lambda process: self._ends[process].began_s(process.ended_s))
        causes = [process for process in in_order if not self.follows(process)]
        with_output = [process for process in causes if process.command.kind is Kind.RANK or (process.code or 0) < 0
                or any(line.strip() for line in self._errors[process].tail)]
        found = next(iter([*with_output, *causes, *in_order]), None)
        return found, bool(causes)


def traceback_of(tail: Sequence[bytes], n_lines: int = 20) -> list[bytes]:
    """Return the last traceback in *tail* with those it is chained to, else the last lines."""
    lines = list(tail)
    starts = [i for i, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if not starts:
        return lines[-n_lines:]
    first = starts[-1]
    for start in reversed(starts[:-1]):
        if not any(line.rstrip().endswith(CHAINED) for line in lines[start:first]):
            break
        first = start
    return lines[first:]
