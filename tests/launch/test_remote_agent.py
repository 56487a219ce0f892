"""Tests the agent of a host on two pipes: its answers, and that nothing outlives the pipes."""
from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

from bpsfast import __version__
from bpsfast.launch import remote_agent
from bpsfast.launch.remote_protocol import (
    Alive,
    Ended,
    FromAgent,
    Here,
    Listen,
    Listening,
    PipeConnection,
    Prepare,
    Reach,
    Reached,
    Ready,
    Refused,
    Reserve,
    Reserved,
    Said,
    Signal,
    Start,
    StopListening,
)

_TIMEOUT_S = 30.0
_STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), child.pid, flush=True)
child.wait()
"""


class Launcher:
    """The launcher's end of an agent that runs *program*, or ``bpsfast agent``."""

    def __init__(self, program: str | None = None, **variables: str) -> None:
        argv = ["-m", "bpsfast", "agent"] if program is None else ["-c", program]
        self.agent = subprocess.Popen([sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, env={**os.environ, **variables}, bufsize=0)
        self.line = PipeConnection(self.agent.stdout.fileno(), self.agent.stdin.fileno(), FromAgent, after_mark=True)
        self._came: list = []
        self.here = self.next()

    def next(self):
        """Return the next message but `Alive`."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._came:
            leaves = [self.line.target] if self.line.pending_nbytes else []
            found = select.select([self.line.source], leaves, [], max(0.0, deadline - time.monotonic()))
            assert found[0] or found[1], "no answer"
            self.line.flush()
            self._came += [message for message in self.line.receive() if not isinstance(message, Alive)]
        return self._came.pop(0)

    def ask(self, message):
        """Return the answer to *message*."""
        self.line.send(message)
        return self.next()

    def start(self, number: int, text: str, n_ranks: int = 1, **variables: str) -> None:
        """Start Python *text*."""
        self.line.send(Start(number, f"rank {number}", "rank", [sys.executable, "-S", "-c", text], variables, n_ranks))

    def until_ended(self, number: int) -> tuple[bytes, bytes, int]:
        """Return what process *number* wrote until its end, and its code."""
        said = [b"", b""]
        while not (isinstance(message := self.next(), Ended) and message.number == number):
            if isinstance(message, Said) and message.number == number:
                said[message.is_error] += message.data
        return said[0], said[1], message.code

    def close(self) -> int:
        """Hang up; return the agent's exit code."""
        if not self.agent.stdin.closed:
            self.agent.stdin.close()
        code = self.agent.wait(_TIMEOUT_S)
        self.agent.stdout.close()
        self.agent.stderr.close()
        return code


@pytest.fixture
def launcher(no_leaks):
    found = Launcher()
    yield found
    assert found.close() == 0


def test_it_says_who_it_is_first(launcher):
    assert isinstance(launcher.here, Here)
    assert (launcher.here.version, launcher.here.package) == (remote_agent.messages.VERSION, __version__)
    assert launcher.here.addresses == remote_agent.addresses()


def test_processes_work_in_the_folder_with_the_variables_of_the_launcher(launcher, tmp_path):
    assert launcher.ask(Prepare(str(tmp_path))) == Ready()
    launcher.start(0, "import os; print(os.getcwd(), os.environ['A'], os.environ['OMP_NUM_THREADS'], "
                      "os.environ['PATH'].split(':')[0])", n_ranks=1000, A="b")
    out, err, code = launcher.until_ended(0)
    assert (out.decode().split(), err, code) == (
        [str(tmp_path), "b", "1", os.path.dirname(sys.executable)], b"", 0)


def test_a_folder_that_is_not_there_is_refused(launcher):
    answer = launcher.ask(Prepare("/no/such/folder"))
    assert isinstance(answer, Refused) and "/no/such/folder" in answer.reason and "No such file" in answer.reason


def test_all_that_was_written_comes_before_the_end(launcher):
    launcher.start(0, "import sys; print('x' * 3_000_000); sys.stderr.write('last'); sys.exit(7)")
    out, err, code = launcher.until_ended(0)
    assert (len(out), err, code) == (3_000_001, b"last", 7)


def test_a_launcher_that_reads_nothing_is_waited_for(launcher, pidfd_of):
    launcher.start(0, "import os; print(os.getpid(), flush=True)\nwhile True: print('x' * 10_000)")
    said = launcher.next()
    pid = int(said.data.split()[0])
    end = pidfd_of(pid)
    n_written, n_alike = -1, 0
    while n_alike < 10:  # a second without progress
        before, n_written = n_written, _written_nbytes(pid)
        n_alike = n_alike + 1 if n_written == before else 0
        assert n_written < 16 << 20, "what waits for the launcher is bounded"
        assert not select.select([end], [], [], 0.1)[0]
    launcher.line.send(Signal(0, signal.SIGKILL))  # it still listens
    assert select.select([end], [], [], _TIMEOUT_S)[0]
    assert launcher.until_ended(0)[2] == -signal.SIGKILL


def _written_nbytes(pid: int) -> int:
    with open(f"/proc/{pid}/io", encoding="ascii") as file:
        return int(dict(line.split(":") for line in file)["wchar"])


def test_a_command_that_is_not_there(launcher):
    launcher.line.send(Start(5, "rank 5", "rank", ["no-such-program"], {}, 1))
    _, err, code = launcher.until_ended(5)
    assert code == 127 and b"command not found: no-such-program" in err


def test_what_cannot_be_started_at_all_has_ended(launcher):
    launcher.line.send(Start(5, "rank 5", "rank", ["true", *["x" * 100_000] * 100], {}, 1))
    _, err, code = launcher.until_ended(5)
    assert code == 126 and b"cannot start true" in err


@pytest.mark.parametrize("how", ["closes its line", "is silent", "sends garbage", "signals"])
def test_whatever_runs_ends_when_the_launcher(how, pidfd_of):
    program = None
    if how == "is silent":
        program = "from bpsfast.launch import remote_agent as remote\nremote.SILENCE_S = 1.0\nremote.main()"
    launcher = Launcher(program)
    launcher.start(0, _STUBBORN)
    launcher.start(1, _STUBBORN)
    pids = [int(pid) for _ in range(2) for pid in launcher.next().data.split()]
    ends = [pidfd_of(pid) for pid in pids]
    begin = time.monotonic()
    if how == "closes its line":
        launcher.agent.stdin.close()
    elif how == "sends garbage":
        os.write(launcher.line.target, b"\xff" * 100)
    elif how == "signals":
        launcher.agent.send_signal(signal.SIGHUP)
    for end in ends:
        assert select.select([end], [], [], _TIMEOUT_S)[0]
    assert launcher.agent.wait(_TIMEOUT_S) == 0
    assert time.monotonic() - begin < 10
    launcher.close()


def test_whatever_runs_dies_with_an_agent_that_is_killed(pidfd_of):
    launcher = Launcher()
    launcher.start(0, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    end = pidfd_of(int(launcher.next().data))
    launcher.agent.kill()
    assert select.select([end], [], [], _TIMEOUT_S)[0]
    launcher.close()


def test_a_port_for_torchs_store_is_kept_on_all_addresses(launcher):
    reserved = launcher.ask(Reserve())
    assert isinstance(reserved, Reserved)
    with pytest.raises(OSError), socket.socket() as taken:
        taken.bind(("127.0.0.1", reserved.port))
    for address, family in ((("", reserved.port), socket.AF_INET), (("::", reserved.port), socket.AF_INET6)):
        with socket.create_server(address, family=family):
            pass


def test_a_port_is_kept_and_who_listens_there_is_known(launcher):
    listening = launcher.ask(Listen(is_loopback=True))
    assert isinstance(listening, Listening)
    other = Launcher()
    try:
        question = Reach(["127.0.0.1", "127.0.0.2"], listening.port, listening.token)
        reached = other.ask(question)
        assert isinstance(reached, Reached) and reached.errors[0] == "" and "refused" in reached.errors[1]
        wrong = other.ask(Reach(["127.0.0.1"], listening.port, b"another token..."))
        assert wrong == Reached(["another program answers there"])
        assert launcher.ask(StopListening()) == Ready()
        assert "refused" in other.ask(question).errors[0]
    finally:
        assert other.close() == 0
    with pytest.raises(OSError), socket.socket() as taken:  # without SO_REUSEADDR, which the scheduler sets
        taken.bind(("127.0.0.1", listening.port))
    with socket.create_server(("127.0.0.1", listening.port)):
        pass


def test_many_addresses_that_do_not_answer_take_no_longer_than_all_may(monkeypatch, no_leaks):
    monkeypatch.setattr(remote_agent, "_REACH_S", 1.0)
    monkeypatch.setattr(remote_agent, "_REACH_ALL_S", 1.5)
    with socket.create_server(("0.0.0.0", 0), backlog=1000) as silent:
        begin = time.monotonic()
        errors = remote_agent.reached(Reach([f"127.0.1.{i}" for i in range(1, 161)], silent.getsockname()[1], b""))
        assert time.monotonic() - begin < 10.0, "not a second for every eight"
    assert len(errors) == 160 and all(error.startswith("timed out") for error in errors)
    assert errors[-1] == "timed out, as earlier addresses did"


def test_the_environment_of_a_process():
    environ = {"PATH": "/bin", "RANK": "3", "BPSFAST_JOB_KEY": "no", "PYTHONSAFEPATH": "1", "HOME": "/h",
               "PYTHONUNBUFFERED": "0"}
    found = remote_agent.environment(environ, {"BPSFAST_RANK": "1", "HOME": "/mine"}, 4)
    cores = len(os.sched_getaffinity(0))
    assert found == {"PATH": f"{os.path.dirname(sys.executable)}:/bin", "HOME": "/mine", "BPSFAST_RANK": "1",
                     "PYTHONUNBUFFERED": "0", "OMP_NUM_THREADS": str(max(1, cores // 4))}
    assert "OMP_NUM_THREADS" not in remote_agent.environment(environ, {}, 0)


def test_the_address_that_ssh_came_to_is_the_first(monkeypatch):
    own = remote_agent.addresses()
    assert own and not any(address.startswith("127.") for address in own)
    monkeypatch.setenv("SSH_CONNECTION", f"10.9.9.9 4711 {own[-1]} 22")
    assert remote_agent.addresses() == [own[-1], *own[:-1]]
    monkeypatch.setenv("SSH_CONNECTION", "10.9.9.9 4711 192.0.2.1 22")
    assert remote_agent.addresses() == own, "not ours: some translation on the way"
