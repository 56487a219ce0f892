"""The same program under every launcher: real schedulers, nodes and ranks, started as users start them."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import subprocess
import sys

import pytest

from bpsfast.launch.namespaces import Cluster

pytestmark = pytest.mark.slow

_TIMEOUT_S = 60.0
_DMLC = [sys.executable, "-m", "bpsfast", "dmlc"]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
_MPIRUN = ["mpirun", "--oversubscribe", "-np", "2"] + ["--allow-run-as-root"] * (os.geteuid() == 0) + [sys.executable]

#: Prints "sum SIZE NODES HELPERS": the ranks' numbers, each plus one, added up.
_PROGRAM = """
import numpy as np, bpsfast
bpsfast.init()
total = bpsfast.push_pull(np.full(1000, bpsfast.rank() + 1.0), average=False, name="x")
assert (total == total[0]).all()
from bpsfast.trainer.process import current
print(f"sum {int(total[0])} {bpsfast.size()} {current().n_nodes} {current().n_helpers}.", flush=True)
bpsfast.shutdown()
"""
_RANK_1_IS_KILLED = """
import os, psutil, bpsfast
bpsfast.init()
if bpsfast.rank() == 0:
    print("daemons", *(child.pid for child in psutil.Process().children()), flush=True)
bpsfast.barrier()
if bpsfast.rank() == 1:
    os.kill(os.getpid(), 9)
bpsfast.barrier()
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(_PROGRAM)
    return str(path)


def environment(**variables: str) -> dict[str, str]:
    """Return a clean environment with *variables*."""
    return {"PATH": os.environ["PATH"], "BPSFAST_START_TIMEOUT_S": "40", "BPSFAST_TIMEOUT_S": "40", **variables}


def sums(text: str) -> list[list[int]]:
    """Return what the ranks have printed, without the word "sum"; two may have printed into one line."""
    return [[int(word) for word in words.split()] for words in re.findall(r"sum ([\d ]+)\.", text)]


def run(*command: str, timeout_s: float = _TIMEOUT_S) -> subprocess.CompletedProcess:
    """Run *command* to its end."""
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False)


def test_alone(program):
    done = run(sys.executable, program)
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == [[1, 1, 1, 0]]


def test_bpsfast_run(program):
    command = ("run", "--ranks", "2,1", "--helpers", "1", "--", sys.executable, program)
    done = run(sys.executable, "-m", "bpsfast", *command)
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == [[6, 3, 2, 1]] * 3
    assert "still running" not in done.stderr


def test_torchrun(program):
    pytest.importorskip("torch")
    done = run(*_TORCHRUN, program)
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == [[3, 2, 1, 0]] * 2


@pytest.mark.parametrize(
    "launch",
    [
        _TORCHRUN,
        pytest.param(_MPIRUN, marks=pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun (make mpi)")),
    ],
    ids=["torchrun", "mpirun"],
)
def test_no_daemon_is_left_when_a_rank_is_killed(tmp_path, launch):
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(_RANK_1_IS_KILLED)
    with subprocess.Popen(
        [*launch, str(path)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as launcher:
        word, *pids = next(line for line in launcher.stdout if line.startswith("daemons")).split()
        assert word == "daemons" and len(pids) == 2
        ends = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # ended already
                ends.append(os.pidfd_open(int(pid)))
        assert launcher.wait(timeout=_TIMEOUT_S) != 0
        for end in ends:
            assert select.select([end], [], [], 40.0)[0], "a daemon outlives the job"
            os.close(end)


def _start(cluster: Cluster, roles: list[str], n_servers: int, program: str) -> dict[str, subprocess.Popen]:
    """Start BytePS-style *roles* ("server 0", "worker 1", "scheduler") in this order; the number is the machine's."""
    started = {}
    for title in roles:
        role, _, number = title.partition(" ")
        variables = environment(
            DMLC_ROLE=role,
            DMLC_NUM_WORKER="2",
            DMLC_NUM_SERVER=str(n_servers),
            DMLC_PS_ROOT_URI=cluster.hub.address,
            DMLC_PS_ROOT_PORT="9000",
            BPSFAST_JOB_KEY="ab" * 32,
        )
        command = _DMLC
        if role == "worker":
            variables |= {"DMLC_WORKER_ID": number, "BYTEPS_LOCAL_SIZE": "2" if number == "0" else "1"}
            command = [*_DMLC, "--", sys.executable, program]
        machine = cluster[f"m{number}"] if number else cluster.hub
        started[title] = machine.popen(command, variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return started


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize(
    "roles, n_helpers",
    [
        (["scheduler", "worker 0", "worker 1"], 0),
        (["server 0", "scheduler", "worker 0", "worker 1"], 0),  # the server is machine 0's node
        (
            ["worker 1", "worker 0", "server 2", "server 1", "scheduler"],
            1,
        ),  # one of two servers has a machine of its own
        (["server 2", "server 3", "worker 0", "scheduler", "worker 1"], 2),
    ],
)
def test_byteps_roles_in_any_order(program, roles, n_helpers):
    n_servers = sum(role.startswith("server") for role in roles)
    with Cluster(4) as cluster:
        started = _start(cluster, roles, n_servers, program)
        outputs = {title: process.communicate(timeout=_TIMEOUT_S) for title, process in started.items()}
        codes = {title: process.returncode for title, process in started.items()}
    assert not any(codes.values()), (codes, outputs)
    found = sums(outputs["worker 0"][0]) + sums(outputs["worker 1"][0])
    assert found == [[6, 3, 2, n_helpers]] * 3
