"""Jobs over IPv6: on the loopback, and between machines that have no IPv4 address."""
from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import psutil
import pytest

import bpsfast
from bpsfast.base.settings import load
from bpsfast.collectives.group import make_group
from bpsfast.launch import local_job
from bpsfast.launch.namespaces import netns
from bpsfast.launch.namespaces.cluster import Cluster
from bpsfast.launch.supervisor import Supervisor
from bpsfast.trainer import process
from tests.support import ssh_hosts
from tests.support.loopback import NEEDS_IPV6
from tests.support.ssh_hosts import SshHosts

pytestmark = pytest.mark.timeout(180)
_LACKS = netns.missing()
BETWEEN_MACHINES = pytest.mark.skipif(_LACKS is not None, reason=str(_LACKS))


def sums(n):
    rank, size = bpsfast.rank(), bpsfast.size()
    found = bpsfast.push_pull(np.full(n, rank + 1, np.float32), average=False, name=f"x{n}")
    assert (found == size * (size + 1) / 2).all()
    session = process.current()
    return session.role.scheduler[0], session.host


@NEEDS_IPV6
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_a_job_over_the_loopback_of_ipv6(job, transport):
    made = job((2, 1), helpers=1, transport=transport, host="::1", encryption="on")
    for n in (3, 3_000_000):
        assert set(made.run(sums, n)) == {("::1", "::1")}
    made.close()


def talk():
    """Use what ranks listen at for each other: a message between ranks, and a negotiation."""
    import bpsfast.hvd as hvd

    hvd.init()
    assert hvd.allgather_object(bpsfast.rank()) == [0, 1]
    group = make_group(process.current(), range(2))
    x = np.full(4, bpsfast.rank(), np.uint8)
    other = 1 - bpsfast.rank()
    incoming = np.zeros(4, np.uint8)
    received = group.p2p.receive(7, other, 0, incoming.ctypes.data, 4, incoming)
    group.p2p.send(7, other, 0, x.ctypes.data, 4, x).wait()
    received.wait()
    assert (incoming == other).all()
    listening = [each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"]
    group.close()
    return listening


def test_ports_are_those_of_the_range(job):
    """Of the nodes' data ports, and of what ranks listen at for each other."""
    made = job((1, 1), transport="tcp", ports="28700-28739")
    made.run(sums, 1000)
    of_ranks = made.run(talk)
    assert len(of_ranks[0]) >= 2 and of_ranks[1], "messages, and rank 0's end of the negotiation"
    of_nodes = [each.laddr.port for name, daemon in made.daemons.items() if name.startswith("node")
                for each in psutil.Process(daemon.pid).net_connections("tcp") if each.status == "LISTEN"]
    assert len(of_nodes) == 2
    assert all(28700 <= port < 28740 for port in (*of_nodes, *of_ranks[0], *of_ranks[1]))
    made.close()


_PROGRAM = """
import numpy as np, bpsfast
bpsfast.init()
rank, size = bpsfast.rank(), bpsfast.size()
for n in (5, 700_000):
    found = bpsfast.push_pull(np.full(n, rank + 1, np.float32), average=False, name=f"x{n}")
    assert (found == size * (size + 1) / 2).all()
print("right", rank, size)
bpsfast.shutdown()
"""


@pytest.fixture
def machines():
    """Two machines on a switch, with addresses of IPv6 only."""
    with Cluster(["node0", "node1"], ip_version=6) as cluster:
        assert "inet " not in netns.ip("-n", cluster["node0"].namespace, "addr", "show", "eth0")
        yield cluster


@BETWEEN_MACHINES
@pytest.mark.parametrize("values", [{}, {"node_host": "", "interface": "eth"}], ids=["by address", "by interface"])
def test_a_job_of_machines_without_ipv4(machines, values, capfd):
    shape = local_job.JobShape(ranks=(1, 1))
    commands = local_job.plan(shape, [sys.executable, "-c", _PROGRAM], load({"transport": "tcp", **values}, {}),
                              dict(os.environ), (machines.hub.address, 7700), "ab" * 32, machines, master_port=29500)
    assert Supervisor(commands).run() == 0
    out = capfd.readouterr().out
    assert "right 0 2" in out and "right 1 2" in out


@BETWEEN_MACHINES
def test_torchrun_on_machines_without_ipv4(machines, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_PROGRAM)
    environ = {**os.environ, "BPSFAST_JOB_KEY": "ab" * 32, "OMP_NUM_THREADS": "1"}
    runs = [machine.popen([sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(i),
                           "--nproc-per-node", "1", "--master-addr", machines["node0"].address,
                           "--master-port", "29500", str(script)], environ, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
            for i, machine in enumerate(machines)]
    outputs = [run.communicate(timeout=150)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert "right 0 2" in outputs[0] and "right 1 2" in outputs[1]


@pytest.fixture
def hosts(tmp_path):
    """Two hosts with sshd, and addresses of IPv6 only."""
    with SshHosts(["gpu1", "gpu2"], tmp_path, ip_version=6) as made:
        yield made


@pytest.mark.skipif(ssh_hosts.missing() is not None, reason=str(ssh_hosts.missing()))
def test_hosts_without_ipv4_are_reached_by_ssh(hosts, tmp_path):
    """A job is started there, each is pinged from each, and the line between two is measured."""
    script = tmp_path / "train.py"
    script.write_text(_PROGRAM)
    done = hosts.run("run", "-H", "gpu1:1,gpu2:1", sys.executable, str(script), timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert "right 0 2" in done.stdout and "right 1 2" in done.stdout
    pinged = hosts.run("ping", "--all", "-H", "gpu1,gpu2", timeout_s=120)
    assert re.search(r"\[fd77::1\]:\d+ -> \[fd77::2\]:\d+ +tcp [\d.]+ us", pinged.stdout), pinged.stdout
    measured = hosts.run("perf", "bw", "-H", "gpu2", "--transport", "tcp", timeout_s=120)
    assert measured.returncode == 0, measured.stdout + measured.stderr
