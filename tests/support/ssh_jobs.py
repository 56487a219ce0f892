"""Jobs over real sshds: their hosts, their program, and checks of processes that they leave behind.

A test module uses the fixtures by name: ``hosts, trainer = ssh_jobs.hosts, ssh_jobs.trainer``.
"""
from __future__ import annotations

import contextlib
import os
import re
import select
import textwrap
import time

import pytest

from tests.support import ssh_hosts
from tests.support.ssh_hosts import SshHosts

_LACKING = ssh_hosts.missing()
OVER_SSHD = [pytest.mark.root, pytest.mark.slow, pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))]

DIGEST = """
import hashlib, numpy as np, bpsfast
bpsfast.init()
random = np.random.default_rng(bpsfast.rank())
digest = hashlib.sha256()
for step in range(3):
    for name, n in ("small", 1000), ("large", 1_500_000):
        digest.update(bpsfast.push_pull(random.standard_normal(n, np.float32), name=name).tobytes())
bpsfast.shutdown()
print("digest", digest.hexdigest())
"""
WAIT = """
import subprocess, numpy as np, bpsfast
bpsfast.init()
subprocess.Popen(["sleep", "600"])
bpsfast.barrier()
print("waiting", flush=True)
while True:
    bpsfast.push_pull(np.ones(10), name="x")
"""


@pytest.fixture(scope="module")
def shared_hosts(tmp_path_factory):
    with SshHosts(["gpu1", "gpu2", "cpu1"], tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


@pytest.fixture
def hosts(shared_hosts):
    yield shared_hosts
    shared_hosts.know(shared_hosts.names)
    shared_hosts.configure()


@pytest.fixture
def trainer(tmp_path):
    def write(text: str) -> list[str]:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return ["--", "python", str(path)]

    return write


def digests(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\[(rank \d)\] digest (\w{64})$", text, re.M))


def is_empty(hosts: SshHosts, within_s: float = 10.0) -> bool:
    """Return whether no process is left on any host, after waiting for those that are ending."""
    deadline = time.monotonic() + within_s
    for pid in {pid for name in hosts.names for pid in hosts.pids(name)}:
        with contextlib.suppress(ProcessLookupError), open_pidfd(pid) as fd:
            select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
    return not any(hosts.pids(name) for name in hosts.names)


@contextlib.contextmanager
def open_pidfd(pid: int):
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)
