"""`bpsfast run -H` over real sshds: the first host is lost, and with it the scheduler; the others go on."""
from __future__ import annotations

import contextlib
import os
import signal
import subprocess

import pytest

from tests.support import ssh_jobs
from tests.support.ssh_jobs import OVER_SSHD, is_empty

pytestmark = [*OVER_SSHD, pytest.mark.timeout(180)]
shared_hosts, hosts, trainer = ssh_jobs.shared_hosts, ssh_jobs.hosts, ssh_jobs.trainer

TRAINS_ON = """
    import numpy as np, bpsfast

    def push(name, step):
        found = bpsfast.push_pull(np.full(100_000, bpsfast.rank() + step, np.float32), name=name)
        right = np.float32(np.mean([rank + step for rank in bpsfast.contributors(name)]))
        assert (found == right).all(), (name, step, found, right)

    bpsfast.init()
    bpsfast.barrier()
    print("training", flush=True)
    step = 0
    while len(bpsfast.members()) == 3:
        push("x", step)
        step += 1
    for i in range(5):
        push("x", step + i)
        push(f"new {i}", i)
    print("done with", *bpsfast.members(), flush=True)
    bpsfast.shutdown()
"""
_OPTIONS = ("--set", "on_worker_loss=continue", "--set", "lease_s=2", "--set", "heartbeat_s=0.5", "--timeout", "120",
            "--ssh-option", "ServerAliveInterval=1", "--ssh-option", "ServerAliveCountMax=2")


def end_all(hosts, name: str) -> None:
    for pid in hosts.pids(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("is_cut", [False, True], ids=["all its processes are killed", "it is switched off"])
def test_the_first_host_is_lost_and_the_others_go_on(hosts, trainer, is_cut):
    """*is_cut*: nothing on it answers any more, not even by refusing."""
    link = ["ip", "-n", hosts.cluster["gpu1"].namespace, "link", "set", "eth0"]
    with hosts.launch("run", "-H", "gpu1,gpu2,cpu1", *_OPTIONS, *trainer(TRAINS_ON)) as launcher:
        for _ in range(3):
            assert "training" in launcher.stdout.readline()
        try:
            if is_cut:
                subprocess.run([*link, "down"], check=True, timeout=20)
            else:
                end_all(hosts, "gpu1")
            out, err = launcher.communicate(timeout=120)
        finally:
            if is_cut:
                subprocess.run([*link, "up"], check=True, timeout=20)
                end_all(hosts, "gpu1")
            hosts.start_sshd("gpu1")
    assert launcher.returncode == 0, err
    assert "scheduler was lost with its host gpu1" in err and "another one is started at" in err, err
    assert "the job goes on with 2 ranks" in err
    assert sum("done with 1 2" in line for line in out.splitlines()) == 2, out
    assert is_empty(hosts)
