"""Jobs that encrypt, and those that cannot; `test_network_faults` and `test_outsiders` attack them."""
from __future__ import annotations

import os
import secrets
import subprocess
import sys

import msgspec
import numpy as np
import pytest

import bpsfast
from bpsfast.base import reference_sum
from bpsfast.base.settings import environment, load
from bpsfast.trainer import process
from tests.support import rank_messages
from tests.support.jobs import Job


def sums(n_steps):
    """Whether the sums of some steps are right to the bit, of sizes on both sides of a record's; each rank is a node's.
    """
    source = np.random.default_rng(3)
    for step in range(n_steps):
        for nbytes in (4, 65536, 65540, 3_000_004):
            arrays = [source.standard_normal(nbytes // 4, dtype=np.float32) for _ in range(bpsfast.size())]
            found = bpsfast.push_pull(arrays[bpsfast.rank()], name=f"x{nbytes}")
            if found.tobytes() != reference_sum.reduce([[each] for each in arrays], average=True).tobytes():
                return step, nbytes
    return process.current().transports


@pytest.mark.parametrize(("shape", "helpers", "values"), [
    ((1, 1), 0, {}), ((1, 1, 1), 1, {"partition_bytes": 100_000, "tcp_streams": 4}), ((1, 1), 1, {"nic_limit": 2.0}),
], ids=["two nodes", "three and a helper", "at a pace"])
def test_sums_and_messages_are_right(job, shape, helpers, values):
    started = job(ranks=shape, helpers=helpers, transport="tcp", encryption="on", **values)
    for transports in started.run(sums, 3):
        assert all(how.endswith("; encrypted") for how in transports.values()), transports
    assert started.run(rank_messages.ring, rank_messages.SIZES[:-1], False) == [{False}] * len(shape)


class Half(Job):
    """A job whose second node encrypts."""

    def _start(self, command, values):
        if command.name in ("node 1", "rank 1"):
            command = msgspec.structs.replace(command, environ={**command.environ, "BPSFAST_ENCRYPTION": "on"})
        super()._start(command, values)


def begun():
    bpsfast.init()


def test_nodes_that_do_not_agree_whether_they_encrypt_are_no_job():
    job = Half(ranks=(1, 1), transport="tcp", attach=False)
    try:
        outcomes = job.attempt(begun)
        assert {outcome.error for outcome in outcomes} == {"MismatchError"}, outcomes
        assert all("setting encryption differs" in outcome.text for outcome in outcomes), outcomes
    finally:
        job.kill()


def test_a_node_that_is_to_encrypt_rdma_ends_in_words():
    settings = load({"scheduler": "127.0.0.1:1", "job_key": secrets.token_hex(32), "num_nodes": 1, "local_size": 0,
                     "num_helpers": 1, "node_id": "node0", "node_host": "127.0.0.1", "transport": "rdma",
                     "encryption": "on"}, {})
    done = subprocess.run([sys.executable, "-m", "bpsfast", "node"], env={**os.environ, **environment(settings)},
                          capture_output=True, timeout=60, check=False)
    assert done.returncode == 2 and b"ConfigError: encryption='on' contradicts transport='rdma'" in done.stderr


def test_a_node_without_a_key_for_a_job_of_several_machines_ends_in_words():
    settings = load({"scheduler": "10.0.0.1:1", "num_nodes": 1, "local_size": 0, "num_helpers": 1, "node_id": "node0",
                     "node_host": "127.0.0.1"}, {})
    done = subprocess.run([sys.executable, "-m", "bpsfast", "node"], env={**os.environ, **environment(settings)},
                          capture_output=True, timeout=60, check=False)
    assert done.returncode != 0 and b"there is no job key" in done.stderr and b"BPSFAST_JOB_KEY" in done.stderr
