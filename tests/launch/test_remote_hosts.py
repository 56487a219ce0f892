"""Tests several hosts: agents on this machine, and hosts whose agent never comes."""
from __future__ import annotations

import os
import select
import socket
import sys
import time

import pytest

from bpsfast.launch import remote_hosts, remote_hosts as fleets
from bpsfast.launch.host_list import Host
from bpsfast.launch.output import Output
from bpsfast.launch.remote_hosts import RemoteHosts
from bpsfast.launch.ssh import Ssh
from bpsfast.orchestration.errors import ConfigError, PeerLostError, StallError

_HERE = Host("localhost", 2)


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return write


def test_one_host_needs_no_address_of_its_own(no_leaks):
    with RemoteHosts([_HERE], Ssh(), Output()) as fleet:
        fleet.connect()
        host, port = fleet.scheduler_address()
        assert host == "127.0.0.1"
        with socket.create_server((host, port)):
            pass


def test_of_several_the_first_has_the_scheduler(no_leaks):
    with RemoteHosts([_HERE, _HERE], Ssh(), Output()) as fleet:
        fleet.connect()
        host, port = fleet.scheduler_address()
        assert host in fleet.hosts[0].agent.addresses and port > 0
        assert fleet.scheduler_address("127.0.0.1")[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match=r"from localhost 192\.0\.2\.1: .*--scheduler-host"):
            fleet.scheduler_address("192.0.2.1")


def test_two_further_hosts_have_an_address_for_the_next_scheduler(no_leaks):
    with RemoteHosts([_HERE] * 4, Ssh(), Output()) as fleet:
        fleet.connect()
        first = fleet.scheduler_address()
        found = fleet.spare_addresses()
        assert [host for host, _ in found] == fleet.hosts[1:3]
        ports = {port for _, port in (first, *(address for _, address in found))}
        assert len(ports) == 3 and all(address[0] in host.agent.addresses for host, address in found)


def test_a_host_that_others_do_not_reach_has_no_next_scheduler(no_leaks):
    with RemoteHosts([_HERE, _HERE], Ssh(), Output()) as fleet:
        fleet.connect()
        fleet.hosts[1].agent.addresses[:] = []
        assert fleet.spare_addresses() == []


def test_a_name_for_the_scheduler_that_its_host_cannot_look_up_is_refused_at_once(no_leaks):
    with RemoteHosts([_HERE], Ssh(), Output()) as fleet:
        fleet.connect()
        assert fleet.scheduler_address("localhost")[0] == "localhost"
        begin = time.monotonic()
        with pytest.raises(ConfigError, match=r"no\.such\.invalid: .*--scheduler-host takes a name") as caught:
            fleet.scheduler_address("no.such.invalid")
        assert time.monotonic() - begin < 20.0 and " -0" not in str(caught.value)


def test_what_hosts_wait_for_ends(script, monkeypatch, no_leaks):
    monkeypatch.setattr(fleets, "AGENT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(remote_hosts, "_END_S", 60.0)
    with RemoteHosts([_HERE], Ssh(python=script("echo What is your name?; exec sleep 600")), Output()) as fleet:
        assert select.select([fleet.hosts[0].connection.source], [], [], 20.0)[0], "it has asked"
        with pytest.raises(StallError, match=r"within 0\.5 s; it printed b'What is your name\?.*login script"):
            fleet.connect()
        begin = time.monotonic()
    assert time.monotonic() - begin < 30.0, "it is not waited for at the end"


def test_an_agent_that_ends_at_once(script, no_leaks):
    with RemoteHosts([_HERE, _HERE], Ssh(python=script("echo out of paper >&2; exit 3")), Output()) as fleet, \
            pytest.raises(PeerLostError) as caught:
        fleet.connect()
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 of 2 hosts cannot be used:" and "(exit code 3): out of paper" in lines[1]
    assert len(lines) == 3


def test_a_folder_is_entered_on_all_or_none(no_leaks):
    with RemoteHosts([_HERE], Ssh(directory="/no/such/folder"), Output()) as fleet, \
            pytest.raises(ConfigError, match="localhost: the working directory /no/such/folder"):
        fleet.connect()


def test_an_agent_that_goes_silent_later(script, monkeypatch, no_leaks):
    monkeypatch.setattr(fleets, "ANSWER_TIMEOUT_S", 0.5)
    program = ("import time; from bpsfast import __version__ as v\n"
               "from bpsfast.launch import remote_protocol as m\n"
               "a = m.PipeConnection(0, 1, m.FromLauncher, False); a.mark(); "
               "a.send(m.Here(m.VERSION, v)); time.sleep(600)")
    monkeypatch.setattr(remote_hosts, "_END_S", 0.5)
    silent = script(f"exec {sys.executable} -c '{program}'")
    with RemoteHosts([_HERE], Ssh(python=silent), Output()) as fleet, \
            pytest.raises(StallError, match=r"localhost: its agent has not answered within 0\.5 s"):
        fleet.connect()


def test_a_launcher_that_waits_for_a_terminal_shows_life(script, monkeypatch, no_leaks, tmp_path):
    monkeypatch.setattr(fleets, "PULSE_S", 0.05)
    path = tmp_path / "fifo"
    os.mkfifo(path)
    program = ("from bpsfast import __version__ as v\n"
               "from bpsfast.launch import remote_protocol as m\n"
               "import os\n"
               "a = m.PipeConnection(os.dup(0), 1, m.FromLauncher, False); a.mark(); a.send(m.Here(m.VERSION, v))\n"
               "os.set_blocking(a.source, True)\n"
               "came = []\n"
               "while len(came) < 3: came += [each for each in a.receive() if isinstance(each, m.Alive)]\n"
               f'open("{path}", "w").write("x")\n'
               "while True: a.receive()")
    with RemoteHosts([_HERE], Ssh(python=script(f"exec {sys.executable} -c '{program}'")), Output()), \
            open(os.open(path, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as fifo:
        assert select.select([fifo], [], [], 20.0)[0], "this thread tells the host nothing meanwhile"
