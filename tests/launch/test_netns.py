"""Tests network namespaces: parsing of rates, missing tools, and cleaning up after owners that were killed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from bpsfast.base import process_identity
from bpsfast.launch.namespaces import Cluster, netns
from bpsfast.orchestration.errors import ConfigError

root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

_OWNER = """
import sys
from bpsfast.launch.namespaces import Cluster
cluster = Cluster(["a"])
inside = cluster["a"].popen(["sleep", "600"])
print(cluster.hub.namespace, cluster["a"].namespace, inside.pid, flush=True)
sys.stdin.read()
"""


def names() -> set[str]:
    """Return the namespaces that exist."""
    folder = Path("/run/netns")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.mark.parametrize(
    "text, bits",
    [
        ("10gbit", 1e10),
        ("2.5Gbit", 2.5e9),
        ("100 mbit", 1e8),
        ("64kbit", 64e3),
        ("9600bit", 9600.0),
        (1e9, 1e9),
        (7, 7.0),
    ],
)
def test_a_rate_is_bits_per_second(text, bits):
    assert netns.parse_rate(text) == bits


@pytest.mark.parametrize("text", ["fast", "10", "10gb", "-1gbit", "0gbit", 0, -5.0, ""])
def test_what_is_no_rate_is_an_error(text):
    with pytest.raises(ConfigError):
        netns.parse_rate(text)


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "'ip'" in netns.missing()


def test_a_user_who_is_not_root_is_told(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: tool)
    assert netns.missing() == "network namespaces need root"


@root
@pytest.mark.root
def test_a_failing_command_is_quoted_with_what_it_said():
    with pytest.raises(ConfigError, match=r"`ip netns del bpsfast-no-such` ended with \d+: .*No such file"):
        netns.ip("netns", "del", "bpsfast-no-such")


@root
@pytest.mark.root
def test_the_probe_leaves_nothing():
    assert netns.missing() is None
    assert not [name for name in names() if name.startswith(netns._owner_prefix())]


@root
@pytest.mark.root
def test_what_a_killed_owner_left_is_removed_and_what_lives_is_kept():
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        *left, pid = process.stdout.readline().split()
        pidfd = os.pidfd_open(int(pid))
        assert set(left) <= names()
        assert not set(left) & set(netns.remove_stale()), "its owner lives"
        process.kill()
    netns.remove_stale()
    assert not set(left) & names()  # whoever removed them: other tests run beside this one
    assert select.select([pidfd], [], [], 20.0)[0], "what ran there has not ended"
    os.close(pidfd)
    netns.remove(left[0])  # again: no error


@root
@pytest.mark.root
def test_a_process_number_used_again_is_not_its_former_owner():
    name = f"bpsfast.{os.getpid()}.1.{process_identity.pid_namespace_id()}.0.test"  # started at tick 1
    netns.ip("netns", "add", name)
    netns.remove_stale()
    assert name not in names()


_ENDS = {
    "a": """
listener = socket.create_server(("{address}", 7000))
print("listens", flush=True)
end, _ = listener.accept()""",
    "b": """
end = socket.create_connection(("{address}", 7000))""",
}
_CONTROL = """
print(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode(), flush=True)
end.recv(1)
"""


@root
def test_tcp_between_machines_is_that_of_a_fast_network():
    controls = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if "cubic" not in controls:
        pytest.skip("this kernel has no cubic")
    with Cluster(["a", "b"]) as cluster:
        ends = []
        for name, begin in _ENDS.items():
            script = "import socket" + begin.format(address=cluster["a"].address) + _CONTROL
            ends.append(cluster[name].popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True))
            if name == "a":
                assert ends[0].stdout.readline() == "listens\n"
        try:
            assert [end.stdout.readline() for end in ends] == ["cubic\n", "cubic\n"]
        finally:
            for end in ends:
                end.kill()
                end.wait()
                end.stdout.close()


@root
def test_tcp_in_a_namespace_keeps_the_shortest_answers_time():
    setting = Path("/proc/sys/net/ipv4/tcp_min_rtt_wlen")
    before = setting.read_text()
    name = netns.unused_names(["tcp"])["tcp"]
    netns.create(name)
    try:
        assert netns.ip("netns", "exec", name, "cat", str(setting)) == "86400\n"
    finally:
        netns.remove(name)
    assert setting.read_text() == before, "the machine's own stays as it was"
