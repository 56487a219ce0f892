"""Tests daemons as children of a rank: their environment, their orderly end, and that none is left behind."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time

import pytest
import zmq

from bpsfast.base.settings import Settings, load_with_origins
from bpsfast.launch import daemons
from bpsfast.launch.daemons import N_RESTARTS
from bpsfast.launch.roles import detect
from bpsfast.node import main
from bpsfast.orchestration.errors import ConfigError

#: A rank that starts its daemons and never attaches.
_STARTER = """
import sys
from bpsfast.launch import daemons
from bpsfast.launch.daemons import N_RESTARTS
from bpsfast.launch.roles import detect
from bpsfast.base.settings import load
settings = load({"heartbeat_s": 0.1, "lease_s": 0.3, "start_timeout_s": 100})
started = daemons.start(detect(settings, {}), settings)
print(started.scheduler.pid, started.node.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def single():
    settings = load_with_origins({"start_timeout_s": 60}, {})[0]
    started = daemons.start(detect(settings, {}), settings)
    yield started
    started.close(timeout_s=0.0)


@pytest.mark.slow
def test_a_single_process_gets_both_daemons_and_a_real_port(single, pidfd_of):
    assert single.failure() is None
    assert single.role.scheduler[1] > 0
    ends = [pidfd_of(process.pid) for process in (single.scheduler, single.node)]
    assert all(os.getsid(process.pid) == process.pid for process in (single.scheduler, single.node)), (
        "sessions of their own"
    )
    single.close(timeout_s=0.0)
    single.close()
    for end in ends:
        assert select.select([end], [], [], 0.0)[0], "close has waited for the end"


@pytest.mark.slow
def test_a_daemon_that_fails_is_named(single):
    single.node.kill()
    single.node.wait(timeout=20)
    assert re.search(r"the node \(pid \d+\) was killed by SIGKILL", single.failure())


@pytest.mark.slow
def test_a_scheduler_that_is_killed_is_started_again_and_named_when_it_is_not(single, caplog):
    for n in range(N_RESTARTS):
        pid = single.scheduler.pid
        single.scheduler.kill()
        deadline = time.monotonic() + 20
        while single.scheduler.pid == pid:
            assert time.monotonic() < deadline
            assert single.failure() is None
            time.sleep(0.001)
        assert f"({n + 1} of {N_RESTARTS} times)" in caplog.text
    single.scheduler.kill()
    single.scheduler.wait(timeout=20)
    assert re.search(r"the scheduler \(pid \d+\) was killed by SIGKILL", single.failure())


@pytest.mark.slow
def test_daemons_do_not_outlive_a_starter_that_is_killed(pidfd_of):
    with subprocess.Popen(
        [sys.executable, "-c", _STARTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    ) as starter:
        ends = [pidfd_of(int(pid)) for pid in starter.stdout.readline().split()]
        starter.kill()
        for end in ends:
            assert select.select([end], [], [], 40.0)[0], "a daemon outlives its starter"


def test_a_place_that_starts_nothing_holds_nothing():
    environ = {
        "BPSFAST_RANK": "0",
        "BPSFAST_SIZE": "1",
        "BPSFAST_LOCAL_RANK": "0",
        "BPSFAST_LOCAL_SIZE": "1",
        "BPSFAST_SCHEDULER": "127.0.0.1:1",
    }
    settings = load_with_origins({}, environ)[0]
    started = daemons.start(detect(settings, environ), settings)
    assert started.scheduler is None and started.node is None and started.failure() is None
    started.close()


def test_a_daemons_environment_has_no_trace_of_other_launchers():
    environ = {
        "RANK": "1",
        "MASTER_ADDR": "x",
        "BPSFAST_RANK": "1",
        "DMLC_ROLE": "worker",
        "BYTEPS_LOCAL_RANK": "0",
        "TORCHELASTIC_RUN_ID": "7",
        "PATH": "/bin",
        "OMP_NUM_THREADS": "3",
    }
    assert daemons.clean_environment(environ) == {"PATH": "/bin", "OMP_NUM_THREADS": "3"}


def test_a_reserved_port_can_be_bound_by_zeromq_and_by_nobody_else():
    with daemons.reserve_port("127.0.0.1") as reserved, zmq.Context() as context:
        host, port = reserved.getsockname()
        with context.socket(zmq.ROUTER) as scheduler:
            scheduler.bind(f"tcp://{host}:{port}")
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind((host, port))


def test_daemons_without_what_they_need_say_what():
    with pytest.raises(ConfigError, match="BPSFAST_NUM_NODES"):
        daemons.run_scheduler(Settings(scheduler="127.0.0.1:1"))
    with pytest.raises(ConfigError, match="BPSFAST_SCHEDULER"):
        daemons.run_scheduler(Settings(num_nodes=1))
    with pytest.raises(ConfigError, match="BPSFAST_SCHEDULER"):
        main.run_node(Settings())


def test_a_process_that_ignores_sigterm_is_killed():
    text = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-S", "-c", text], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        daemons.terminate(process, grace_s=0.1)
        assert process.returncode == -signal.SIGKILL


def test_close_says_which_daemon_it_had_to_end(single, caplog, monkeypatch):
    single.close(timeout_s=0.0)
    assert "the node (pid" in caplog.text and "the scheduler (pid" in caplog.text


@pytest.mark.parametrize(
    "code, text", [(3, "ended with exit code 3"), (-9, "was killed by SIGKILL"), (-60, "was killed by signal 60")]
)
def test_an_exit_in_words(code, text):
    assert daemons.describe_exit(code) == text
