"""Tests that a job goes on when the host of a helper is lost, starts nothing there again, and ends."""
from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
import types

import pytest

from bpsfast.base.exit_codes import LOST_HOST
from bpsfast.launch import supervisor as supervisors
from bpsfast.launch.elastic_service import KillWorker, StopJob, WorkerPool, worker
from bpsfast.launch.host_list import Host
from bpsfast.launch.output import Output
from bpsfast.launch.processes import Command, Kind, LocalProcesses
from bpsfast.launch.remote_hosts import RemoteHosts
from bpsfast.launch.ssh import SILENT_HOST_S, Ssh
from bpsfast.launch.supervisor import Limits, Supervisor
from bpsfast.orchestration.wake_up import WakeUp

_LIMITS = Limits(job_s=60.0, after_failure_s=0.3, after_ranks_s=0.3, after_sigterm_s=0.5)


class Heard(io.BytesIO):
    """Output in which somebody waits for words. Any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._came = threading.Condition()

    def write(self, data) -> int:
        with self._came:
            self._came.notify_all()
            return super().write(data)

    def await_words(self, words: bytes, count: int = 1) -> None:
        """Return once *words* came *count* times."""
        with self._came:
            assert self._came.wait_for(lambda: self.getvalue().count(words) >= count, 30.0), (words, self.getvalue())


def gate(folder) -> str:
    """Make a named pipe: who reads it goes on when who writes it has opened and closed it."""
    path = str(folder / "gate")
    os.mkfifo(path)
    return path


def a_rank(path: str, code: int = 0) -> Command:
    """Return a rank that ends when somebody opens the gate at *path*."""
    text = f"open({path!r}).read(); raise SystemExit({code})"
    return Command("rank 0", Kind.RANK, (sys.executable, "-S", "-c", text), dict(os.environ))


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize("kills_first", [False, True])
def test_a_helper_s_host_is_lost(restarts, code, kills_first, tmp_path, no_leaks):
    """Real agents. *kills_first*: the helper was lost before, and is one that was started again."""
    path = gate(tmp_path)
    helper = Command("helper 0", Kind.HELPER, (
        sys.executable, "-S", "-u", "-c", "import os, time; print(os.getpid(), os.getppid()); time.sleep(600)"), {})
    out, err = Heard(), Heard()
    with contextlib.closing(Output(out, err)) as output, \
            RemoteHosts([Host("localhost", 1), Host("localhost", 0)], Ssh(), output) as fleet:
        fleet.connect()

        def trouble() -> None:
            out.await_words(b"[helper 0]")
            if kills_first:
                os.kill(int(out.getvalue().split()[2]), signal.SIGKILL)
                if restarts:
                    out.await_words(b"[helper 0]", 2)
                else:
                    err.await_words(b"the job goes on without it")
            os.kill(int(out.getvalue().split()[3]), signal.SIGKILL)
            if not kills_first or restarts:
                err.await_words(b"was lost with its host localhost")
            open(path, "w").close()

        thread = threading.Thread(target=trouble)
        thread.start()
        found = Supervisor([a_rank(path, code), helper], limits=_LIMITS, output=output, hosts=fleet.hosts,
                           restarts=restarts).run()
        thread.join()
    said = err.getvalue().decode()
    assert found == code, said
    assert said.count("started again, to join the job") == int(kills_first and restarts > 0), said
    if not kills_first or restarts:
        assert "helper 0 was lost with its host localhost (localhost: its agent was killed by SIGKILL" in said
        assert said.count("the job goes on without it") == 1 + kills_first
    if restarts:
        assert "helper 0 is not started again, as its host is lost" in said


@pytest.mark.slow
def test_a_host_that_is_switched_off_is_the_cause(tmp_path, no_leaks):
    """Its rank is missed long before ssh tells that the host is lost: another one's end is no cause meanwhile."""
    path = gate(tmp_path)
    told = "from bpsfast.base import end_reports; end_reports.report('joined'); end_reports.report('told')"
    follower = Command("rank 0", Kind.RANK, (
        sys.executable, "-c", f"{told}; open({path!r}).read(); raise SystemExit(1)"), dict(os.environ))
    lost = Command("rank 1", Kind.RANK, (
        sys.executable, "-S", "-u", "-c", "import os, time; print(os.getpid(), os.getppid()); time.sleep(600)"), {})
    out, err = Heard(), Heard()
    with contextlib.closing(Output(out, err)) as output, \
            RemoteHosts([Host("localhost", 1), Host("localhost", 1)], Ssh(), output) as fleet:
        fleet.connect()
        switched_off = threading.Event()

        def trouble() -> None:
            out.await_words(b"[rank 1]")
            rank, agent = map(int, out.getvalue().split()[2:4])
            for each in (agent, rank):
                os.kill(each, signal.SIGSTOP)
            open(path, "w").close()
            switched_off.wait(SILENT_HOST_S)  # nobody sets it: so much later ssh gives up
            for each in (agent, rank):
                os.kill(each, signal.SIGKILL)

        thread = threading.Thread(target=trouble)
        thread.start()
        code = Supervisor([follower, lost], limits=Limits(job_s=100.0), output=output, hosts=fleet.hosts).run()
        thread.join()
    said = err.getvalue().decode()
    assert code == LOST_HOST, said
    assert "rank 1 failed first: it was lost with its host localhost" in said


