"""Elastic jobs on hosts with a real sshd each: hosts are lost, discovered, taken away, and a worker hangs."""
from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ssh_jobs
from tests.support.ssh_jobs import OVER_SSHD, is_empty

pytestmark = [*OVER_SSHD, pytest.mark.timeout(240)]
shared_hosts, hosts, trainer = ssh_jobs.shared_hosts, ssh_jobs.hosts, ssh_jobs.trainer

#: Trains until there is the file *stop*, on all ranks after the same step. Each job is told with its size.
TRAIN = """
import os, pathlib, sys
import numpy as np
import bpsfast
from bpsfast import elastic

folder, member = pathlib.Path(sys.argv[1]), os.environ["BPSFAST_MEMBER"]
host = os.environ["BPSFAST_NODE_ID"].split()[0]
(folder / f"pid{member}").write_text(str(os.getpid()))
bpsfast.init()
state = elastic.ObjectState(sum=np.zeros(1000), step=0)

@elastic.run
def train(state):
    print(f"on {host}: {bpsfast.size()} ranks, step {state.step}", flush=True)
    while True:
        mine = np.ones(1000)
        mine[0] = (folder / "stop").exists()
        mean = bpsfast.push_pull(mine, name="x")
        if mean[0]:
            return
        state.sum += mean
        state.step += 1
        state.commit()

train(state)
assert (state.sum[1:] == state.step).all(), "each step was made once"
print("trained", flush=True)
bpsfast.shutdown()
"""


