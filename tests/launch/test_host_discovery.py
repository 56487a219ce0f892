"""Tests the discovery of hosts by a user's script: what is taken from it, its deadline, and that none is left."""
from __future__ import annotations

import os
import select
import time

import pytest

from bpsfast.base import process_identity
from bpsfast.launch.host_discovery import HostDiscovery
from bpsfast.launch.host_list import Host
from bpsfast.orchestration.errors import ConfigError, StallError

pytestmark = pytest.mark.timeout(60)
LIMIT_S = 20.0


@pytest.fixture
def script(tmp_path):
    def write(text: str):
        path = tmp_path / "hosts.sh"
        new = tmp_path / "new"
        new.write_text(f"#!/bin/sh\n{text}\n")
        new.chmod(0o755)
        new.replace(path)  # at once: it is run meanwhile
        return path

    return write


def taken(discovery, limit_s: float = LIMIT_S):
    """The next change."""
    assert select.select([discovery], [], [], limit_s)[0], "nothing has changed"
    (found,) = discovery.take()
    return found


def test_lists_are_taken_when_they_change(script, tmp_path, no_leaks):
    runs = tmp_path / "runs"
    path = script(f"echo >> {runs}; echo gpu1; echo gpu2:3")
    with HostDiscovery(path, slots=2, interval_s=0.01) as discovery:
        assert taken(discovery) == [Host("gpu1", 2), Host("gpu2", 3)]
        deadline = time.monotonic() + LIMIT_S
        while runs.stat().st_size < 3:
            assert time.monotonic() < deadline
        assert discovery.take() == [], "nothing has changed"
        script("true")
        assert taken(discovery) == []
        script("echo gpu1")
        assert taken(discovery) == [Host("gpu1", 2)]


def test_a_failure_is_told_once_and_says_why(script, tmp_path, no_leaks):
    runs = tmp_path / "runs"
    path = script(f"echo >> {runs}; echo gpu1; echo 'no route to the cloud' >&2; exit 3")
    with HostDiscovery(path, interval_s=0.01) as discovery:
        found = taken(discovery)
        assert isinstance(found, ConfigError)
        assert str(found) == f"--host-discovery-script {path} ended with exit code 3 (no route to the cloud)"
        n_before, deadline = runs.stat().st_size, time.monotonic() + LIMIT_S
        while runs.stat().st_size < n_before + 2:
            assert time.monotonic() < deadline
        assert discovery.take() == []
        script("echo gpu1")
        assert taken(discovery) == [Host("gpu1")]
        script("echo gpu1 gpu2")
        assert "line 1: 'gpu1 gpu2' is no host" in str(taken(discovery))


@pytest.mark.parametrize(("text", "message"), [
    ("sleep 600 & echo $$ $! > PIDS; wait", "has not ended within 0.5 s"),
    ("exec sleep 600 >/dev/null 2>&1", "has closed its output and not ended"),
    ("yes gpu", "prints more than 1048576 bytes")])
def test_a_script_that_does_not_end_is_ended(script, tmp_path, text, message, no_leaks):
    pids = tmp_path / "pids"
    with HostDiscovery(script(text.replace("PIDS", str(pids))), interval_s=60.0, timeout_s=0.5) as discovery:
        found = taken(discovery)
    assert isinstance(found, StallError | ConfigError) and message in str(found)
    for pid in pids.read_text().split() if pids.exists() else ():
        fields = process_identity.stat(int(pid))
        assert not fields or fields[0] in "ZX", "left behind"


def test_a_running_script_does_not_keep_the_launcher(script, tmp_path, no_leaks):
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    discovery = HostDiscovery(script(f"echo > {begun}; exec sleep 600"), timeout_s=600.0)
    begun.read_text()
    begin_s = time.monotonic()
    discovery.close()
    assert time.monotonic() - begin_s < 10.0


def test_the_script_does_not_get_the_key(script, monkeypatch, no_leaks):
    monkeypatch.setenv("BPSFAST_JOB_KEY", "ab" * 32)
    monkeypatch.setenv("CLOUD", "gpu7")
    with HostDiscovery(script("echo $CLOUD$BPSFAST_JOB_KEY")) as discovery:
        assert taken(discovery) == [Host("gpu7")]


def test_a_file_that_cannot_be_run_is_refused(tmp_path):
    path = tmp_path / "hosts"
    with pytest.raises(ConfigError, match="there is no such file"):
        HostDiscovery(path)
    path.write_text("gpu1\n")
    with pytest.raises(ConfigError, match="is not executable: chmod"):
        HostDiscovery(path)