class LosableProcess:
    """A process of a host that does what a test says: `code` is set by its place."""

    def __init__(self, command: Command) -> None:
        self.command, self.code, self.ended_s, self.is_lost = command, None, 0.0, False
        self.signals: list[int] = []

    def signal_all(self, number: int) -> None:
        self.signals.append(number)

    def end_in_words(self) -> str:
        return "was lost with its host c (nothing was heard of it for 30 s)"


class LosableHost:
    """A host that is lost *after_s* its first process was started; infinity: never, and its processes do not end."""

    def __init__(self, after_s: float) -> None:
        self.lost, self.processes = "", []
        self._after_s = after_s

    is_silent = False

    def open(self, selector) -> None:
        pass

    def start(self, command, out, err):
        assert not self.lost
        self._lost_s = time.monotonic() + self._after_s
        self.processes.append(LosableProcess(command))
        return self.processes[-1]

    def tick(self, now_s):
        ended = [process for process in self.processes if process.code is None]
        if now_s < self._lost_s or self.lost:
            return (float("inf") if self.lost else self._lost_s), ()
        self.lost = "lost"
        for process in ended:
            process.code, process.is_lost, process.ended_s = LOST_HOST, True, now_s
        return float("inf"), ended

    def reports(self):
        return ()

    def drain(self) -> None:
        pass

    begin_close = close = drain


def supervise(commands, places, **options) -> tuple[int, str]:
    """Run *commands*; return exit code and error output."""
    err = io.BytesIO()
    with contextlib.closing(Output(io.BytesIO(), err)) as output:
        code = Supervisor(commands, limits=_LIMITS, output=output, hosts=places, **options).run()
    return code, err.getvalue().decode()


def test_what_time_has_ended_sets_the_deadline_of_the_same_step():
    """A silent rank, and an end that only the clock tells: nothing else wakes the launcher."""
    rank = Command("rank 0", Kind.RANK, ("sleep", "600"), dict(os.environ))
    begin = time.monotonic()
    code, said = supervise([rank, Command("node 1", Kind.DAEMON, (), {})], [LocalProcesses(), LosableHost(0.3)])
    assert code == LOST_HOST and "node 1 failed first: it was lost with its host c" in said
    assert time.monotonic() - begin < 10.0, "not at the job's deadline"


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_what_outlives_sigkill_is_given_up(is_interrupted, monkeypatch):
    """It waits in the kernel, or is another user's: nobody ends it."""
    monkeypatch.setattr(supervisors, "AFTER_SIGKILL_S", 0.5)
    host = LosableHost(float("inf"))
    text = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); import time; time.sleep(600)"
    rank = Command("rank 0", Kind.RANK, (sys.executable, "-S", "-c", text if is_interrupted else "raise SystemExit(7)"),
                   dict(os.environ))
    begin = time.monotonic()
    code, said = supervise([Command("helper 0", Kind.HELPER, (), {}), rank], [host, LocalProcesses()])
    assert time.monotonic() - begin < 10.0
    assert code == (128 + signal.SIGTERM if is_interrupted else 7), said
    assert "still running 0.5 s after SIGKILL: helper 0; they are left behind" in said
    assert host.processes[0].signals == [signal.SIGTERM, signal.SIGKILL]


