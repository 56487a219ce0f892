"""Tests the faulty link: how two TCP stacks see each fault."""
from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bpsfast.launch.namespaces import FaultyLink, faulty_link, netns
from bpsfast.orchestration.errors import ConfigError

LACKING = faulty_link.missing()
pytestmark = [pytest.mark.root, pytest.mark.skipif(LACKING is not None, reason=f"{LACKING}")]

NBYTES = 1 << 20
_CLONE_NEWNET = 0x40000000


@pytest.fixture
def link():
    with FaultyLink("a", "b") as made:
        yield made


def socket_in(machine) -> socket.socket:
    """Make a TCP socket of *machine*: a thread goes there for it, and ends."""
    def make() -> socket.socket:
        with open(f"/run/netns/{machine.namespace}", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        return socket.socket()

    with ThreadPoolExecutor(1) as there:
        return there.submit(make).result(20)


@pytest.fixture
def ends(link):
    """Two connected sockets, of a and of b."""
    yield from connected(link, 7000)


def connected(link, port):
    with socket_in(link["a"]) as listener, socket_in(link["b"]) as b:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((link["a"].address, port))
        listener.listen()
        b.settimeout(20)
        b.connect((link["a"].address, port))
        a, _ = listener.accept()
        with a:
            a.settimeout(20)
            yield a, b


def passes(sender: socket.socket, receiver: socket.socket, nbytes: int = NBYTES) -> bool:
    """Send *nbytes* of noise; whether it arrives as it was."""
    data = os.urandom(nbytes)
    sending = threading.Thread(target=sender.sendall, args=(data,))
    sending.start()
    found = bytearray()
    while len(found) < nbytes:
        found += receiver.recv(nbytes)
    sending.join(20)
    return bytes(found) == data


def test_it_carries_both_ways_what_it_is_given(link, ends):
    a, b = ends
    assert passes(a, b) and passes(b, a)
    assert link.carried.packets > 2 * NBYTES // 1500 and link.carried.resets == 0


def test_a_long_link_delays_all_packets_and_has_a_rate(link, ends):
    a, b = ends
    link.lengthen(0.05, rate_bytes=4e6)
    begin = time.monotonic()
    b.sendall(b"x")
    assert a.recv(1) == b"x" and time.monotonic() - begin >= 0.05
    begin = time.monotonic()
    assert passes(a, b, 2 << 20), "what the queue has dropped comes again"
    assert time.monotonic() - begin >= 0.05 + (2 << 20) / 4e6
    link.mend()
    assert passes(b, a)


def test_a_mended_link_delivers_what_it_held_and_forgets_its_queue(link, ends):
    a, b = ends
    link.lengthen(30.0, rate_bytes=1e4)
    b.sendall(bytes(5000))
    time.sleep(0.05)  # the packets are held for half a minute, or not yet read: they come now either way
    link.mend()
    begin, got = time.monotonic(), 0
    while got < 5000:
        got += len(a.recv(5000))
    link.lengthen(0.01)
    assert passes(a, b) and time.monotonic() - begin < 15


def test_a_long_link_resets_too(link, ends):
    a, b = ends
    link.lengthen(0.01)
    link.reset(1, every_nbytes=1000)
    b.sendall(bytes(5000))
    with pytest.raises(ConnectionResetError):
        while a.recv(5000):
            pass
    assert link.carried.resets == 1


def test_what_is_lost_comes_again(link, ends):
    a, b = ends
    link.lose(0.1)
    assert passes(a, b, 200_000)
    assert link.carried.dropped > 10


def test_a_spike_holds_up_and_keeps_the_order(link, ends):
    a, b = ends
    link.spike(0.05, 1.0)
    begin = time.monotonic()
    assert passes(a, b, 10_000)
    assert time.monotonic() - begin >= 0.05
    link.mend()
    assert passes(a, b, 10_000)
    assert link.carried.dropped == 0


@pytest.mark.parametrize("cut", [("a",), ("b",), ()])
def test_a_cut_ends_when_it_is_mended(link, ends, cut):
    a, b = ends
    link.cut(*cut)
    a.sendall(b"x")
    b.settimeout(0.5)
    if cut == ("b",):  # what a sends arrives; a does not hear of it
        assert b.recv(1) == b"x"
    else:
        with pytest.raises(TimeoutError):
            b.recv(1)
    link.mend()
    b.settimeout(20)
    b.sendall(b"y")
    assert a.recv(1) == b"y" and (cut == ("b",) or b.recv(1) == b"x")


def test_a_reset_ends_both_ends_in_the_middle(link, ends):
    a, b = ends
    link.reset(1, 100_000)
    with ThreadPoolExecutor(1) as other:
        sending = other.submit(a.sendall, bytes(NBYTES))
        with pytest.raises(ConnectionResetError):
            while b.recv(NBYTES):
                pass
        assert sending.exception(20).errno in (errno.ECONNRESET, errno.EPIPE)
    assert link.carried.resets == 1


def test_a_change_gets_past_both_kernels_one_bit_at_a_time(link, ends):
    a, b = ends
    for nbytes in (1, 1000, 1001):  # checksums are of pairs of bytes
        link.change(1, nbytes)
        data = os.urandom(nbytes)
        a.sendall(data)
        found = b""
        while len(found) < nbytes:
            found += b.recv(nbytes)
        assert (int.from_bytes(found, "big") ^ int.from_bytes(data, "big")).bit_count() == 1
    assert link.carried.changed == 3 and link.carried.resets == 0
    assert passes(a, b, 1000)


def test_a_connection_that_is_forgotten_is_open_at_both_ends_and_a_new_one_works(link, ends):
    a, b = ends
    link.forget()
    a.sendall(b"x")
    b.settimeout(0.3)
    with pytest.raises(TimeoutError):
        b.recv(1)
    for others in connected(link, 7002):
        assert passes(*others, 1000)


@pytest.mark.parametrize("ports", [(), (7000,)], ids=["all ports", "one port"])
def test_a_firewall_that_rejects_ends_connections_and_refuses_new_ones_until_it_is_mended(link, ends, ports):
    a, b = ends
    assert passes(b, a)
    link.refuse(*ports)
    with pytest.raises(ConnectionResetError):
        while True:
            b.sendall(bytes(1 << 16))
    with socket_in(link["b"]) as late:
        late.settimeout(20)
        with pytest.raises(ConnectionRefusedError):
            late.connect((link["a"].address, 7000))
    assert link.carried.refused >= 2
    if ports:
        for left, right in connected(link, 7001):
            assert passes(left, right)
    link.mend()
    for left, right in connected(link, 7002):
        assert passes(left, right)


def test_no_fault_concerns_a_spared_port(link):
    link.spare(7001)
    link.cut()
    for ends in connected(link, 7001):
        assert passes(*ends, 1000)


def test_nothing_is_left(no_leaks):
    with FaultyLink("a", "b") as link:
        names = {machine.namespace for machine in link.machines.values()}
    assert not names & {path.name for path in Path("/run/netns").iterdir()}
    link.close()


def test_two_machines_are_needed():
    with pytest.raises(ConfigError, match="two machines of different names"):
        FaultyLink("a", "a")


def test_without_the_device_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(faulty_link, "_TUN", tmp_path / "tun")
    with pytest.raises(ConfigError, match=r"a link that fails needs .*tun"):
        FaultyLink("a", "b")
    monkeypatch.undo()
    monkeypatch.setattr(netns, "missing", lambda: "network namespaces need root")
    assert faulty_link.missing() == "network namespaces need root"
