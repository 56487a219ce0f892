"""A rank of the bench between hosts, under `bpsfast run`: gloo's rendezvous. The rest is in `test_over_hosts`."""
from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

_PROGRAM = """
import errno, os, socket
import bpsfast
from bpsfast.bench.push_pull import host_rank
from bpsfast.bench.harness.peers import Gloo

def is_kept():
    with socket.socket() as sock:
        try:
            sock.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        except OSError as exc:
            return exc.errno == errno.EADDRINUSE
    return False

bpsfast.init()
with host_rank.rendezvous() as variables:
    os.environ.update(variables)
    kept = bpsfast.rank() != 0 or is_kept()
    bpsfast.barrier()
    gloo = Gloo()
print(kept, gloo.rank, bpsfast.rank(), flush=True)
gloo.close()
bpsfast.shutdown()
"""


def test_the_port_of_gloo_is_kept_until_it_listens():
    done = subprocess.run([sys.executable, "-m", "bpsfast", "run", "-n", "2", "--", sys.executable, "-c", _PROGRAM],
                          capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] True 0 0", "[rank 1] True 1 1"]