def test_signals_do_not_put_off_the_end(monkeypatch):
    """Of a launcher that is asked again and again while something outlives SIGKILL."""
    monkeypatch.setattr(supervisors, "AFTER_SIGKILL_S", 1.0)
    # in a session of its own, so that no SIGKILL of the launcher ends it
    rank = Command("rank 0", Kind.RANK, ("sh", "-c", "setsid sh -c 'while kill -INT $0; do sleep 0.05; done' $PPID"),
                   dict(os.environ))
    begin = time.monotonic()
    hosts = [LosableHost(float("inf")), LocalProcesses()]
    code, said = supervise([Command("helper 0", Kind.HELPER, (), {}), rank], hosts)
    assert time.monotonic() - begin < 10.0
    assert code == 128 + signal.SIGINT and "1 s after SIGKILL: helper 0" in said


class AbsentWorkers(WorkerPool):
    """The workers of a job whose worker 0 is to be killed because it is absent; nothing is left to do without it."""

    def __init__(self, command: Command) -> None:
        self._wake, self._due = WakeUp(), [KillWorker(0)]
        self.told: list[Command] = []
        super().__init__(types.SimpleNamespace(fileno=self._wake.fileno, orders=self.ordered, give_up=None,
                                               is_over=False), [command], goes_on=True)
        self._wake.ring()

    def ordered(self):
        """Return what is ordered, once."""
        self._wake.clear()
        found, self._due = self._due, []
        return found

    def outlives(self, process) -> None:
        """See `WorkerPool`."""
        self.told.append(process.command)
        self._due = [StopJob("no quorum: nobody is left")]
        self._wake.ring()


def test_an_absent_worker_that_outlives_sigkill_counts_as_lost(monkeypatch):
    monkeypatch.setattr(supervisors, "AFTER_SIGKILL_S", 0.2)
    command = worker(0, Command("", Kind.RANK, (), {}))
    workers, host = AbsentWorkers(command), LosableHost(float("inf"))
    err = io.BytesIO()
    with contextlib.closing(Output(io.BytesIO(), err)) as output:
        code = Supervisor([command], limits=_LIMITS, output=output, hosts=[host], workers=workers).run()
    said = err.getvalue().decode()
    assert code == 1 and workers.told == [command] and host.processes[0].signals[0] == signal.SIGKILL
    assert "worker 0 runs 0.2 s after SIGKILL: it counts as lost, and is left behind" in said
    assert "no further job: no quorum: nobody is left" in said


class StubService:
    """An elastic service of two workers, which says *reason* once all of *lost* are; without them it is over."""

    def __init__(self, lost=()):
        self._wake, self._left, self._due = WakeUp(), set(lost), []
        self._lost, self.is_over, self.fileno = tuple(lost), not lost, self._wake.fileno
        self.give_up = self.left = lambda *arguments: None

    def holds_rank(self, member):
        return bool(self._lost) or member == 0

    def was_left_behind(self, member):
        return False

    def ended(self, member, how, is_own_failure):
        self._left.discard(member)
        if not self._left:
            self._due = [StopJob("no quorum", self._lost)]
            self._wake.ring()

    def orders(self):
        self._wake.clear()
        found, self._due = self._due, []
        return found


def test_a_worker_without_a_rank_whose_host_is_lost_after_the_training_changes_no_exit_code(monkeypatch):
    """It is lost while it is being ended."""
    commands = [worker(number, Command("", Kind.RANK, argv, dict(os.environ)))
                for number, argv in ((0, ("true",)), (1, ()))]
    monkeypatch.setattr(sys.modules[__name__], "_LIMITS", Limits(job_s=60.0, after_ranks_s=0.1, after_sigterm_s=20.0))
    code, said = supervise(commands, [LocalProcesses(), LosableHost(1.0)],
                           workers=WorkerPool(StubService(), commands, goes_on=True))
    assert code == 0, said


@pytest.mark.parametrize(("how", "code"), [("exit 4", 3), ("kill -9 $$", 1)])
def test_a_failure_is_the_cause_only_if_the_program_failed_everywhere(how, code):
    """Worker 1 fails, and the job goes on; then worker 0 ends in its own way, and nobody is left."""
    commands = [worker(number, Command("", Kind.RANK, ("sh", "-c", text), dict(os.environ)))
                for number, text in ((1, "exit 3"), (0, f"sleep 0.5; {how}"))]
    found, said = supervise(commands, [here := LocalProcesses(), here],
                            workers=WorkerPool(StubService((1, 0)), commands, goes_on=True))
    assert found == code, said
