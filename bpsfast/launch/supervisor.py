"""Run the processes of one job, on this machine or others: their output, their end, and the one exit code.

What users of launchers ask for (and did not get): every line says whose it is; the process that failed *first* is named
last, with its reason, which is told once; the exit code is that process's; Ctrl-C ends everything within two seconds;
nothing survives the launcher, not even its ``kill -9``.

One thread. Everything is an event of a selector: lines from pipes, ends of processes (pidfds), messages of other
hosts, signals (a socket), and readers of the output that go on after they have stopped: the processes wait for them,
signals do not.
"""
from __future__ import annotations

import functools
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Sequence

import msgspec

from ..base.exit_codes import FAILED, JOB_TIMEOUT, LEFT_BEHIND, OK
from .elastic_service import End, Order, Stop
from .first_failure import Failures, traceback_of
from .output import Output, Sink, Transcript
from .processes import AFTER_SIGKILL_S, Command, Kind, LocalProcesses, Process, ProcessHost, watch
from .ssh import SILENT_HOST_S
from .worker_pool import WorkerPool, member_of

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: How long a launcher that was told to end waits for the reader of its last lines.
_DELIVERY_S = 0.5


class Limits(msgspec.Struct, frozen=True):
    """How long the supervisor waits, in seconds. `job_s` None: for ever (the job's own deadlines hold).

    `for_cause_s`: after a failure, for the end of whatever caused it, if all that have ended were told of another's;
    `for_host_s`: so much longer while a host is silent, which may be lost.
    """

    job_s: float | None = None
    after_failure_s: float = 3.0
    for_cause_s: float = 10.0
    for_host_s: float = SILENT_HOST_S + 5.0
    after_ranks_s: float = 5.0
    after_sigterm_s: float = 1.5


