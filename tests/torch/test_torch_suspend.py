"""BytePS's suspend and resume in jobs of several ranks: the next job has the requested numbers, or is refused."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bpsfast.launch.daemons import clean_environment

pytest.importorskip("torch")

_PROGRAM = """
import sys, torch, bpsfast.torch as bps
from bpsfast.trainer import process
bps.init()
bps.declare("b")
bps.declare("a")
rank, size = bps.rank(), bps.size()
assert bps.push_pull(torch.ones(3) * rank, False, "a").tolist() == [1.0] * 3
bps.suspend()
numbers = eval(sys.argv[1])
bps.resume(*numbers)
assert process.current().tensors.order() == ["b", "a"]
assert (bps.rank(), bps.size()) == (rank, size)
assert bps.push_pull(torch.ones(3) * rank, False, "a").tolist() == [1.0] * 3
print("resumed", flush=True)
bps.shutdown()
"""
_DMLC = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "0", "DMLC_WORKER_ID": "0",
         "NVIDIA_VISIBLE_DEVICES": "0,1"}


def run(launcher, numbers, **variables):
    command = [sys.executable, "-m", "bpsfast", *launcher, "--", sys.executable, "-c", _PROGRAM, numbers]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False,
                          env={**clean_environment(os.environ), "BPSFAST_TIMEOUT_S": "60", **variables})


@pytest.mark.parametrize(("launcher", "numbers", "variables"), [
    (("run", "-n", "2", "--nodes", "2", "--elastic"), "size, 0, rank", {}), (("dmlc",), "1, 0, rank", _DMLC)])
def test_all_ranks_resume(launcher, numbers, variables):
    done = run(launcher, numbers, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resumed") == 2


def test_other_numbers_than_the_next_job_has_are_an_error():
    done = run(("run", "-n", "2", "--elastic"), "size + 1, 0, rank")
    assert done.returncode == 1 and not done.stdout
    assert "MismatchError: resume(num_workers=3, ..., global_rank=" in done.stderr


def test_a_job_that_is_started_once_is_not_suspended():
    done = run(("run", "-n", "2"), "size, 0, rank")
    assert done.returncode == 1
    assert "UnsupportedError: suspend() in a job of 2 ranks that bpsfast has started" in done.stderr
