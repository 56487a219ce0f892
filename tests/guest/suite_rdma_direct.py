"""Jobs whose devices' memory the cards read and write by themselves (gpu_direct), on the host device with real RDMA.

The node's mapping of that memory is closed to every access by a CPU: a node that looked into it would die of SIGSEGV.
"""
from __future__ import annotations

import subprocess
import sys

import pytest

from bpsfast.base.exit_codes import ABORTED
from tests.guest.direct_ranks import (
    leave_in_the_middle,
    push,
    push_until_it_fails,
    sum_in_every_way,
    use_the_name_on_the_host,
)
from tests.guest.suite_rdma_job import PATIENCE, compiled, packets, running, steady  # noqa: F401
from tests.guest.verbs_end import until

pytestmark = pytest.mark.thorough  # in the emulated machine each of these takes some ten minutes

DIRECT = {"timeout_s": 240, "transport": "rdma", "host_device": True, "gpu_direct": True, "partition_bytes": 1 << 17}


@pytest.mark.timeout(900)
def test_sums_are_right_and_only_what_is_summed_elsewhere_goes_straight():
    with running(ranks=(1, 1), **DIRECT) as job:
        found = job.run(sum_in_every_way, 3, timeout_s=300)
        refused = job.run(use_the_name_on_the_host, timeout_s=100)
        job.run(leave_in_the_middle, timeout_s=100)
    assert found[0]["found"] == found[1]["found"]
    for each in found:
        counters, straight = each["counters"], each["straight"]
        n_parts = sum(straight.values())
        assert counters["direct_partitions"] == n_parts > 10
        assert counters["direct_staged_partitions"] > 10  # what this node sums
        assert abs(straight["400001"] - 6) <= 1  # of 13: the other node sums half
        assert counters["direct_nbytes"] >= 3 * 2_000_000
    assert all(text.startswith("UnsupportedError") and "BPSFAST_GPU_DIRECT" in text for text in refused), refused


_OF_ISLANDS = "from bpsfast import kernels; kernels.address('int64', 'band'), kernels.address('uint8')"


@pytest.mark.timeout(1200)
def test_the_root_of_an_island_sends_the_sum_of_its_machine():
    subprocess.run([sys.executable, "-c", _OF_ISLANDS], check=True, timeout=500)  # as `compiled`
    with running(ranks=(2, 1), helpers=1, islands="auto", reduce_roots="0", placement="ps", **DIRECT) as job:
        found = job.run(sum_in_every_way, 2, timeout_s=400)
        job.close()
    assert found[0]["found"] == found[1]["found"] == found[2]["found"]
    for each in found:
        assert each["counters"]["direct_partitions"] == sum(each["straight"].values()) > 20
        assert each["counters"]["direct_staged_partitions"] == 0  # the helper sums all


@pytest.mark.timeout(600)
def test_a_node_that_dies_in_the_middle_of_writes_ends_the_job_in_words():
    with running(ranks=(1, 1), **DIRECT) as job:
        sent = packets("rxe1")
        job.begin(push_until_it_fails, 10_000)
        until(lambda: packets("rxe1") > sent + 500, 200)
        job.kill_daemon("node 1")
        outcome = job.outcomes(timeout_s=100, only=(0,))[0]
        assert outcome.error == "PeerLostError" and "node 1" in outcome.text, outcome
        assert job.daemons["node 0"].wait(60) == ABORTED


@pytest.mark.timeout(600)
def test_without_rdma_it_is_refused_with_the_reason():
    with running(ranks=(1, 1), **DIRECT | {"transport": "tcp"}) as job:
        for outcome in job.attempt(push):
            assert outcome.error == "UnsupportedError" and "reaches no other one by RDMA" in outcome.text, outcome
