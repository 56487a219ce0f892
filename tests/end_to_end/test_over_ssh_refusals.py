"""`bpsfast run -H` on hosts that cannot be used: nothing is started anywhere, and one error says why."""
from __future__ import annotations

import re
import sys

from tests.support import ssh_jobs
from tests.support.ssh_jobs import DIGEST, OVER_SSHD, is_empty

_MARK = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
pytestmark = OVER_SSHD
shared_hosts, hosts, trainer = ssh_jobs.shared_hosts, ssh_jobs.hosts, ssh_jobs.trainer


def refused(hosts, tmp_path, *options: str, code: int = 2, on: str = "gpu1,gpu2") -> str:
    """Return the one error of a job that must not start anywhere."""
    mark = tmp_path / "started"
    done = hosts.run("run", "-H", on, *options, "--", "python", "-c", _MARK, str(mark))
    assert done.returncode == code, done.stderr
    assert not mark.exists() and not done.stdout and "Traceback" not in done.stderr
    assert done.stderr.startswith("bpsfast: ") and is_empty(hosts)
    return done.stderr


def test_an_unknown_host_key(hosts, tmp_path):
    hosts.know(["gpu1"])
    text = refused(hosts, tmp_path)
    assert "ConfigError: gpu2: its host key is not known here" in text and "`ssh gpu2 true`" in text


def test_a_changed_host_key(hosts, tmp_path):
    hosts.know(["gpu1", "gpu2"], keys_of=["gpu1", "cpu1"])
    text = refused(hosts, tmp_path)
    assert "gpu2: its host key has changed" in text and "ssh-keygen -R gpu2" in text


def test_a_refused_login(hosts, tmp_path):
    stranger = str(hosts.folder / "stranger")
    hosts.configure()
    config = hosts.folder / "config"
    config.write_text(re.sub(r"  IdentityFile .*\n", "", config.read_text()))
    text = refused(hosts, tmp_path, "--identity-file", stranger)
    assert "2 of 2 hosts cannot be used:\n  gpu1: login refused" in text and "\n  gpu2: login refused" in text
    assert f"ssh -i {stranger} gpu1 true" in text


def test_an_identity_file_is_passed_on(hosts, trainer):
    config = hosts.folder / "config"
    config.write_text(re.sub(r"  IdentityFile .*\n", "", config.read_text()))
    done = hosts.run("run", "-H", "gpu1,gpu2", "--identity-file", str(hosts.folder / "user"), *trainer(DIGEST))
    assert done.returncode == 0, done.stderr


def test_a_host_that_is_down(hosts, tmp_path):
    hosts.stop_sshd("gpu2")
    try:
        text = refused(hosts, tmp_path, code=1)
    finally:
        hosts.start_sshd("gpu2")
    assert "PeerLostError: gpu2: not reached by ssh" in text and "Connection refused" in text


def test_another_port(hosts, trainer, tmp_path):
    for name in ("gpu1", "gpu2"):
        hosts.start_sshd(name, port=2222)
    try:
        text = refused(hosts, tmp_path, code=1)
        assert "Connection refused" in text
        hosts.configure("StrictHostKeyChecking yes", f"HostKeyAlias {hosts.cluster['gpu1'].address}")
        hosts.know(["gpu1", "gpu1"], keys_of=["gpu1", "gpu2"])
        done = hosts.run("run", "-H", "gpu1,gpu2", "--ssh-port", "2222", *trainer(DIGEST))
        assert done.returncode == 0, done.stderr
    finally:
        for name in ("gpu1", "gpu2"):
            hosts.start_sshd(name)


def test_a_name_that_nobody_knows(hosts, tmp_path):
    text = refused(hosts, tmp_path, on="gpu1,no-such-host.invalid")
    assert "no-such-host.invalid: " in text and "Could not resolve hostname" in text


def test_a_python_that_is_not_there(hosts, tmp_path):
    text = refused(hosts, tmp_path, "--remote-python", "/no/such/python")
    assert "gpu1: /no/such/python cannot be run there" in text and "--remote-python" in text


def test_a_python_without_bpsfast(hosts, tmp_path):
    bare = tmp_path / "bare"
    bare.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S \"$@\"\n")
    bare.chmod(0o755)
    text = refused(hosts, tmp_path, "--remote-python", str(bare))
    assert f"gpu1: bpsfast is not installed for {bare} there" in text


def test_another_version(hosts, tmp_path):
    older = tmp_path / "older"
    older.write_text(f"#!/bin/sh\nexec {sys.executable} -c \"from bpsfast.launch import remote_agent as remote\n"
                     "remote.__version__ = '0.0.9'\nremote.main()\"\n")
    older.chmod(0o755)
    text = refused(hosts, tmp_path, "--remote-python", str(older), code=1)
    assert "MismatchError" in text and "gpu1 has bpsfast 0.0.9" in text


def test_a_version_without_an_agent(hosts, tmp_path):
    oldest = tmp_path / "oldest"
    oldest.write_text("#!/bin/sh\necho \"Error: No such command 'agent'.\" >&2\nexit 2\n")
    oldest.chmod(0o755)
    text = refused(hosts, tmp_path, "--remote-python", str(oldest), code=1)
    assert "MismatchError" in text and "older than" in text


def test_a_folder_that_is_not_there(hosts, tmp_path):
    text = refused(hosts, tmp_path, "--remote-dir", "/no/such/folder")
    assert "gpu1: the working directory /no/such/folder cannot be entered" in text and "--remote-dir" in text


def test_a_scheduler_address_that_others_do_not_reach(hosts, tmp_path):
    text = refused(hosts, tmp_path, "--scheduler-host", "127.0.0.1")
    assert "no address of gpu1" in text and "from gpu2 127.0.0.1: " in text
