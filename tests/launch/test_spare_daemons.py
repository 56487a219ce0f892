"""Daemons that are started before their settings are known: they go on with them, or end with nothing left."""
from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from bpsfast.base.resources import is_ready
from bpsfast.launch import spare_daemons
from bpsfast.launch.daemons import clean_environment
from bpsfast.launch.spare_daemons import SpareDaemons

_START_S = 60.0


@pytest.fixture
def spares(no_leaks):
    found = SpareDaemons()
    yield found
    found.close()


def environ():
    return clean_environment(os.environ)


def test_a_spare_goes_on_with_the_settings_that_it_is_given(spares):
    spares.keep(["node", "scheduler"], environ())
    assert spares.are_ready(_START_S)
    for command, words in (("node", "BPSFAST_SCHEDULER = nowhere"), ("scheduler", "BPSFAST_NUM_NODES")):
        process = spares.take(command, {"BPSFAST_SCHEDULER": "nowhere"})
        assert process is not None and process.wait(_START_S) == 2, words  # the settings are bad ones
        assert spares.take(command, {}) is None, "there is one of each"


def test_what_is_not_needed_ends(spares, pidfd_of):
    spares.keep(["node", "scheduler"], environ())
    pids = {command: spare.process.pid for command, spare in spares._spares.items()}
    ends = {command: pidfd_of(pid) for command, pid in pids.items()}
    spares.keep(["node"], environ())
    assert is_ready(ends["scheduler"], 0.0) and not is_ready(ends["node"], 0.0)
    assert spares._spares["node"].process.pid == pids["node"], "it is kept"
    spares.close()
    assert is_ready(ends["node"], 0.0)


def test_a_spare_that_was_killed_is_none_and_is_replaced(spares):
    spares.keep(["node"], environ())
    spares._spares["node"].process.kill()
    spares._spares["node"].process.wait(_START_S)
    assert spares.are_ready(_START_S), "nobody waits for it"
    spares.keep(["node"], environ())
    assert spares._spares["node"].process.poll() is None
    process = spares._spares["node"].process
    process.kill()
    process.wait(_START_S)
    assert spares.take("node", {"BPSFAST_SCHEDULER": "nowhere"}) is None


def test_a_fork_that_holds_the_socket_keeps_no_spare_from_its_work_and_none_alive(spares):
    spares.keep(["node", "scheduler"], environ())
    assert spares.are_ready(_START_S)
    end, held = os.pipe()
    fork = os.fork()
    if fork == 0:  # as a data loader's worker
        os.close(held)
        os.read(end, 1)
        os._exit(0)
    try:
        process = spares.take("node", {"BPSFAST_SCHEDULER": "nowhere"})
        assert process is not None and process.wait(_START_S) == 2
        scheduler = spares._spares["scheduler"].process
        spares.close()
        assert scheduler.returncode == -signal.SIGKILL
    finally:
        os.close(held)
        os.close(end)
        os.waitpid(fork, 0)


def test_a_spare_that_cannot_be_replaced_is_left_out(spares, monkeypatch):
    spares.keep(["node"], environ())
    spares._spares["node"].process.kill()
    spares._spares["node"].process.wait(_START_S)

    def fail(*arguments):
        raise OSError("no more processes")

    monkeypatch.setattr(spare_daemons, "start", fail)
    spares.keep(["node"], environ())
    assert spares.are_ready(0.0) and spares.take("node", {}) is None


def test_a_spare_ends_with_its_starter(no_leaks, pidfd_of):
    text = ("import os, time\nfrom bpsfast.launch.daemons import clean_environment\n"
            "from bpsfast.launch.spare_daemons import SpareDaemons\n"
            "spares = SpareDaemons()\nspares.keep(['node'], clean_environment(os.environ))\n"
            "print(spares._spares['node'].process.pid, flush=True)\nspares.are_ready(60.0)\n"
            "print('ready', flush=True)\ntime.sleep(1000)\n")
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as starter:
        try:
            assert starter.stdout is not None
            end = pidfd_of(int(starter.stdout.readline()))
            assert starter.stdout.readline() == "ready\n" and not is_ready(end, 0.0)
        finally:
            starter.send_signal(signal.SIGKILL)
        assert is_ready(end, _START_S)
