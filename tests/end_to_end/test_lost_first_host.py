"""The launcher's first host is lost, and with it the scheduler: the launcher starts another one, and no step is lost.

The three hosts are agents on this machine, without ssh (`test_over_ssh_scheduler` has that): with its agent everything
on a host ends.
"""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.end_to_end.test_over_ssh_scheduler import TRAINS_ON
from tests.support.ssh_jobs import trainer as trainer

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(150)]

_LAUNCHER = """
import sys
from bpsfast.base import settings
from bpsfast.launch import ssh_job
from bpsfast.launch.host_list import Host
from bpsfast.launch.ssh import Ssh
from bpsfast.launch.supervisor import Limits

values = dict(each.split("=") for each in sys.argv[2].split(","))
plan = ssh_job.SshPlan(hosts=[Host("localhost", 1)] * int(sys.argv[1]), ssh=Ssh())
sys.exit(ssh_job.run(plan, sys.argv[3:], settings.load(values), limits=Limits(job_s=120.0)))
"""
_SETTINGS = "on_worker_loss=continue,lease_s=2,heartbeat_s=0.5,transport=tcp"


def launch(n_hosts: int, program: list[str]) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BPSFAST_")}
    return subprocess.Popen([sys.executable, "-c", _LAUNCHER, str(n_hosts), _SETTINGS, *program[1:]], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)


def agents(launcher: subprocess.Popen[str], n_hosts: int) -> dict[int, int]:
    """Return the agent of each rank, once all ranks train."""
    found = {}
    while len(found) < n_hosts:
        match = re.search(r"\[rank (\d)\] training below (\d+)", launcher.stdout.readline())
        assert match is not None, launcher.stderr.read()
        found[int(match[1])] = int(match[2])
    return found


@pytest.fixture
def program(trainer):
    """Return the command of a program that trains until only *n_left* ranks are left, and then goes on for a while."""
    def write(n_left: int) -> list[str]:
        return trainer(TRAINS_ON.replace('"training"', '"training below", __import__("os").getppid()')
                       .replace("len(bpsfast.members()) == 3", f"len(bpsfast.members()) > {n_left}"))

    return write


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["it fails", "it is shut down"])
def test_the_others_go_on(program, number):
    launcher = launch(3, program(2))
    try:
        os.kill(agents(launcher, 3)[0], number)
        out, err = launcher.communicate(timeout=100)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, err
    assert "scheduler was lost with its host localhost" in err and "another one is started at" in err, err
    assert "rank 0 was lost with its host localhost" in err and "the job goes on with 2 ranks" in err
    assert out.count("done with 1 2") == 2, out


def test_then_the_second_one_is_lost(program):
    """Of five hosts the third one has the scheduler in the end."""
    launcher = launch(5, program(3))
    try:
        hosts = agents(launcher, 5)
        os.kill(hosts[0], signal.SIGKILL)
        said = []
        while not said or "another one is started at" not in said[-1]:
            said.append(launcher.stderr.readline())
            assert said[-1], said
        os.kill(hosts[1], signal.SIGKILL)
        out, err = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    err = "".join(said) + err
    assert launcher.returncode == 0, err
    assert err.count("another one is started at") == 2, err
    assert out.count("done with 2 3 4") == 3, out
