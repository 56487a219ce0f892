"""ping on real devices: every pair of ports, a path that is cut, and the command between two hosts.

Runs in the guest.
"""
from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading

import pytest

from bpsfast.base import settings
from bpsfast.hardware.host import Host
from bpsfast.tools.perf import control as lines, ping, ping as ping_listener
from bpsfast.tools.perf.control import Secret

KEY = b"k" * 32


@contextlib.contextmanager
def unplugged(host):
    """Take the bridge's port of a host's device down."""
    subprocess.run(["ip", "link", "set", f"p{host}", "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", f"p{host}", "up"], check=True)
        deadline = threading.Event()
        while Host().devices[host].ports[0].state != "ACTIVE":
            assert not deadline.wait(0.05)


@contextlib.contextmanager
def pinged(devices=""):
    """Have somebody to ping; yield the port."""
    loaded = settings.load({"rdma_devices": devices}, {})
    with lines.listen(0, "127.0.0.1") as sock:
        thread = threading.Thread(target=ping_listener.serve, args=(sock, Secret(KEY), loaded))
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            sock.shutdown(2)
            thread.join(30)
            assert not thread.is_alive()


def test_ping_reaches_every_port_from_every_port():
    with pinged() as port:
        found = ping.reach("127.0.0.1", port, KEY, settings.load({}, {}), 10.0)
    assert found["error"] is None and found["tcp"]["min_s"] > 0
    pairs = {(pair["own"]["device"], pair["peer"]["device"]): pair for pair in found["pairs"]}
    assert set(pairs) == {(a, b) for a in ("rxe0", "rxe1") for b in ("rxe0", "rxe1")}
    assert not [pair["error"] for pair in pairs.values() if pair["error"]]
    assert all(pair["mtu"] == 4096 and 0 < pair["min_s"] <= pair["median_s"] for pair in pairs.values())


def test_ping_shows_a_path_that_is_cut():
    with pinged("=rxe0") as port, unplugged(0):
        found = ping.reach("127.0.0.1", port, KEY, settings.load({"rdma_devices": "=rxe1"}, {}), 10.0)
    [pair] = found["pairs"] or [None]
    if pair is None:  # the driver noticed: the port is down
        assert "not ACTIVE" in str(found["rejected"])
    else:
        assert pair["error"] and pair["mtu"] in (None, 4096), pair


def test_ping_through_a_listener():
    with pinged("=rxe0") as one, pinged("=rxe1") as other:
        found = ping.ask_to_reach(("127.0.0.1", one), ("127.0.0.1", other), KEY, 10.0)
    assert found["error"] is None and found["source"] == f"127.0.0.1:{one}"
    [pair] = found["pairs"]
    assert (pair["own"]["device"], pair["peer"]["device"], pair["error"]) == ("rxe0", "rxe1", None)


@pytest.fixture
def on():
    """Start ``bpsfast`` on a host; it ends with the test."""
    with contextlib.ExitStack() as undo:

        def start(host, *arguments):
            command = ["on", str(host), sys.executable, "-m", "bpsfast", *arguments]
            process = undo.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                                          text=True))
            undo.callback(process.kill)
            return process

        yield start


def test_two_hosts_ping_each_other_by_command(on):
    listeners = [on(host, "ping", "--listen", "-d", f"rxe{host}") for host in (0, 1)]
    one_way = on(1, "ping", "10.9.1.1", "-d", "rxe1", "--json", "--wait", "60")
    for listener in listeners:
        assert "listening on port 18520" in listener.stderr.readline()
    shown, complaint = one_way.communicate(timeout=100)
    assert one_way.returncode == 0, shown + complaint
    [found] = json.loads(shown)
    [pair] = found["pairs"]
    assert (found["host"], found["name"], found["error"]) == ("10.9.1.1", "h0", None)
    assert (pair["own"]["device"], pair["peer"]["device"], pair["error"], pair["mtu"]) == ("rxe1", "rxe0", None, 4096)
    matrix = on(0, "ping", "--all", "10.9.1.1", "10.9.1.2")
    shown, complaint = matrix.communicate(timeout=100)
    assert matrix.returncode == 0, shown + complaint
    assert "rxe0/1 GID" in shown and shown.count("ok  MTU 4096") == 2 and shown.count("(1/1)") == 2, shown
