"""torch's ``env://`` under `bpsfast run`, which sets none of torch's variables: real ranks, two nodes.

`test_environments` has the other launchers.
"""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bpsfast.launch.daemons import clean_environment, reserve_port

pytestmark = pytest.mark.matrix

pytest.importorskip("torch")

_BEGIN = """
import datetime, bpsfast
import bpsfast.torch.backend
import torch, torch.distributed as dist

def show(word):
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    print(word, dist.get_rank(), dist.get_world_size(), total.item(), flush=True)
"""


def run(text):
    command = [sys.executable, "-m", "bpsfast", "run", "-n", "2", "--nodes", "2", "--", sys.executable, "-c",
               _BEGIN + text]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def shown(done):
    assert done.returncode == 0, done.stderr
    return sorted(line.partition("] ")[2] for line in done.stdout.splitlines())


@pytest.mark.parametrize("arguments", ["'bpsfast'", "'gloo'", "'bpsfast', world_size=2"])
def test_groups_come_one_after_another(arguments):
    done = run(f"for i in range(2):\n    dist.init_process_group({arguments})\n    show(i)\n"
               "    dist.destroy_process_group()")
    assert shown(done) == [f"{i} {rank} 2 3.0" for i in range(2) for rank in range(2)]


def test_a_job_that_was_joined_before_is_used():
    done = run("bpsfast.init()\ndist.init_process_group('bpsfast')\nshow('group')\ndist.destroy_process_group()\n"
               "bpsfast.barrier()\nprint('job', bpsfast.rank(), flush=True)\nbpsfast.shutdown()")
    assert shown(done) == ["group 0 2 3.0", "group 1 2 3.0", "job 0", "job 1"]


def test_a_group_of_gloo_after_the_job():
    done = run("bpsfast.init()\nbpsfast.shutdown()\ndist.init_process_group('gloo')\nshow('group')\n"
               "dist.destroy_process_group()")
    assert shown(done) == ["group 0 2 3.0", "group 1 2 3.0"]


def test_another_world_size_than_the_launchers_is_an_error():
    done = run("dist.init_process_group('bpsfast', world_size=3)")
    assert done.returncode == 1
    assert "MismatchError: init_process_group is given world_size=3, but the launcher has started 2" in done.stderr


def test_rank_0_that_makes_no_group_is_named():
    done = run("bpsfast.init()\nif bpsfast.rank() == 1:\n"
               "    dist.init_process_group('bpsfast', timeout=datetime.timedelta(seconds=1))\nbpsfast.barrier()")
    assert done.returncode == 1
    assert "StallError: rank 1 waited 1 s for notice 'torch/store/0': rank 0 " in done.stderr


def test_the_place_is_looked_for_once():
    with reserve_port("127.0.0.1") as reserved:
        variables = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                     "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "BPSFAST_SCHEDULER": "{}:{}".format(*reserved.getsockname())}
        text = _BEGIN + """
from bpsfast.launch import roles

def counted(*arguments, detect=roles.detect):
    print("looked for")
    return detect(*arguments)

roles.detect = counted
dist.init_process_group("bpsfast")
show("alone")
dist.destroy_process_group()
"""
        done = subprocess.run([sys.executable, "-c", text], env=clean_environment(os.environ) | variables,
                              capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "looked for\nalone 0 1 1.0\n"
