"""Tests that a job whose setting ``on_worker_loss`` is "continue" goes on without lost ranks, nodes and hosts."""
from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading

import msgspec
import pytest

from bpsfast.base.exit_codes import ABORTED, LEFT_BEHIND, LOST_HOST
from bpsfast.base.settings import Settings
from bpsfast.launch import local_job
from bpsfast.launch.host_list import Host
from bpsfast.launch.output import Output
from bpsfast.launch.processes import Command, Kind, LocalProcesses
from bpsfast.launch.remote_hosts import RemoteHosts
from bpsfast.launch.ssh import Ssh
from bpsfast.launch.supervisor import Limits, Supervisor
from tests.launch.test_lost_hosts import Heard, LosableHost

_FAST = Limits(job_s=60.0, after_failure_s=0.3, after_ranks_s=0.3, after_sigterm_s=1.5)
_STAYS = "import time; time.sleep(600)"
_KILLED = "import os; os.kill(os.getpid(), 9)"
#: What a rank of bpsfast reports: without it nobody waits for the daemons at the end.
_JOINED = """
import os, time
path, _, number = os.environ["_BPSFAST_END_REPORTS"].rpartition(":")
open(path, "a").write(f"{number} joined {time.monotonic_ns()}\\n")
"""


def program(name: str, text: str, kind: Kind = Kind.RANK, node: int = 0) -> Command:
    """Return a command that runs Python *text*."""
    return Command(name, kind, (sys.executable, "-S", "-c", text), dict(os.environ), node=node)


def node_process(number: int, text: str) -> Command:
    return program(f"node {number}", text, Kind.DAEMON, number)


class Gates(Output):
    """Output that opens a gate when the launcher says something: a process that has waited at the gate goes on.

    A process waits by the text that `after` returns.
    """

    def __init__(self, folder, err: io.BytesIO) -> None:
        super().__init__(io.BytesIO(), err)
        self._folder = folder
        self._paths: dict[str, str] = {}

    def after(self, words: str) -> str:
        self._paths[words] = str(self._folder / f"gate{len(self._paths)}")
        os.mkfifo(self._paths[words])
        return f"open({self._paths[words]!r}).read()"

    def say(self, text: str) -> None:
        super().say(text)
        for words in [words for words in self._paths if words in text]:
            open(self._paths.pop(words), "w").close()


class Job:
    """A job with gates, on this machine unless `run` gets other *hosts*."""

    def __init__(self, folder) -> None:
        self._err = io.BytesIO()
        self.output = Gates(folder, self._err)
        self.after = self.output.after

    def run(self, *commands: Command, min_workers: int | None = 1, kind: type[Supervisor] = Supervisor,
            limits: Limits = _FAST, **options) -> tuple[int, str]:
        """Return the exit code and what was written to standard error."""
        with contextlib.closing(self.output):
            code = kind(commands, limits=limits, output=self.output, min_workers=min_workers, **options).run()
        return code, self._err.getvalue().decode()


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


@pytest.mark.parametrize(("text", "words"), [
    ("raise SystemExit(3)", "ended with exit code 3"), (_KILLED, "was killed by SIGKILL"),
    ("raise ValueError('boom')", "ended with exit code 1")])
def test_the_others_go_on_without_a_lost_rank(text, words, job):
    code, err = job.run(program("rank 0", job.after("rank 1 ")), program("rank 1", text),
                        program("rank 2", job.after("goes on")))
    said = [line for line in err.splitlines() if line.startswith("[bpsfast run]")]
    assert (code, said) == (0, [f"[bpsfast run] rank 1 {words}: the job goes on with 2 ranks (min_workers = 1)"])
    assert err.count("ValueError: boom") == ("boom" in text)


def test_by_default_a_lost_rank_ends_the_job(job):
    code, err = job.run(program("rank 0", _STAYS), program("rank 1", "raise SystemExit(3)"), min_workers=None)
    assert (code, err) == (3, "[bpsfast run] rank 1 failed first: it ended with exit code 3\n")


def test_too_few_ranks_do_not_go_on(job):
    code, err = job.run(program("rank 0", _STAYS), program("rank 1", _KILLED), min_workers=2)
    assert code == 128 + signal.SIGKILL
    assert err.splitlines() == [
        "[bpsfast run] rank 1 was killed by SIGKILL: the job cannot go on with 1 rank (min_workers = 2)",
        "[bpsfast run] rank 1 failed first: it was killed by SIGKILL"]


