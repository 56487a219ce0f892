"""Tests ssh's command line, and the explanations of its error messages."""
from __future__ import annotations

import shlex
import subprocess

import pytest

from bpsfast.launch import ssh
from bpsfast.launch.host_list import Host
from bpsfast.launch.ssh import Ssh
from bpsfast.orchestration.errors import ConfigError, MismatchError, PeerLostError


def test_host_keys_are_checked_and_nothing_is_asked():
    argv = Ssh(options=("ConnectTimeout=3", "BatchMode=no")).argv(Host("gpu1"))
    options = [argv[i + 1] for i, word in enumerate(argv) if word == "-o"]
    assert options.index("BatchMode=yes") < options.index("BatchMode=no"), "ssh takes the first"
    assert options.index("ConnectTimeout=3") < options.index("ConnectTimeout=10")
    assert "stricthostkeychecking" not in " ".join(argv).lower()


def test_what_is_run_there_survives_any_shell(tmp_path):
    python = tmp_path / "my python"
    python.write_text('#!/bin/sh\necho "$PYTHONSAFEPATH|$PYTHONPATH|$*"\n')
    python.chmod(0o755)
    found = Ssh(python=str(python), python_path="/a b:/c'd", port=2222, identity_file="/k").argv(Host("me@fd00::3"))
    assert found[:6] == ["ssh", "-T", "-p", "2222", "-i", "/k"] and found[-2] == "me@fd00::3"
    done = subprocess.run(["sh", "-c", found[-1]], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "1|/a b:/c'd|-m bpsfast agent\n"


def test_this_machine_is_not_asked_by_ssh():
    assert Ssh(python="/opt/python").argv(Host("localhost"))[-4:] == ["/opt/python", "-m", "bpsfast", "agent"]
    assert Ssh().argv(Host("me@localhost"))[0] == "ssh"


@pytest.mark.parametrize("option", ["StrictHostKeyChecking=no", "stricthostkeychecking off",
                                    " StrictHostKeyChecking = no", "StrictHostKeyChecking=accept-new",
                                    'StrictHostKeyChecking "no"', "StrictHostKeyChecking='off'",
                                    'StrictHostKeyChecking n"o"', '"StrictHostKeyChecking"no',
                                    "= StrictHostKeyChecking no"])
def test_strangers_are_not_trusted(option):
    with pytest.raises(ConfigError, match="host keys are checked"):
        Ssh(options=(option,)).check()
    Ssh(options=("StrictHostKeyChecking=yes",)).check()


def test_without_ssh_its_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="openssh-client"):
        Ssh().check()


@pytest.mark.parametrize(("said", "kind", "words"), [
    ("No RSA host key is known for gpu1 and you have requested strict checking.\nHost key verification failed.",
     ConfigError, "not known here"),
    ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", ConfigError,
     "ssh-keygen -R"),
    ("me@gpu1: Permission denied (publickey,password).", ConfigError, "login refused .*publickey.*ssh-copy-id"),
    ("ssh: Could not resolve hostname gpu1: Name or service not known", ConfigError, "neither DNS"),
    ("ssh: connect to host gpu1 port 22: Connection timed out", PeerLostError, "not reached by ssh"),
    ("ssh: connect to host gpu1 port 22: No route to host", PeerLostError, "not reached by ssh"),
    ("/opt/python: No module named bpsfast", ConfigError, "not installed for /opt/python"),
    ("Usage: python -m bpsfast\nError: No such command 'agent'.", MismatchError, "older than"),
    ("something else\n", PeerLostError, r"exit code 255\): something else"),
    ("", PeerLostError, "no output"),
])
def test_what_a_complaint_means(said, kind, words):
    error = Ssh(python="/opt/python").explain(Host("gpu1"), 255, said.splitlines())
    assert type(error) is kind
    assert str(error).startswith("gpu1: ")
    with pytest.raises(kind, match=words):
        raise error


def test_an_interpreter_that_is_not_there():
    error = Ssh(python="/opt/python").explain(Host("gpu1"), 127, ["bash: line 1: /opt/python: No such file"])
    assert "cannot be run there (bash" in str(error) and "--remote-python" in str(error)


@pytest.mark.parametrize(("code", "said", "words"), [
    (126, "env: '/opt/python': Permission denied", r"/opt/python cannot be run there \(env"),
    (1, "git: Connection refused\nTraceback ...\nImportError: no libx", r"exit code 1\): ImportError: no libx"),
])
def test_what_runs_over_there_is_not_ssh(code, said, words):
    error = Ssh(python="/opt/python").explain(Host("gpu1"), code, said.splitlines())
    with pytest.raises(type(error), match=words):
        raise error


@pytest.mark.parametrize(("name", "code", "words"), [
    ("gpu1", 255, "ssh ended with exit code 255"), ("gpu1", -9, "ssh was killed by SIGKILL"),
    ("gpu1", 1, "its agent ended with exit code 1"), ("localhost", -9, "its agent was killed by SIGKILL"),
])
def test_an_agent_that_was_there_did_come_up(name, code, words):
    error = Ssh().lost(Host(name), code, ["bash: ~/.profile: Permission denied", "the last line", ""])
    assert isinstance(error, PeerLostError) and str(error) == f"{name}: {words}: the last line"


def test_what_to_type_has_the_options_of_the_user():
    found = Ssh(port=23, identity_file="/my key").by_hand(Host("gpu1"))
    assert shlex.split(found) == ["ssh", "-p", "23", "-i", "/my key", "gpu1", "true"]


def test_nothing_of_a_job_is_in_sshs_environment():
    assert ssh.environment({"BPSFAST_JOB_KEY": "x", "SSH_AUTH_SOCK": "/s", "HOME": "/h"}) == {
        "SSH_AUTH_SOCK": "/s", "HOME": "/h"}