class Supervisor:
    """Run *commands* until the job is over; `run` may be called once, from the main thread.

    Parameters
    ----------
    commands
        In the order of starting. At least one is of kind RANK.
    output
        Where lines go; the caller closes it.
    places
        Where each command runs, one for each; None: all on this machine. `run` opens and closes them.
    crew
        If the job is elastic: all of *commands* are its workers, and more may follow, on this machine.
    restarts
        How many lost helpers are started again, in all: they join the running job.
    """

    def __init__(self, commands: Sequence[Command], *, limits: Limits | None = None, output: Output | None = None,
                 places: Sequence[ProcessHost] | None = None, crew: WorkerPool | None = None, restarts: int = 0) -> None:
        self._commands = commands
        self._limits = limits or Limits()
        self._output = output or Output()
        self._by_command = [LocalProcesses()] * len(commands) if places is None else places
        self._places: list[ProcessHost] = list(dict.fromkeys(self._by_command))
        self._selector = selectors.DefaultSelector()
        # of their own, to be left alone while too much output waits for its reader
        self._events = selectors.DefaultSelector()
        self._processes: list[Process] = []
        self._restarts = restarts
        self._started_as: dict[Process, tuple[ProcessHost, Sink]] = {}
        self._restarted: set[Process] = set()
        self._errors: dict[Process, Transcript] = {}
        self._n_restarts: dict[str, int] = {}  # of what the job waits for, by name
        self._crew = crew
        self._failures = Failures(self._errors)
        self._failed_s = 0.0  # when the first of them was seen
        self._given_up: set[Process] = set()  # they outlive SIGKILL
        self._missed: list[Process] = []  # workers that the job goes on without
        self._is_hopeless = False  # the muster has said so
        self._is_joined = False  # a rank has come to the job
        self._stopped: tuple[str, int] | None = None  # why the launcher itself ends the job, exit code
        self._deadline: float | None = None  # of the present phase
        self._phase = "run"

    def run(self) -> int:
        """Start everything, wait until everything has ended, return the job's exit code."""
        wake, waker = socket.socketpair()
        with wake, waker, self._selector, self._events, self._output.attending():
            wake.setblocking(False)
            waker.setblocking(False)
            self._selector.register(wake, selectors.EVENT_READ, functools.partial(self._on_signals, wake))
            # under nohup a hang-up stays ignored
            caught = [n for n in _ENDING if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
            before = {number: signal.signal(number, lambda number, frame: None) for number in caught}
            fd_before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            try:
                self._run_job()
                code = self._verdict()
                self._deliver()
            finally:
                signal.set_wakeup_fd(fd_before)
                for number, handler in before.items():
                    signal.signal(number, handler)
        return code if self._stopped is None else self._stopped[1]

    def _run_job(self) -> None:
        try:
            self._start()
            while self._running or self._is_awaiting_orders:
                self._step()
            for place in self._places:
                place.drain()
            self._take_reports()
        finally:
            for place in self._places:
                place.begin_close()
            for place in self._places:
                place.close()

    def _start(self) -> None:
        if self._limits.job_s is not None:
            self._deadline = time.monotonic() + self._limits.job_s
        for place in self._places:
            place.open(self._events)
        if self._crew is not None:
            self._selector.register(self._crew.fileno(), selectors.EVENT_READ, self._on_orders)
        for command, place in zip(self._commands, self._by_command):
            self._launch(command, place)

    def _launch(self, command: Command, place: ProcessHost) -> None:
        n_ranks = sum(command.kind is Kind.RANK for command in self._commands)
        rank = sum(process.command.kind is Kind.RANK for process in self._processes)
        out, err = self._output.streams(command.name, rank if command.kind is Kind.RANK else None, n_ranks)
        self._begin(command, place, out, err)

    def _begin(self, command: Command, place: ProcessHost, out: Sink, err: Transcript) -> Process:
        process = place.start(command, out, err)
        self._processes.append(process)
        self._started_as[process] = place, out
        self._errors[process] = err
        return process

    def _start_again(self, lost: Process) -> None:
        """Start a helper in the place of one that is lost, where that ran, if its host lives."""
        place, out = self._started_as[lost]
        if place.lost:
            self._output.say(f"{lost.command.name} is not started again, as its host is lost")
            return
        self._restarts -= 1
        try:
            again = self._begin(lost.command, place, out, self._errors[lost])
        except OSError as exc:  # the job can do without it
            self._output.say(f"{lost.command.name} cannot be started again ({exc})")
            return
        self._restarted.add(again)
        self._output.say(f"{lost.command.name} is started again, to join the job; {self._restarts} restarts are left")

    @property
    def _running(self) -> list[Process]:
        return [process for process in self._processes if process.code is None and process not in self._given_up]

    def _step(self) -> None:
        now = time.monotonic()
        next_s = float("inf")
        for place in self._places:
            due_s, ended = place.tick(now)
            self._have_ended(ended)
            next_s = min(next_s, now if ended else due_s)  # it may have been the last
        if self._deadline is not None:  # which the ends may have set just now
            next_s = min(next_s, self._deadline)
        watch(self._selector, self._events, selectors.EVENT_READ, self._on_processes, not self._output.is_full)
        self._attend(None if next_s == float("inf") else max(0.0, next_s - now))
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._next_phase()

    def _attend(self, timeout_s: float | None) -> None:
        for outlet in self._output.outlets:
            if outlet.fd is not None:
                watch(self._selector, outlet.fd, selectors.EVENT_WRITE, outlet.flush, outlet.pending_nbytes > 0)
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _on_processes(self) -> None:
        for key, _ in self._events.select(0):
            self._have_ended(key.data())

    def _deliver(self) -> None:
        """Wait until all output is read; not for long if the launcher was told to end."""
        watch(self._selector, self._events, selectors.EVENT_READ, self._on_processes, wanted=False)
        until_s = float("inf")
        while self._output.pending_nbytes and (now := time.monotonic()) < until_s:
            if self._stopped is not None and until_s == float("inf"):
                until_s = now + _DELIVERY_S
            self._attend(None if until_s == float("inf") else until_s - now)

    def _have_ended(self, processes: Iterable[Process]) -> None:
        for process in processes:
            if self._phase == "run" and self._is_waited_for(process):
                continue
            is_spare = process in self._restarted and process.code != 0
            if self._phase in ("run", "leaving") and (self._can_be_missed(process) or is_spare):
                self._output.say(f"{process.command.name} {process.end_in_words()}: the job goes on without it")
                self._errors[process].release()
                self._missed.append(process)
                if self._restarts > 0 and self._phase == "run" and process.command.kind is Kind.HELPER:
                    self._start_again(process)
            elif process.code != 0 and (self._phase in ("run", "failed", "leaving")
                                        or (process.is_lost and self._stopped is None)):
                # that a host is lost may be known only when the others, who have missed it, are ended already
                if not self._failures:
                    self._failed_s = time.monotonic()
                self._failures.add(process)
                if self._phase in ("run", "leaving"):
                    self._enter("failed")
            if self._phase == "run" and self._has_trained():
                self._enter("leaving")
                self._dismiss()

    def _dismiss(self) -> None:
        """End the daemons if no rank has ever come to them: what has run is no program of bpsfast."""
        self._take_reports()
        if self._is_joined or not self._running:
            return
        self._output.say("no rank has joined the job (bpsfast.init): ending "
                         f"{', '.join(process.command.name for process in self._running)}")
        self._signal_all(signal.SIGTERM)
        self._enter("term")

    def _is_waited_for(self, process: Process) -> bool:
        """Start what a signal has ended again, if the job waits for it; whether that was done."""
        command, n_before = process.command, self._n_restarts.get(process.command.name, 0)
        place, out = self._started_as[process]
        if (process.code or 0) >= 0 or n_before >= command.n_restarts or place.lost:
            return False
        self._n_restarts[command.name] = n_before + 1
        self._output.say(f"{command.name} {process.end_in_words()}: it is started again ({n_before + 1} of "
                         f"{command.n_restarts} times)")
        self._begin(command, place, out, self._errors[process])
        return True

    def _can_be_missed(self, process: Process) -> bool:
        """Whether the job goes on without *process*, which has ended otherwise than well."""
        if self._crew is not None:
            return self._crew.has_ended(process) and process.code != 0
        return _can_be_missed(process)

    def _has_trained(self) -> bool:
        """Whether all ranks have ended, well but for those that the job has done without; who comes too late is none.
        """
        ranks = [process for process in self._processes if process.command.kind is Kind.RANK
                 and not (self._crew is not None and self._crew.is_superfluous(process))]
        return any(process.code == 0 for process in ranks) and all(
            process.code == 0 or process in self._missed for process in ranks)

    @property
    def _is_awaiting_orders(self) -> bool:
        """Whether the muster of an elastic job, of which nobody runs any more, has yet to say what follows."""
        return self._crew is not None and self._phase == "run"

    def _on_orders(self) -> None:
        assert self._crew is not None, "whose orders else"
        for order in self._crew.orders():
            if self._phase == "run":
                self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        assert self._crew is not None, "whose orders else"
        if isinstance(order, Stop):
            self._output.say(f"no further job: {order.reason}")
            self._is_hopeless = True
            self._enter("failed")
        elif isinstance(order, End):
            for process in self._processes:
                if process.code is None and member_of(process.command) == order.member:
                    self._output.say(f"{process.command.name} has not come to the others in time: ending it")
                    process.signal_all(signal.SIGKILL)
        else:
            for command in self._crew.commands(order):
                self._output.say(f"{command.name} is started")
                self._launch(command, self._places[0])

    def _enter(self, phase: str) -> None:
        limits = self._limits
        duration_s = {"failed": limits.after_failure_s, "leaving": limits.after_ranks_s,
                      "term": limits.after_sigterm_s, "kill": AFTER_SIGKILL_S}[phase]
        self._phase = phase
        self._deadline = time.monotonic() + duration_s

    def _next_phase(self) -> None:
        """The present phase's time is over."""
        running = self._running
        names = ", ".join(process.command.name for process in running)
        if self._phase == "run":
            self._stop(f"the job has not ended within {self._limits.job_s:g} s", JOB_TIMEOUT)
        elif self._phase in ("failed", "leaving") and self._output.is_full:
            # their ends, and why, wait for the reader; time begins when it goes on
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
        else:  # nothing else can be done: they wait in the kernel, or became another user's
            self._output.say(f"still running {AFTER_SIGKILL_S:g} s after SIGKILL: {names}; they are left behind. A "
                             "process of another user (sudo), or one that waits for a device (state D in ps), must be "
                             "ended by hand")
            self._given_up.update(running)
            self._deadline = None

    def _awaits_cause(self) -> bool:
        """Whether all that failed were told that another one had, and that one may still be about to end."""
        self._take_reports()
        is_known = self._failures.first()[1]
        is_silent = any(self._started_as[process][0].is_silent for process in self._running)
        patience_s = self._limits.for_cause_s + (self._limits.for_host_s if is_silent else 0.0)
        return not is_known and any(process.command.kind is Kind.RANK for process in self._running) and (
            time.monotonic() < self._failed_s + patience_s)

    def _take_reports(self) -> None:
        for place in self._places:
            told = place.reports()
            self._is_joined |= any(each.word in ("attached", "joined") for each in told)
            self._failures.take(told)

    def _kill(self) -> None:
        if self._phase != "kill":  # else its time runs
            self._enter("kill")
        self._signal_all(signal.SIGKILL)

    def _on_signals(self, wake: socket.socket) -> None:
        for number in wake.recv(64):
            if number not in _ENDING:
                continue
            if self._stopped is None:
                self._stop(f"got {signal.Signals(number).name}", 128 + number)
            else:  # asked twice: at once
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
        """Show what ended the job, if anything did; return its exit code."""
        cause, _ = self._failures.first()
        code = FAILED if self._is_hopeless else OK
        if cause is not None and cause.code is not None:
            code = 128 - cause.code if cause.code < 0 else cause.code
            err = self._errors[cause]
            self._output.conclude(f"{cause.command.name} failed first: it {cause.end_in_words()}",
                                  traceback_of(err.tail), err)
        return code


def _can_be_missed(process: Process) -> bool:
    """Whether the job goes on without *process*: the scheduler decides that, unless it has never come that far."""
    code = process.code or 0
    return process.command.kind is Kind.HELPER and (code < 0 or code == LEFT_BEHIND or process.is_lost)