def test_as_many_ranks_as_are_needed_go_on(job):
    code, err = job.run(program("rank 0", job.after("goes on")), program("rank 1", job.after("rank 2")),
                        program("rank 2", _KILLED), min_workers=2)
    assert code == 0 and "with 2 ranks (min_workers = 2)" in err


def test_a_rank_that_has_ended_well_counts(job):
    """The last rank is lost after the others have ended."""

    class Attentive(Supervisor):
        def _have_ended(self, processes):
            super()._have_ended(processes)
            if "rank 0" in [process.command.name for process in processes]:
                job.output.say("the first has ended")

    last = program("rank 1", f"{job.after('the first has ended')}; raise SystemExit(3)")
    code, err = job.run(program("rank 0", ""), last, kind=Attentive)
    assert code == 0 and "rank 1 ended with exit code 3: the job goes on with 1 rank (min_workers = 1)" in err


def test_the_exit_code_is_that_of_the_first_of_all_lost_ranks(job):
    code, err = job.run(program("rank 0", _STAYS), program("rank 1", f"{job.after('rank 2')}; raise SystemExit(3)"),
                        program("rank 2", "raise SystemExit(5)"), min_workers=2)
    assert code == 5
    assert "rank 2 ended with exit code 5: the job goes on with 2 ranks (min_workers = 2)" in err
    assert "rank 1 ended with exit code 3: the job cannot go on with 1 rank (min_workers = 2)" in err
    assert err.splitlines()[-1] == "[bpsfast run] rank 2 failed first: it ended with exit code 5"


def test_the_loss_of_all_ranks_is_a_failure(job):
    code, err = job.run(program("rank 0", f"{job.after('rank 1')}; raise SystemExit(3)"),
                        program("rank 1", "raise SystemExit(5)"))
    assert code == 5 and "rank 0 ended with exit code 3: the job cannot go on with 0 ranks (min_workers = 1)" in err


def test_a_job_may_have_fewer_ranks_than_it_needs_after_a_loss(job):
    assert job.run(program("rank 0", ""), min_workers=2) == (0, "")


def test_the_ranks_of_a_lost_node_are_lost(job):
    """They end by themselves, and the launcher waits for them."""
    code, err = job.run(
        node_process(0, ""), node_process(1, _KILLED), program("rank 0", job.after("rank 2 ")),
        program("rank 1", f"{job.after('node 1 ')}; raise SystemExit(1)", node=1),
        program("rank 2", f"{job.after('rank 1 ')}; raise SystemExit(1)", node=1))
    assert code == 0
    assert [line for line in err.splitlines() if "goes on" in line] == [
        f"[bpsfast run] {words}: the job goes on with 1 rank (min_workers = 1)" for words in (
            "node 1 was killed by SIGKILL", "rank 1 ended with exit code 1", "rank 2 ended with exit code 1")]


def test_a_lost_node_with_too_many_ranks_ends_the_job(job):
    code, err = job.run(node_process(1, _KILLED), program("rank 0", _STAYS), program("rank 1", _STAYS, node=1),
                        min_workers=2)
    assert code == 128 + signal.SIGKILL
    assert "node 1 was killed by SIGKILL: the job cannot go on with 1 rank (min_workers = 2)" in err
    assert "node 1 failed first" in err


def test_a_node_without_ranks_left_fails_nothing(job):
    left_behind = f"{job.after('rank 1 ')}; raise SystemExit({LEFT_BEHIND})"
    code, err = job.run(node_process(1, left_behind), program("rank 0", job.after("node 1 ")),
                        program("rank 1", "raise SystemExit(3)", node=1))
    assert code == 0 and f"node 1 ended with exit code {LEFT_BEHIND}: the job goes on without it" in err


@pytest.mark.parametrize("end", [_KILLED, f"raise SystemExit({LEFT_BEHIND})"])
def test_a_rank_that_hangs_without_its_node_keeps_nobody(end, job):
    code, err = job.run(node_process(0, ""), node_process(1, end), program("rank 0", _JOINED + job.after("node 1 ")),
                        program("rank 1", _JOINED + _STAYS, node=1))
    assert code == 0 and "rank 1; ending them" in err


def test_neither_is_it_the_cause_if_too_few_ranks_are_left(job):
    """Its rank has a wrapper, and ends after it."""
    code, err = job.run(
        node_process(1, f"raise SystemExit({LEFT_BEHIND})"),
        program("rank 0", f"{job.after('rank 1 ')}; raise SystemExit('bpsfast.PeerLostError: rank 1 is lost')"),
        program("rank 1", f"{job.after('node 1 ')}; raise SystemExit(3)", node=1), min_workers=2)
    assert code == 3 and "rank 1 failed first" in err