class Launched:
    """A launcher, and the lines that it has written."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.text = ""
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._threads = [threading.Thread(target=self._read, args=(stream,), daemon=True)
                         for stream in (process.stdout, process.stderr)]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def hears(self, *patterns: str, within_s: float = 60.0) -> list[re.Match[str]]:
        """Read lines until each of *patterns* was found in one; return where."""
        found: dict[str, re.Match[str]] = {}
        deadline = time.monotonic() + within_s
        while len(found) < len(patterns):
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{set(patterns) - set(found)} not within {within_s} s:\n{self.text}") from None
            self.text += line or ""
            for pattern in patterns:
                if pattern not in found and line and (match := re.search(pattern, line)):
                    found[pattern] = match
                    break
        return [found[pattern] for pattern in patterns]

    def ends(self) -> int:
        """Wait for its end; return the exit code."""
        code = self.process.wait(60)
        for thread in self._threads:
            thread.join(20)
        while not self._lines.empty():
            self.text += self._lines.get() or ""
        return code


@pytest.fixture
def job(hosts, trainer, tmp_path) -> Iterator[Callable[..., Launched]]:
    """Start elastic jobs on the hosts that the file *listed* has."""
    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/listed\n")
    script.chmod(0o755)
    with contextlib.ExitStack() as stack:
        def start(*options: str) -> Launched:
            process = stack.enter_context(hosts.launch(
                "run", "--elastic", "--host-discovery-script", str(script), *options, *trainer(TRAIN), str(tmp_path),
                env={"BPSFAST_TIMEOUT_S": "6", "BPSFAST_START_TIMEOUT_S": "60"}))
            stack.callback(process.kill)
            return Launched(process)

        yield start
    assert is_empty(hosts, within_s=20.0), "left behind"


def listed(folder: Path, *lines: str) -> None:
    new = folder / "new"
    new.write_text("".join(f"{line}\n" for line in lines))
    new.replace(folder / "listed")


def lose(hosts, name: str) -> None:
    """End the connections to a host; its sshd goes on to listen."""
    for pid in hosts.pids(name):
        with contextlib.suppress(OSError):
            if b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def test_hosts_are_lost_connected_again_taken_away_and_listed_again(hosts, job, tmp_path):
    listed(tmp_path, "gpu1", "gpu2:1")
    launched = job("-n", "2", "--lost-worker", "shrink", "--min-np", "1", "--blacklist-cooldown", "2")
    launched.hears(r"worker 0\] on gpu1: 2 ranks, step 0", r"worker 1\] on gpu2: 2 ranks, step 0")
    lose(hosts, "gpu2")
    launched.hears("worker 1 was lost with its host gpu2", "host gpu2 is lost .* no worker is started there for 2 s",
                   r"worker 0\] on gpu1: 1 ranks")
    again, _ = launched.hears(r"worker 0\] on gpu1: 2 ranks, step (\d+)", r"worker 2\] on gpu2: 2 ranks")
    assert int(again[1]) > 0
    listed(tmp_path, "gpu1")
    launched.hears("host gpu2 is not listed any more: worker 2 will leave at the next commit", "host gpu2 is released",
                   r"worker 0\] on gpu1: 1 ranks")
    listed(tmp_path, "cpu1", "gpu1")
    launched.hears(r"worker 0\] on gpu1: 2 ranks", r"worker 3\] on cpu1: 2 ranks")
    (tmp_path / "stop").touch()
    assert launched.ends() == 0, launched.text
    assert launched.text.count("] trained") == 2 and "worker 2 ended" not in launched.text, launched.text


def test_a_worker_that_hangs_is_lost_and_the_place_of_a_lost_host_may_be_on_another_one(hosts, job, tmp_path):
    listed(tmp_path, "gpu1", "gpu2")
    launched = job("-n", "2", "--lost-worker", "wait", "--within", "20", "--blacklist-cooldown", "0")
    launched.hears(r"worker 0\] on gpu1: 2 ranks", r"worker 1\] on gpu2: 2 ranks")
    os.kill(int((tmp_path / "pid1").read_text()), signal.SIGSTOP)
    launched.hears("worker 1 has not joined the others in time: ending it",
                   "worker 1 was killed by SIGKILL: the job goes on without it", r"worker 2\] on gpu2: 2 ranks",
                   within_s=90.0)
    listed(tmp_path, "gpu1", "gpu2", "cpu1")
    lose(hosts, "gpu2")
    launched.hears("no worker is started there for the rest of the job", r"worker 3\] on cpu1: 2 ranks")
    (tmp_path / "stop").touch()
    assert launched.ends() == 0, launched.text
    assert launched.text.count("] trained") == 2


def test_a_job_goes_on_without_a_lost_host_until_it_is_connected_again(hosts, job, tmp_path):
    listed(tmp_path, "gpu1", "gpu2", "cpu1")
    launched = job("-n", "3", "--lost-worker", "wait", "--blacklist-cooldown", "2", "--set", "on_worker_loss=continue")
    launched.hears(r"worker 0\] on gpu1: 3 ranks, step 0", r"worker 1\] on gpu2: 3 ranks, step 0")
    lose(hosts, "gpu2")
    launched.hears("worker 1 was lost with its host gpu2", "the job goes on without lost (ranks|nodes)", within_s=90.0)
    again, _ = launched.hears(r"worker 0\] on gpu1: 3 ranks, step (\d+)", r"worker 3\] on gpu2: 3 ranks", within_s=90.0)
    assert int(again[1]) > 0 and "on gpu1: 2 ranks" not in launched.text, "no other job was formed in between"
    (tmp_path / "stop").touch()
    assert launched.ends() == 0, launched.text
    assert launched.text.count("] trained") == 3


def test_a_host_whose_link_is_cut_is_lost_and_connected_again(hosts, job, tmp_path):
    listed(tmp_path, "gpu1", "gpu2")
    launched = job("-n", "2", "--lost-worker", "shrink", "--blacklist-cooldown", "1")
    launched.hears(r"worker 0\] on gpu1: 2 ranks", r"worker 1\] on gpu2: 2 ranks")
    link = ["ip", "-n", hosts.cluster["gpu2"].namespace, "link", "set", "eth0"]
    subprocess.run([*link, "down"], check=True, timeout=20)
    try:
        launched.hears("worker 1 was lost with its host gpu2", "host gpu2 is lost .* for 1 s",
                       r"worker 0\] on gpu1: 1 ranks", within_s=90.0)
    finally:
        subprocess.run([*link, "up"], check=True, timeout=20)
    launched.hears(r"worker 0\] on gpu1: 2 ranks", r"worker 2\] on gpu2: 2 ranks", within_s=90.0)
    (tmp_path / "stop").touch()
    assert launched.ends() == 0, launched.text
    assert launched.text.count("] trained") == 2
    assert is_empty(hosts, within_s=80.0), "an agent without a launcher ends after a minute"


def test_hosts_that_are_too_few_end_in_words(hosts, job, tmp_path):
    listed(tmp_path, "gpu1")
    launched = job("-n", "2", "--within", "3")
    assert launched.ends() == 4, launched.text
    assert "StallError: 1 slots are connected after 3 s (--within), and 2 ranks are to begin" in launched.text


def test_all_hosts_are_replaced_at_once(hosts, job, tmp_path):
    listed(tmp_path, "gpu1:2")
    launched = job("-n", "2", "--lost-worker", "abort")
    launched.hears(r"worker 0\] on gpu1: 2 ranks, step 0", r"worker 1\] on gpu1: 2 ranks, step 0")
    listed(tmp_path, "gpu2:2")
    launched.hears("host gpu1 is not listed any more: worker 0, worker 1 will leave", r"worker 2\] on gpu2: 2 ranks",
                   r"worker 3\] on gpu2: 2 ranks", "host gpu1 is released")
    (tmp_path / "stop").touch()
    assert launched.ends() == 0, launched.text
    assert launched.text.count("] trained") == 2


def test_a_killed_launcher_leaves_nothing_and_the_key_is_in_no_command_line(hosts, trainer, tmp_path):
    key = "5e" * 32
    program = [*trainer(TRAIN), str(tmp_path)]
    with hosts.launch("run", "--elastic", "-H", "gpu1:1,gpu2:1", "--lost-worker", "shrink", *program,
                      env={"BPSFAST_JOB_KEY": key}) as process:
        Launched(process).hears(r"worker 0\] on gpu1: 2 ranks, step 0", r"worker 1\] on gpu2: 2 ranks, step 0")
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                assert key.encode() not in (folder / "cmdline").read_bytes()
        process.kill()
        process.wait(20)
    assert is_empty(hosts, within_s=20.0)


def test_an_unreachable_host_of_a_fixed_list_is_an_error_and_nothing_is_started(hosts, trainer, tmp_path):
    hosts.stop_sshd("gpu2")
    try:
        done = hosts.run("run", "--elastic", "-H", "gpu1:1,gpu2:1", *trainer(TRAIN), str(tmp_path))
    finally:
        hosts.start_sshd("gpu2")
    assert done.returncode == 1 and "gpu2: not reached by ssh" in done.stderr, done.stderr
    assert not list(tmp_path.glob("pid*")) and is_empty(hosts)


@pytest.mark.parametrize("policy", ["abort", "shrink", "wait"])
def test_a_program_that_fails_on_all_hosts_ends_with_its_exit_code(hosts, trainer, policy):
    program = trainer("import sys, bpsfast\nbpsfast.init()\nbpsfast.barrier()\nsys.exit(7)\n")
    done = hosts.run("run", "--elastic", "-H", "gpu1:1,gpu2:1", "--lost-worker", policy, *program)
    assert done.returncode == 7, done.stderr
    assert is_empty(hosts)
