"""Tests addresses: this machine's own, names that are resolved late, and hints about unreachable schedulers."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bpsfast.base import addresses
from bpsfast.base.settings import load_with_origins
from bpsfast.orchestration import host_lookup
from bpsfast.orchestration.errors import ConfigError, StallError
from tests.support.loopback import NEEDS_IPV6

_AS_ROOT = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root")]


@pytest.mark.usefixtures("no_leaks")
def test_who_listens_is_nothing_to_complain_about():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert addresses.unreachable_hint(*listener.getsockname()) == ""


@pytest.mark.usefixtures("no_leaks")
def test_nobody_is_named_with_the_address_and_what_to_check():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        port = bound.getsockname()[1]
        text = addresses.unreachable_hint("127.0.0.1", port)
    assert f"address 127.0.0.1:{port} (Connection refused)" in text and "BPSFAST_SCHEDULER" in text


def test_a_port_that_this_process_does_not_know_is_nobodys_fault():
    assert addresses.unreachable_hint("127.0.0.1", 0) == ""


def chosen(**settings: str) -> str:
    return addresses.configured_host(load_with_origins(settings, {})[0])


def test_the_settings_choose_an_address():
    assert chosen() == "" and chosen(node_host="here") == "here"
    assert chosen(interface="lo") == "127.0.0.1" and chosen(interface="lo", node_host="here") == "here"


@pytest.mark.parametrize(("wished", "words"), [
    ("none0", r"interface='none0' has no address here, as there is no such interface.*takes .*lo"),
    ("=l", "no such interface"), ("lo:1", "no such interface"), ("^l", "has no address here"),
])
def test_what_is_no_interface_is_refused_with_those_that_are(wished, words, monkeypatch):
    monkeypatch.setattr(addresses, "default_route_host", lambda: "")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [Entry("127.0.0.1")]})
    with pytest.raises(ConfigError, match=words):
        chosen(interface=wished)


class Entry:
    """An address as psutil tells it."""

    def __init__(self, address: str) -> None:
        self.address, self.family = address, addresses.family_of(address)


@pytest.mark.parametrize(("wished", "address"), [
    ("ib,eth0", "10.9.0.1"), (" eth1 , ib", "10.0.1.1"), ("eth,ib0", "10.0.0.1"),
    ("eth0", "10.0.0.1"), ("eth", "10.0.0.1"), ("=eth1", "10.0.1.1"), ("ib,eth", "10.9.0.1"), ("eth1,ib", "10.0.1.1"),
    ("none,eth1", "10.0.1.1"), ("six", "fd00::1"), ("both", "10.2.0.1"), ("^docker", "10.0.1.1"),
    ("^docker,lo,eth", "10.9.0.1"), ("^=eth", "10.0.1.1"), ("^eth1,docker", "10.0.0.1"), ("eth10", "10.0.10.1"),
])
def test_interfaces_are_chosen_as_nccl_and_gloo_do(wished, address, monkeypatch):
    monkeypatch.setattr(addresses, "default_route_host", lambda: "10.0.1.1")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {
        name: [Entry(each) for each in own] for name, own in {
            "lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.1"], "eth10": ["10.0.10.1"],
            "eth1": ["fe80::1%eth1", "10.0.1.1"], "ib0": ["10.9.0.1"], "six0": ["fe80::2%six0", "fd00::1"],
            "both0": ["fd00::2", "10.2.0.1"], "none0": ["fe80::3%none0"]}.items()})
    assert chosen(interface=wished) == address


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=NEEDS_IPV6), "localhost"])
def test_a_socket_listens_at_names_and_addresses_of_both_versions(host):
    with addresses.listening_socket(host) as listener, socket.create_connection(listener.getsockname()[:2]) as sock:
        assert sock.getpeername() == listener.getsockname()


def test_ports_are_taken_from_the_range():
    with addresses.listening_socket("127.0.0.1") as first:
        port = first.getsockname()[1]
        if port > 65_500:
            pytest.skip("the kernel has drawn one of the last ports")
        with addresses.listening_socket("127.0.0.1", f"{port}-{port + 20}") as second:
            assert port < second.getsockname()[1] <= port + 20
        with pytest.raises(ConfigError, match=rf"ports {port}-{port}: .*BPSFAST_PORTS to a range with more free ports"):
            addresses.listening_socket("127.0.0.1", f"{port}-{port}")


def test_a_port_of_the_range_is_free_again_at_once():
    """Connections of the last job are in TIME_WAIT: the side that has listened closed them first."""
    with addresses.listening_socket("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as dialled:
            listener.accept()[0].close()
            assert dialled.recv(1) == b""
    with addresses.listening_socket("127.0.0.1", f"{port}-{port}") as again:
        assert again.getsockname()[1] == port


def test_an_address_of_ipv4_comes_first_if_there_is_one(monkeypatch):
    """Though the default route may be of IPv6: a job's other machines may have none."""
    routes = {"2001:db8::1": "fd00::7"}
    entries = {"lo": [Entry("127.0.0.1")], "eth0": [Entry("fd00::7"), Entry("10.0.0.7")]}
    monkeypatch.setattr(addresses, "route_source", lambda host: routes.get(host))
    monkeypatch.setattr("psutil.net_if_addrs", lambda: entries)
    monkeypatch.setattr("psutil.net_if_stats", lambda: dict.fromkeys(entries, SimpleNamespace(isup=True)))
    assert addresses.default_route_host() == "10.0.0.7"
    entries["eth0"].pop()
    assert addresses.default_route_host() == "fd00::7"
    routes["192.0.2.1"] = "10.1.1.1"
    assert addresses.default_route_host() == "10.1.1.1"