def test_nor_while_the_others_are_ended(job):
    """The only known failure seems to follow from another one, which is not that of the node."""
    code, err = job.run(
        node_process(1, f"{job.after('rank 1 ')}; raise SystemExit({LEFT_BEHIND})"),
        program("rank 0", _STAYS),
        program("rank 1", "raise SystemExit('bpsfast.PeerLostError: rank 0 is lost')", node=1), min_workers=2,
        limits=msgspec.structs.replace(_FAST, after_failure_s=2.0, for_cause_s=2.0))
    assert code == 1 and "rank 1 failed first" in err


def test_without_such_a_setting_it_is_a_failure(job):
    code, err = job.run(node_process(1, f"raise SystemExit({LEFT_BEHIND})"), program("rank 0", _STAYS),
                        min_workers=None)
    assert code == LEFT_BEHIND and "node 1 failed first" in err


def test_a_node_that_has_ended_because_of_a_lost_rank_is_not_the_cause(job):
    code, err = job.run(
        node_process(1, f"raise SystemExit({ABORTED})"), program("rank 0", _STAYS),
        program("rank 1", f"{job.after('node 1 ')}; raise SystemExit(3)", node=1), min_workers=2)
    assert code == 3 and "rank 1 failed first" in err


def test_a_node_that_fails_after_all_ranks_have_ended_fails_nothing(job):
    node = node_process(0, f"{job.after('leaving')}; raise SystemExit(1)")

    class Attentive(Supervisor):
        def _enter(self, phase):
            super()._enter(phase)
            if phase == "leaving":
                job.output.say(phase)

    code, err = job.run(node, program("rank 0", _JOINED), kind=Attentive, limits=Limits(job_s=60.0, after_ranks_s=20.0))
    assert code == 0 and "node 0 ended with exit code 1: the job goes on with 1 rank" in err


@pytest.mark.parametrize("name", ["scheduler", "helper 0"])
def test_other_processes_fail_as_ever(name, job):
    kind = Kind.HELPER if name == "helper 0" else Kind.DAEMON
    code, err = job.run(program(name, "raise SystemExit(4)", kind, node=-1), program("rank 0", _STAYS))
    assert code == 4 and err == f"[bpsfast run] {name} failed first: it ended with exit code 4\n"


# -- a signal to the launcher ------------------------------------------------------------------------------------------

#: A launcher of ranks: argv[1:] are their programs. Rank 0 shares its node with nobody.
_LAUNCHER = """
import os, sys
from bpsfast.launch.processes import Command, Kind
from bpsfast.launch.supervisor import Limits, Supervisor
commands = [Command(f"rank {i}", Kind.RANK, (sys.executable, "-S", "-c", text), os.environ, node=i)
            for i, text in enumerate(sys.argv[1:])]
limits = Limits(job_s=60.0, after_failure_s=0.3, after_ranks_s=0.3, grace_s=30.0)
sys.exit(Supervisor(commands, limits=limits, min_workers=1).run())
"""
_LEAVES = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(CODE))
print("ready", flush=True)
while True:
    signal.pause()
