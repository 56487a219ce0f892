"""NICs measured at the start: who meets whom, links as before afterwards, rates of shaped links, a real job."""
from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import bpsfast
from bpsfast.launch.namespaces import Cluster
from bpsfast.node.transport import nic_probe, tcp
from bpsfast.node.transport.tcp import TcpLink
from bpsfast.orchestration.messages import NodeInfo

#: One of three machines in a row; each listens to those behind it. Prints what its NIC carries.
_MACHINE = """
import json, socket, sys, time
from bpsfast.orchestration.messages import NodeInfo
from bpsfast.node.transport import nic_probe
from bpsfast.node.transport.tcp import TcpLink
mine, addresses = int(sys.argv[1]), sys.argv[2:]
nodes = [NodeInfo(index=i, host="x", pid=1, address="", shm_name="", ranks=(i,), nic_rate_bytes=0.0, probes=True)
         for i in range(len(addresses))]
links = {}
with socket.create_server((addresses[mine], 7900)) as server:
    for index in range(mine):
        deadline = time.monotonic() + 20
        while True:
            try:
                sock = socket.create_connection((addresses[index], 7900), timeout=20)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        sock.sendall(bytes([mine]))
        links[index] = TcpLink(index, sockets={0: sock})
    for _ in range(mine + 1, len(addresses)):
        sock, _ = server.accept()
        index = sock.recv(1)[0]
        links[index] = TcpLink(index, sockets={0: sock})
print(json.dumps(nic_probe.measure(nodes[mine], nodes, links, time.monotonic() + 30)), flush=True)
"""


def node(index, ranks=(0,), probes=True, limit=0.0):
    return NodeInfo(index=index, host="a", pid=1, address="", shm_name="", ranks=ranks, nic_rate_bytes=0.0,
                    probes=probes, nic_limit_bytes=limit)


def test_both_of_a_pair_know_of_it_and_each_meets_several():
    nodes = [node(i) for i in range(6)] + [node(i, ()) for i in range(6, 9)]
    found = {each.index: nic_probe.partners(each, nodes) for each in nodes}
    assert all(each in found[other] for each, others in found.items() for other in others)
    assert found[0] == [1, 2, 4, 8] and found[5] == [4, 7, 1]
    assert found[8] == [0], "helpers are not connected to one another"


def test_who_has_a_limit_or_nothing_to_learn_takes_no_part():
    assert nic_probe.partners(node(0), [node(0), node(1, limit=5.0)]) == []
    known = [node(0, probes=False), node(1, probes=False), node(2)]
    assert [nic_probe.partners(each, known) for each in known] == [[2], [], [0]], "1 and 2 do not meet"


@pytest.fixture
def ends():
    """Links of two nodes to each other, over two connections."""
    links = TcpLink(1), TcpLink(0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        for number in range(2):
            links[0].sockets[number] = socket.create_connection(server.getsockname())
            links[1].sockets[number] = server.accept()[0]
    yield links
    for link in links:
        link.close()


def test_both_ends_find_one_rate_and_leave_the_connections_clean(ends):
    nodes = [node(0), node(1)]
    found = {}

    def run(me):
        found[me] = nic_probe.measure(nodes[me], nodes, {1 - me: ends[me]}, time.monotonic() + 20)

    threads = [threading.Thread(target=run, args=(me,)) for me in range(2)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0] == found[1] > 10e6 and time.monotonic() - begin < 5
    for number, sock in ends[0].sockets.items():
        other = ends[1].sockets[number]
        assert sock.gettimeout() is None and other.gettimeout() is None
        sock.sendall(b"next")
        other.settimeout(10)
        assert other.recv(100) == b"next"


def test_a_peer_that_goes_away_is_named_and_its_link_is_ended(ends, caplog):
    nodes = [node(0), node(1)]
    ends[1].sockets[0].sendall(b"\1")
    ends[1].close()
    assert nic_probe.measure(nodes[0], nodes, {1: ends[0]}, time.monotonic() + 10) == 0.0
    assert "the NIC could not be measured with node 1" in caplog.text
    for sock in ends[0].sockets.values():
        assert sock.gettimeout() is None
        with pytest.raises(BrokenPipeError):
            sock.sendall(b"nobody takes it for a header")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_shaped_links_are_told_apart():
    rates = {"a": 200e6, "b": 200e6, "c": 50e6}
    with Cluster(list(rates), rates=rates) as cluster:
        addresses = [machine.address for machine in cluster]
        ends = [machine.popen([sys.executable, "-c", _MACHINE, str(i), *addresses], stdout=subprocess.PIPE, text=True)
                for i, machine in enumerate(cluster)]
        found = [json.loads(end.communicate(timeout=60)[0]) for end in ends]
    assert [rate * 8 for rate in found] == pytest.approx(list(rates.values()), rel=0.15)


def push():
    return float(bpsfast.push_pull(np.full(1 << 18, bpsfast.rank() + 1.0, np.float32), average=False, name="x")[0])


@pytest.mark.slow
def test_a_job_plans_by_what_it_has_measured(job, capfd):
    started = job((1, 1), 1, "tcp", nic_probe=True, log_level="INFO")
    assert started.run(push) == [3.0, 3.0]
    started.close()
    said = capfd.readouterr().err
    assert "rate not known" in said and "a step of M bytes takes at least" in said and "ms/GB" in said


def test_the_kernel_chooses_the_send_buffer_again_that_the_probe_has_set():
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        try:
            assert sock.getsockopt(socket.SOL_SOCKET, tcp._SO_BUF_LOCK) == 1
        except OSError:
            assert tcp._let_kernel_choose(sock) == tcp._FIXED_BUFFER_NBYTES
        else:
            assert tcp._let_kernel_choose(sock) == 0 == sock.getsockopt(socket.SOL_SOCKET, tcp._SO_BUF_LOCK)
