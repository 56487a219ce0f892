"""Tests one host with an agent on this machine, and each way to lose it."""
from __future__ import annotations

import io
import os
import selectors
import signal
import sys
import time

import pytest

from bpsfast.launch import remote_hosts
from bpsfast.launch.host_list import Host
from bpsfast.launch.output import Output
from bpsfast.launch.processes import Command, Kind
from bpsfast.launch.remote_hosts import RemoteHosts
from bpsfast.launch.ssh import Ssh

_TIMEOUT_S = 30.0


class Owner:
    """What `Supervisor` does with one place."""

    def __init__(self) -> None:
        self.out, self.err = io.BytesIO(), io.BytesIO()
        self.output = Output(self.out, self.err)
        self.fleet = RemoteHosts([Host("localhost")], Ssh(), self.output)
        self.selector = selectors.DefaultSelector()
        self.fleet.connect()
        self.host = self.fleet.hosts[0]
        self.host.open(self.selector)

    def start(self, text: str):
        """Start Python *text*."""
        command = Command("rank 0", Kind.RANK, (sys.executable, "-S", "-u", "-c", text), {})
        return self.host.start(command, *self.output.streams("rank 0"))

    def until(self, is_done) -> None:
        """Handle events until *is_done*()."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not is_done():
            now = time.monotonic()
            assert now < deadline
            due_s, ended = self.host.tick(now)
            due_s = now if ended else due_s
            for key, _ in self.selector.select(max(0.0, min(deadline, due_s) - now)):
                key.data()

    def close(self) -> None:
        self.fleet.close()
        self.selector.close()


@pytest.fixture
def owner(no_leaks):
    found = Owner()
    yield found
    found.close()


def test_output_and_end(owner):
    process = owner.start("import sys; print('one'); print('two', end=''); print('no', file=sys.stderr); sys.exit(3)")
    owner.until(lambda: process.code is not None)
    assert owner.out.getvalue() == b"[rank 0] one\n[rank 0] two\n"
    assert owner.err.getvalue() == b"[rank 0] no\n"
    assert (process.code, process.end_in_words()) == (3, "ended with exit code 3")


def test_signals_arrive(owner):
    process = owner.start("import time; print('up'); time.sleep(600)")
    owner.until(owner.out.getvalue)
    process.signal_all(signal.SIGKILL)
    owner.until(lambda: process.code is not None)
    assert process.end_in_words() == "was killed by SIGKILL"


def test_an_agent_that_is_killed(owner):
    process = owner.start("import os, time; print(os.getppid()); time.sleep(600)")
    owner.until(owner.out.getvalue)
    os.kill(int(owner.out.getvalue().split()[-1]), signal.SIGKILL)
    owner.until(lambda: process.code is not None)
    assert process.code == 255
    assert process.end_in_words() == (
        "was lost with its host localhost (localhost: its agent was killed by SIGKILL: no output)")
    process.signal_all(signal.SIGTERM)  # of no use, and no error


def test_an_agent_that_says_nothing(owner, monkeypatch):
    monkeypatch.setattr(remote_hosts, "SILENCE_S", 1.0)
    process = owner.start("import os, time; print(os.getppid()); time.sleep(600)")
    owner.until(owner.out.getvalue)
    agent = int(owner.out.getvalue().split()[-1])
    os.kill(agent, signal.SIGSTOP)
    owner.until(lambda: process.code is not None)
    assert "nothing was heard of it for 1 s" in process.end_in_words()
    os.kill(agent, signal.SIGCONT)


def test_who_was_not_listening_does_not_blame_the_host(owner, monkeypatch):
    process = owner.start("import time; print('up'); time.sleep(600)")
    owner.until(owner.out.getvalue)
    monkeypatch.setattr(remote_hosts, "SILENCE_S", 0.0)
    process.signal_all(signal.SIGKILL)
    assert selectors_ready(owner.host.connection.source)
    owner.host.tick(time.monotonic())
    assert not owner.host.lost


def selectors_ready(fd: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(_TIMEOUT_S))


def test_what_still_runs_ends_with_the_place(owner, pidfd_of):
    owner.start("import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid())\n"
                "time.sleep(600)")
    owner.until(owner.out.getvalue)
    end = pidfd_of(int(owner.out.getvalue().split()[-1]))
    owner.fleet.close()
    assert selectors_ready(end)