"""


def interrupted(*texts: str) -> tuple[int, str]:
    """Run ranks of *texts*, one of them lost, and send SIGTERM as soon as the others run; return code and errors."""
    launcher = subprocess.Popen([sys.executable, "-c", _LAUNCHER, *texts], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)
    with launcher:
        try:
            loss = launcher.stderr.readline()
            for _ in texts[1:]:
                assert "ready" in launcher.stdout.readline()
            launcher.send_signal(signal.SIGTERM)
            _, err = launcher.communicate(timeout=30.0)
        finally:
            launcher.kill()
    return launcher.returncode, loss + err


def leaves(code: int = 0) -> str:
    return _LEAVES.replace("CODE", str(code))


def test_ranks_that_are_asked_to_leave_do_so_after_a_loss():
    code, err = interrupted(_KILLED, leaves(), leaves())
    assert code == 0, err
    assert "rank 0 was killed by SIGKILL: the job goes on with 2 ranks" in err and "got SIGTERM: the ranks have" in err


def test_a_rank_that_fails_while_it_leaves_fails_the_job():
    """As without the setting; the first failure is that of the rank that was lost before."""
    code, err = interrupted("raise SystemExit(3)", leaves(), leaves(7))
    assert code == 3 and "rank 0 failed first" in err and "rank 2 ended with exit code 7: the job" not in err, err


# -- hosts -------------------------------------------------------------------------------------------------------------

def test_a_lost_host_takes_its_ranks_along(job):
    commands = [program("rank 0", job.after("rank 2 ")), node_process(1, ""), program("rank 1", "", node=1),
                program("rank 2", "", node=1)]
    lost = LosableHost(0.0)
    code, err = job.run(*commands, hosts=[LocalProcesses(), lost, lost, lost])
    assert code == 0
    assert [line.partition(" was lost with its host c ")[0] for line in err.splitlines()] == [
        "[bpsfast run] node 1", "[bpsfast run] rank 1", "[bpsfast run] rank 2"]
    assert err.count(": the job goes on with 1 rank (min_workers = 1)\n") == 3


def test_the_host_of_the_scheduler_is_needed(job):
    first = LosableHost(0.0)
    code, err = job.run(program("scheduler", "", Kind.DAEMON, -1), node_process(0, ""), program("rank 0", ""),
                        program("rank 1", _STAYS, node=1), hosts=[first, first, first, LocalProcesses()])
    assert code == LOST_HOST and "failed first: it was lost with its host c" in err
    assert "goes on" not in err


@pytest.mark.slow
def test_the_agent_of_a_host_is_killed(tmp_path, no_leaks):
    """Real agents, of which the second one has a node and a rank."""
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    says = "import os, time; print(os.getppid(), flush=True); time.sleep(600)"
    commands = [program("rank 0", f"open({gate!r}).read()"), node_process(1, _STAYS), program("rank 1", says, node=1)]
    out, err = Heard(), Heard()
    with contextlib.closing(Output(out, err)) as output, \
            RemoteHosts([Host("localhost", 1), Host("localhost", 1)], Ssh(), output) as fleet:
        fleet.connect()

        def trouble() -> None:
            out.await_words(b"[rank 1]")
            os.kill(int(out.getvalue().split()[2]), signal.SIGKILL)
            err.await_words(b"the job goes on", 2)
            open(gate, "w").close()

        thread = threading.Thread(target=trouble)
        thread.start()
        hosts = [fleet.hosts[command.node] for command in commands]
        code = Supervisor(commands, limits=_FAST, output=output, hosts=hosts, min_workers=1).run()
        thread.join()
    said = err.getvalue().decode()
    assert code == 0, said
    for name in ("node 1", "rank 1"):
        assert f"{name} was lost with its host localhost" in said
    assert "failed first" not in said


# -- the command line --------------------------------------------------------------------------------------------------

def test_the_plan_says_which_node_has_which_rank():
    shape = local_job.shape_of(0, 0, 1, "2,1")
    commands = local_job.plan(shape, ["train"], Settings(), {}, ("127.0.0.1", 77), "ab" * 32)
    assert {command.name: command.node for command in commands} == {
        "scheduler": -1, "node 0": 0, "node 1": 1, "helper 0": -1, "rank 0": 0, "rank 1": 0, "rank 2": 1}


@pytest.mark.parametrize(("given", "code"), [
    (("on_worker_loss=continue",), 0), (("on_worker_loss=continue", "min_workers=2"), 3), ((), 3)])
def test_the_settings_decide(given, code, tmp_path):
    """The program does not use bpsfast. Rank 0 goes on only after rank 1 has ended, as long as it may."""
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    # rank 1 holds its end of the pipe open until it has ended
    text = (f"import os\nif os.environ['RANK'] == '1':\n    gate = open({path!r}, 'w')\n    raise SystemExit(3)\n"
            f"open({path!r}).read()\n" + ("" if code == 0 else _STAYS))
    options = [word for assignment in given for word in ("--set", assignment)]
    done = subprocess.run([sys.executable, "-m", "bpsfast", "run", "-n", "2", "--timeout", "60", *options, "--",
                           sys.executable, "-c", text], capture_output=True, text=True, timeout=90, check=False,
                          env={"PATH": os.environ["PATH"]})
    assert done.returncode == code, done.stderr
    words = "failed first" if code else "ended with exit code 3: the job goes on with 1 rank (min_workers = 1)"
    assert f"[bpsfast run] rank 1 {words}" in done.stderr


def test_an_elastic_job_that_goes_on_must_not_end_at_a_loss():
    done = subprocess.run([sys.executable, "-m", "bpsfast", "run", "--elastic", "--", "true"], capture_output=True,
                          text=True, timeout=60, check=False,
                          env={"PATH": os.environ["PATH"], "BPSFAST_ON_WORKER_LOSS": "continue"})
    assert done.returncode == 2 and "ConfigError: --elastic with on_worker_loss = continue" in done.stderr