def test_what_cannot_listen_is_said_with_the_setting():
    with pytest.raises(ConfigError, match=r"cannot listen on '192.0.2.1': .*set BPSFAST_NODE_HOST"):
        addresses.listening_socket("192.0.2.1")
    with pytest.raises(ConfigError, match=r"cannot listen on 'no-such-name.invalid'"):
        addresses.listening_socket("no-such-name.invalid")


def test_names_and_addresses_of_this_machine():
    own = {"localhost", "LOCALHOST", "127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "0.0.0.0", "localhost.",
           socket.gethostname(), socket.gethostname().upper(), f"{socket.gethostname()}."}
    own |= {address for address in [addresses.default_route_host()] if address}
    assert addresses.local_hosts_among([*own, "192.0.2.77", "2001:db8::7", "no-such-name.invalid", "a..b"]) == own


def test_the_source_of_a_route():
    assert addresses.route_source("127.0.0.5") == "127.0.0.1"
    assert addresses.route_source("") is None and addresses.route_source("no-such-name.invalid") is None
    assert addresses.job_route_source("127.0.0.1", 1.0) == "127.0.0.1", "an address is meant as it is"


def test_a_name_that_never_comes_is_named():
    with pytest.raises(StallError, match=r"the name 'pod-0.invalid' .* was not resolved within 0.1 s .*getent hosts"):
        addresses.job_route_source("pod-0.invalid", 0.1)


def test_what_the_resolver_has_said_is_the_reason_when_the_time_is_over(monkeypatch):
    def unknown(*arguments, **keywords):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(StallError, match=r"not resolved within 0\.7 s \(Name or service not known\)"):
        addresses.job_route_source("pod-0.invalid", 0.7)


_PRINTS_SOURCE = """
import logging, sys
from bpsfast.base import addresses as reach
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
print(reach.job_route_source("pod-0.example", 30.0), flush=True)
"""


def with_hosts(hosts: Path) -> subprocess.Popen:
    """Start the program with a file of its own for /etc/hosts; it may be written to meanwhile."""
    command = ["unshare", "--mount", "sh", "-c", f"mount --bind {hosts} /etc/hosts && exec \"$@\"", "sh",
               sys.executable, "-u", "-c", _PRINTS_SOURCE]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("marks", [pytest.param("", marks=_AS_ROOT)])
def test_a_name_that_comes_late_is_waited_for(tmp_path, marks):
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    with with_hosts(hosts) as program:
        assert "'pod-0.example' cannot be resolved yet" in program.stdout.readline()
        with hosts.open("a") as file:
            file.write("127.0.0.9 other pod-0.example\n")
        out, _ = program.communicate(timeout=30)
    assert program.returncode == 0 and out.splitlines()[-1] == (addresses.default_route_host() or "127.0.0.1")
    assert "Traceback" not in out


@pytest.mark.parametrize("marks", [pytest.param("", marks=_AS_ROOT)])
def test_a_machine_without_addresses_has_none(marks):
    program = "from bpsfast.base import addresses as reach\nprint(repr(reach.default_route_host()))"
    alone = subprocess.run(["unshare", "--net", sys.executable, "-c", program], capture_output=True, text=True,
                           timeout=30, check=True)
    assert alone.stdout.strip() == "''"


def test_a_resolver_that_does_not_answer_is_not_waited_for_longer_than_allowed(monkeypatch):
    over = threading.Event()

    def mute(*arguments, **keywords):
        over.wait(60)
        raise OSError("the test is over")

    monkeypatch.setattr(socket, "getaddrinfo", mute)
    monkeypatch.setattr(addresses, "_TIMEOUT_S", 0.1)
    begin = time.monotonic()
    try:
        with pytest.raises(StallError, match=r"'pod-0.invalid' .* within 0.1 s \(the resolver has not answered within"):
            addresses.job_route_source("pod-0.invalid", 0.1)
        assert addresses.route_source("pod-0.invalid") is None
        assert "the resolver has not answered" in addresses.unreachable_hint("pod-0.invalid", 7)
        with pytest.raises(TimeoutError, match="has not answered within 0 s"):
            host_lookup.resolve("pod-0.invalid", -0.1)
        assert time.monotonic() - begin < 20
    finally:
        over.set()
