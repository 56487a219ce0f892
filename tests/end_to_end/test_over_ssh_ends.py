"""`bpsfast run -H` over real sshds, each in a network namespace: every way in which a job ends."""
from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bpsfast.launch import remote_hosts
from tests.support import ssh_jobs
from tests.support.ssh_jobs import OVER_SSHD, WAIT, is_empty

pytestmark = OVER_SSHD
shared_hosts, hosts, trainer = ssh_jobs.shared_hosts, ssh_jobs.hosts, ssh_jobs.trainer


def test_the_rank_that_failed_first_is_shown_last_and_its_code_is_the_jobs(hosts, trainer):
    program = trainer("""
        import os, numpy as np, bpsfast
        bpsfast.init()
        while True:
            bpsfast.push_pull(np.ones(10), name="x")
            if bpsfast.rank() == 2:
                raise ValueError("a bug in the trainer")
    """)
    done = hosts.run("run", "-H", "gpu1:2,gpu2:1", *program)
    assert done.returncode == 1
    before, _, last = done.stderr.partition("[bpsfast run] rank 2 failed first: it ended with exit code 1")
    summary, others = last.splitlines()
    assert summary == ": ValueError: a bug in the trainer" and "ranks 0-1 ended because of that" in others
    assert before.count("Traceback") == 1 and "PeerLostError" not in before, before
    assert is_empty(hosts)


def test_an_exit_code_is_handed_on(hosts, trainer):
    program = trainer("import os, sys, time\nif os.environ['BPSFAST_RANK'] == '1': sys.exit(37)\ntime.sleep(600)")
    done = hosts.run("run", "-H", "gpu1,gpu2", *program)
    assert done.returncode == 37, done.stderr
    assert is_empty(hosts)


def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(hosts, trainer, pidfd_of):
    with hosts.launch("run", "-H", "gpu1:2,gpu2:1", "--helpers-on", "cpu1", *trainer(WAIT)) as launcher:
        for _ in range(3):
            assert "waiting" in launcher.stdout.readline()
        running = {name: hosts.pids(name) for name in hosts.names}
        assert all(running.values())
        ends = [pidfd_of(pid) for pids in running.values() for pid in pids]
        launcher.kill()
        for end in ends:
            assert select.select([end], [], [], 20.0)[0]
    assert is_empty(hosts)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_everything_everywhere(hosts, trainer, number):
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    with hosts.launch("run", "--grace", "0", "-H", "gpu1:1,gpu2:1", *trainer(stubborn + WAIT)) as launcher:
        for _ in range(2):
            assert "waiting" in launcher.stdout.readline()
        begin = time.monotonic()
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=30)
        took_s = time.monotonic() - begin
    assert launcher.returncode == 128 + number, err
    assert f"got {signal.Signals(number).name}: ending all processes" in err
    assert not any(hosts.pids(name) for name in hosts.names) or is_empty(hosts, within_s=0.5)
    assert took_s < remote_hosts._END_S, "SIGKILL after 1.5 s: no host is left to give up by itself"


def test_ranks_on_other_hosts_get_sigterm_first(hosts, trainer):
    """They alone, so their children can work on."""
    saves = ("import signal, subprocess, sys\nchild = subprocess.Popen(['sleep', '600'])\ndef save(*_):\n"
             "    print('saved', child.poll(), flush=True)\n    sys.exit(0)\nsignal.signal(signal.SIGTERM, save)\n")
    with hosts.launch("run", "-H", "gpu1:1,gpu2:1", *trainer(saves + WAIT)) as launcher:
        for _ in range(2):
            assert "waiting" in launcher.stdout.readline()
        launcher.send_signal(signal.SIGTERM)
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0 and "got SIGTERM: the ranks have 30 s to end" in err, err
    assert sum("saved None" in line for line in out.splitlines()) == 2
    assert is_empty(hosts)


def test_a_lost_host_is_named(hosts, trainer):
    with hosts.launch("run", "-H", "gpu1,gpu2", *trainer(WAIT)) as launcher:
        for _ in range(2):
            assert "waiting" in launcher.stdout.readline()
        try:
            for pid in hosts.pids("gpu2"):
                if b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
            _, err = launcher.communicate(timeout=60)
        finally:
            hosts.start_sshd("gpu2")
    assert launcher.returncode == 255, err
    assert re.search(r"rank 1 failed first: it was lost with its host gpu2 \(", err), err
    assert is_empty(hosts)


def test_a_link_that_is_cut_is_noticed(hosts, trainer):
    quick = ("--ssh-option", "ServerAliveInterval=1", "--ssh-option", "ServerAliveCountMax=2")
    with hosts.launch("run", "-H", "gpu1,gpu2", *quick, *trainer(WAIT)) as launcher:
        for _ in range(2):
            assert "waiting" in launcher.stdout.readline()
        link = ["ip", "-n", hosts.cluster["gpu2"].namespace, "link", "set", "eth0"]
        subprocess.run([*link, "down"], check=True, timeout=20)
        try:
            _, err = launcher.communicate(timeout=60)
            assert launcher.returncode != 0
            assert "was lost with its host gpu2" in err or "PeerLostError" in err, err
        finally:
            subprocess.run([*link, "up"], check=True, timeout=20)
            hosts.start_sshd("gpu2")
    for pid in hosts.pids("gpu2"):  # its agent hears nothing, and would end itself after a minute
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert is_empty(hosts)


def test_an_interrupt_while_hosts_are_looked_at_leaves_nothing(hosts, trainer, tmp_path):
    entered = tmp_path / "entered"
    os.mkfifo(entered)
    hosts.start_sshd("gpu2", f"ForceCommand echo came > {entered}; exec sleep 600")
    try:
        with hosts.launch("run", "-H", "gpu1,gpu2", *trainer(WAIT)) as launcher:
            assert entered.read_text() == "came\n"
            begin = time.monotonic()
            launcher.send_signal(signal.SIGINT)
            _, err = launcher.communicate(timeout=30)
            assert time.monotonic() - begin < 5.0
    finally:
        hosts.start_sshd("gpu2")
    assert launcher.returncode == 130 and "interrupted before anything was started" in err, err
    for pid in hosts.pids("gpu2"):  # what a login script does without reading its input is out of reach
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert is_empty(hosts)


def test_the_jobs_deadline_is_kept(hosts, trainer):
    done = hosts.run("run", "-H", "gpu1,gpu2", "--timeout", "4", *trainer(WAIT))
    assert done.returncode == 124 and "has not ended within 4 s" in done.stderr
    assert is_empty(hosts)
