"""Whole jobs over rdma: nodes on hosts of their own, bit for bit what tcp gives, and a steady state that costs writes.

Runs in the guest: node i and its rank on host i with the device rxe<i>, the scheduler and the helper on host 0.
"""
from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.conftest import Job
from tests.guest.training import N_STEPS, SHAPES, push_until_it_fails, train

PATIENCE = {"start_timeout_s": 300, "timeout_s": 120, "lease_s": 60, "heartbeat_s": 5}


class HostedJob(Job):
    """A job whose machines are hosts of the guest; emulated processes take their time."""

    def _start(self, command: Any, values: dict[str, Any]) -> None:
        role, _, number = command.name.partition(" ")
        host = int(number) if role in ("node", "rank") else 0
        environ = {**command.environ, "BPSFAST_SCHEDULER": "10.9.1.1:7700", "BPSFAST_NODE_HOST": f"10.9.1.{host + 1}",
                   "BPSFAST_RDMA_DEVICES": f"=rxe{host}", **self.more.get(command.name, {})}
        super()._start(msgspec.structs.replace(command, argv=("on", str(host), *command.argv), environ=environ), values)

    def __init__(self, more: dict[str, dict[str, str]] | None = None, **values: Any) -> None:
        self.more = more or {}
        super().__init__(attach=False, **PATIENCE | values)
        try:
            self.call("init", timeout_s=300)
        except BaseException:
            self.kill()
            raise
        self._attached = True

    def close(self) -> None:
        try:
            self.call("shutdown", timeout_s=100)
            for pipe in self._pipes:
                pipe.close()
            codes = [process.wait(100) for process in (*self.ranks, *self.daemons.values())]
        finally:
            self.kill()
        assert not any(codes), f"exit codes after an orderly end: {codes}"


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the kernel once for all nodes: in the guest that takes a minute."""
    subprocess.run([sys.executable, "-c", "from bpsfast import kernels; kernels.address('float32')"], check=True,
                   timeout=300)


def run_training(transport: str) -> list[dict[str, Any]]:
    job = HostedJob(ranks=(1, 1), helpers=1, transport=transport)
    try:
        found = job.run(train, timeout_s=200)
        job.close()
    finally:
        job.kill()
    return found


def wires(counters: dict[str, int], name: str) -> int:
    return sum(value for key, value in counters.items() if key.startswith("wire_") and key.endswith("_" + name))


@pytest.mark.timeout(900)
def test_training_over_rdma_is_bit_identical_to_tcp_and_costs_one_write_per_partition_and_hop():
    over_rdma = run_training("rdma")
    over_tcp = run_training("tcp")
    for rank in (0, 1):
        assert over_rdma[rank]["parameters"] == over_rdma[0]["parameters"] == over_tcp[rank]["parameters"]
    assert any(any(parameter) for parameter in over_rdma[0]["parameters"])
    for index, found in enumerate(over_rdma):
        before, after = found["before"], found["after"]
        grown = {name: after[name] - before[name] for name in after}
        assert [after[f"transport_{peer}"] for peer in (1 - index, 2)] == [3, 3]
        # per step and partition a node sends one write: the partial to the owner, or the result to the other rank
        assert grown["dispatch_partitions"] > 0 and grown["dispatch_partitions"] % N_STEPS == 0
        assert wires(grown, "writes_sent") == wires(grown, "writes_received") == grown["dispatch_partitions"]
        nbytes = N_STEPS * sum(4 * int(np.prod(shape)) for shape in SHAPES)
        assert nbytes <= wires(grown, "bytes_sent") < nbytes * 1.05  # with what pads fused tensors
        assert grown["rdma_registrations"] == wires(grown, "address_exchanges") == 0
        # no copy: a lane sends from registered memory only, and that is the segments which ranks and engine use
        assert after["rdma_registrations"] == after["registrations"] and after["rdma_rails"] == 1
        assert after["rdma_locked_nbytes"] == after["memory_segments"]
        assert grown["engine_allocations"] == grown["memory_segments"] == 0


@pytest.mark.timeout(600)
def test_a_node_that_dies_in_the_middle_of_writes_ends_the_job_in_words():
    job = HostedJob(ranks=(1, 1), transport="rdma")
    try:
        job.begin(push_until_it_fails, 10_000)
        while job.ranks[1].poll() is None and not _writes(job):
            os.sched_yield()
        job.kill_daemon("node 1")
        outcome = job.outcomes(timeout_s=100, only=(0,))[0]
        assert outcome.error == "PeerLostError" and "node 1" in outcome.text, outcome
        assert job.daemons["node 0"].wait(60) == 1
    finally:
        job.kill()


@pytest.mark.timeout(900)
def test_auto_goes_on_by_tcp_where_a_setting_makes_rdma_impossible_and_says_so(capfd):
    more = {"node 1": {"BPSFAST_RDMA_GID_INDEX": "77", "BPSFAST_LOG_LEVEL": "INFO"}}
    job = HostedJob(more, ranks=(1, 1), transport="auto")
    try:
        for found in job.run(train, timeout_s=200):
            assert 2 in (found["after"].get("transport_0"), found["after"].get("transport_1"))
        job.close()
    finally:
        job.kill()
    said = capfd.readouterr().err
    assert "is reached by tcp, not by rdma: rdma_gid_index=77 is an empty row of the GID table of rxe1/1" in said, said


def _writes(job: HostedJob) -> bool:
    """Whether the node 1's card has sent anything: rxe counts packets."""
    with open("/sys/class/infiniband/rxe1/ports/1/hw_counters/sent_pkts") as file:
        return int(file.read()) > 500
