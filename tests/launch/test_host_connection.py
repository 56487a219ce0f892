"""Tests how a host comes to where workers can be started, with real agents, and a real service that it must reach."""
from __future__ import annotations

import os
import selectors
import socket
import time

import pytest

from bpsfast.launch import elastic_hosts
from bpsfast.launch.elastic_hosts import HostConnection
from bpsfast.launch.elastic_job import _GREETING
from bpsfast.launch.elastic_service import ElasticService
from bpsfast.launch.host_list import Host
from bpsfast.launch.output import Output
from bpsfast.launch.remote_hosts import RemoteHosts
from bpsfast.launch.remote_protocol import MARK, Reach
from bpsfast.launch.ssh import Ssh
from bpsfast.orchestration.elastic.coordinator import ElasticRules
from bpsfast.orchestration.errors import BpsError, ConfigError, PeerLostError, StallError

pytestmark = pytest.mark.timeout(120)
LIMIT_S = 60.0
HERE = Host("localhost", 2)


@pytest.fixture
def service(no_leaks):
    found = ElasticService(ElasticRules(max_ranks=1), [0], b"k" * 32, "")
    yield found
    found.close()


def connected(port, ssh=None, directory=None, addresses=("127.0.0.1",)):
    """Bring a host of this machine to its end; return the connection."""
    output = Output()
    with RemoteHosts([], ssh or Ssh(), output) as hosts, selectors.EpollSelector() as selector:
        remote = hosts.add(HERE, output)
        found = HostConnection(remote, directory or os.getcwd(), Reach(list(addresses), port, _GREETING), selector)
        deadline = time.monotonic() + LIMIT_S
        while True:
            due_s = found.tick(time.monotonic())
            if found.is_ready or found.error:
                break
            assert time.monotonic() < deadline
            for key, _ in selector.select(max(0.0, min(due_s, deadline) - time.monotonic())):
                key.data()
        assert not selector.get_map(), "its events are not watched any more"
    hosts.forget(remote)
    return found


def test_a_host_tells_the_address_by_which_it_reaches_the_service(service):
    assert connected(service.port, addresses=["192.0.2.1", "127.0.0.1"]).address == "127.0.0.1"


def test_another_program_at_the_port_is_not_the_service(no_leaks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        error = connected(server.getsockname()[1]).error
    assert isinstance(error, ConfigError)
    assert str(error).startswith("localhost: no address of the launcher's machine is reached from there at port ")
    assert "(127.0.0.1: timed out)" in str(error) and "--set interface=NAME" in str(error)


def test_the_service_listens_at_one_of_the_ports_that_a_firewall_opens(no_leaks):
    with socket.create_server(("127.0.0.1", 0)) as held:
        first = held.getsockname()[1]
    service = ElasticService(ElasticRules(max_ranks=1), [0], b"k" * 32, "", (first, first))
    try:
        assert service.port == first and connected(first).address == "127.0.0.1"
    finally:
        service.close()


def test_without_an_address_nothing_is_tried(service):
    assert "(it has none but loopback)" in str(connected(service.port, addresses=()).error)


def test_a_folder_that_is_not_there_is_named(service):
    error = connected(service.port, directory="/no/such/folder").error
    assert isinstance(error, ConfigError) and "localhost: the working directory /no/such/folder" in str(error)


@pytest.mark.parametrize(("text", "kind", "words"), [
    ("echo out of paper >&2; exit 3", PeerLostError, "(exit code 3): out of paper"),
    ("exec sleep 600", StallError, "no agent of bpsfast answered within 0.5 s")])
def test_an_agent_that_does_not_come_up_is_an_error(service, tmp_path, monkeypatch, text, kind, words):
    monkeypatch.setattr(elastic_hosts, "AGENT_TIMEOUT_S", 0.5 if kind is StallError else 60.0)
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    error = connected(service.port, Ssh(python=str(path))).error
    assert isinstance(error, kind) and words in str(error)


def test_a_host_whose_agent_sends_nonsense_and_has_ended_is_an_error(tmp_path, no_leaks):
    """Both of its pipes are readable at once, and the first event ends the watch of the other."""
    agent = tmp_path / "python"
    marks = "".join(f"\\{byte:03o}" for byte in MARK + b"\xff" * 64)
    agent.write_text(f"#!/bin/sh\nprintf '{marks}'\n")
    agent.chmod(0o755)
    output = Output()
    with RemoteHosts([], Ssh(python=str(agent)), output) as hosts, selectors.EpollSelector() as selector:
        remote = hosts.add(HERE, output)
        found = HostConnection(remote, os.getcwd(), Reach([], 1, _GREETING), selector)
        deadline = time.monotonic() + LIMIT_S
        while not remote.has_ended:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        events = selector.select(0)
        assert len(events) == 2
        for key, _ in sorted(events, key=lambda event: event[0].fileobj is remote.stderr):
            key.data()
        assert isinstance(found.error, BpsError) and not selector.get_map()
    hosts.forget(remote)
