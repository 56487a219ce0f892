"""Pace: a rate that threads keep together; what a node does with it; real links, counted by the kernel."""
from __future__ import annotations

import os
import socket
import threading
import time

import numpy as np
import pytest

from bpsfast.base.settings import Settings
from bpsfast.bench.harness.launcher import ContestantLauncher
from bpsfast.launch.namespaces import Cluster
from bpsfast.node.transport import rdma, tcp
from bpsfast.pyx.pace import Pace

MEGABYTE = 10**6
#: What idle time may bring at once, in seconds of the rate: the burst, and one piece.
_AHEAD_S = 0.004


def seconds(function):
    begin = time.monotonic()
    function()
    return time.monotonic() - begin


def await_turn(pace, nbytes):
    """Sleep until the turn of *nbytes* begins."""
    time.sleep(max(0, pace.turn(nbytes) - time.monotonic_ns()) / 1e9)


def test_all_threads_together_keep_to_the_rate():
    made = Pace(10 * MEGABYTE)

    def move():
        for _ in range(100):
            await_turn(made, 5000)

    threads = [threading.Thread(target=move) for _ in range(4)]

    def race():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    took_s = seconds(race)
    assert took_s >= (400 - 4) * 5000 / 10e6 - _AHEAD_S
    assert took_s < 2.0, "nobody waits for turns that nobody takes"
    assert made.counters()["bytes"] == 2 * MEGABYTE and made.counters()["waited_ns"] > 0


def test_idle_time_is_made_up_for_but_little_of_it():
    made = Pace(MEGABYTE)
    await_turn(made, 1)
    end = time.monotonic() + 0.05
    while time.monotonic() < end:  # idle time is what this is about
        time.sleep(0.01)
    n = 0
    begin = time.monotonic()
    while time.monotonic() - begin < 0.1:
        await_turn(made, 1000)
        n += 1
    assert 1000 * (n - 1) <= MEGABYTE * (time.monotonic() - begin + 2 * _AHEAD_S)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_moves_nothing_is_refused(rate):
    with pytest.raises(ValueError, match="moves nothing"):
        Pace(rate)


def test_a_node_without_a_limit_has_no_pace():
    assert tcp.pacing_of(Settings(), 3) is None
    limited = tcp.pacing_of(Settings(nic_limit=0.8, tcp_streams=2), 3)
    with socket.socket() as sock:
        limited.prepare(sock)
        # Linux doubles it, for its own accounting
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * (400_000 // 6)
        assert sock.getsockopt(socket.SOL_SOCKET, 47) == 100_000_000


def test_links_of_one_node_share_its_paces():
    paces = tcp.TcpPacing(MEGABYTE, 2)
    assert tcp.TcpLink(1, paces=paces).paces is tcp.TcpLink(2, paces=paces).paces


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_helper_keeps_to_its_limit_in_both_directions():
    limit_bits, nbytes, n_steps = 80e6, 2 << 20, 3
    with Cluster(["node0", "node1", "helper0"]) as cluster, ContestantLauncher(2, 2, cluster) as launcher:
        own = {"helper0": {"BPSFAST_NIC_LIMIT": str(limit_bits / 1e9)}}  # idle time alone may not even start it
        group = launcher.bpsfast(n_helpers=1, more=own, placement="ps", transport="tcp", partition_bytes=128 << 10)
        group.measure("numpy", nbytes, 0, 1)  # it checks its sums, once
        helper = cluster["helper0"]
        before, begin = helper.traffic(), time.monotonic()
        turn = group.measure("numpy", nbytes, 0, n_steps)
        moved, took_s = helper.traffic() - before, time.monotonic() - begin
    assert turn.n_wrong == 0
    payload = 2 * nbytes * n_steps  # of two nodes with ranks
    assert moved.rx >= payload and moved.tx >= payload
    # what the sockets held already is not paced again: 64 KiB each, and as much on its way; that a helper takes
    # no less than its limit is what `bpsfast bench neighbour` shows, on a quiet machine
    held = 4 * 2 * (64 << 10)
    assert max(moved.rx, moved.tx) - held <= limit_bits / 8 * took_s
    np.testing.assert_array_less(0.8 * nbytes * 2 * 8 / limit_bits, turn.samples_s)


def test_with_a_limit_no_card_is_let_write_by_itself():
    rails = rdma.Rails(Settings(nic_limit=1.5), 0)
    with pytest.raises(rdma.NoDeviceError, match=r"nic_limit=1\.5 is kept on tcp connections only"):
        rails.towards(None, 1)
    rails.close()
