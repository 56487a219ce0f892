"""A stranger who knows everything of a job but its key: under no launcher it joins, reads the key, or is let in later.

It has another machine (a network namespace), the variables of rank 0 without BPSFAST_JOB_KEY, and the keys that can be
derived from them; of jobs that meet through a store also the store. The job trains until the stranger has been refused.
"""
from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bpsfast.base.settings import load_with_origins
from bpsfast.launch import roles
from bpsfast.launch.namespaces import Cluster
from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.host_lookup import format_address
from tests.end_to_end.test_environments import clean, hosts_file
from tests.support import recorded_environment

_TIMEOUT_S = 90.0
_SEVERAL = [name for name in recorded_environment.names() if len(recorded_environment.read(name).machines) > 1]
_as_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

#: Trains until the file exists that is its argument, and prints whether all sums were right.
TRAINS = """
import os, sys, numpy as np, bpsfast
bpsfast.init()
size, right = bpsfast.size(), True
while True:
    own = np.array([float(bpsfast.rank()), float(os.path.exists(sys.argv[1]))], np.float32)
    total, n_stopped = bpsfast.push_pull(own, average=False, name="x").tolist()
    right &= total == size * (size - 1) / 2
    print("step", flush=True)
    if n_stopped == size:
        break
print("right" if right else "wrong", flush=True)
bpsfast.shutdown()
"""
_BY_STORE = """
import os, sys, torch, torch.distributed as dist
import bpsfast.torch.backend
dist.init_process_group("bpsfast")
size, right = dist.get_world_size(), True
while True:
    own = torch.tensor([float(dist.get_rank()), float(os.path.exists(sys.argv[1]))])
    dist.all_reduce(own)
    right &= own[0].item() == size * (size - 1) / 2
    print("step", flush=True)
    if own[1].item() == size:
        break
print("right" if right else "wrong", flush=True)
dist.destroy_process_group()
"""
#: Tries every key that it can derive at the scheduler's address until each connection is ended by the other side.
STRANGER = """
import json, os, sys, time
from bpsfast.launch import roles
from bpsfast.base.job_key import machine_secret
from bpsfast.orchestration import messages, security
from bpsfast.orchestration.scheduler_client import SchedulerClient
from bpsfast.base.settings import load_with_origins

address = sys.argv[1]
texts = sys.argv[2:]  # what else it has found, such as the contents of a store
keys = [security.job_key(None, f"bpsfast|{address}"), security.prove(machine_secret(), "bpsfast job key", address)]
keys += [bytes.fromhex(text) for text in texts]
keys += [security.prove(key, "store", text) for key in list(keys) for text in texts]
for key in keys:
    host, _, port = address.rpartition(":")
    member = SchedulerClient(host, int(port), key, now=time.monotonic(), start_timeout_s=20.0)
    member.send(messages.Join(version=messages.VERSION, package="", host="x", pid=1, index=-1, ranks=(),
                              server_processes=0, address="x:1", shm_name="", nic_rate_bytes=0.0, settings={}))
    deadline = time.monotonic() + 20.0
    while member._n_connected < 3:  # it connects anew each time that it was sent away
        heard = member.recv_nowait(time.monotonic())
        if heard:
            sys.exit(f"heard {heard}")
        if time.monotonic() > deadline:
            sys.exit("was neither let in nor sent away")
        member.sockets[1].poll(20)
        member._read_monitor()
    if member._was_secure:
        sys.exit("was let in")
    member.close(0.0)
print("refused", len(keys))
"""


def keyless(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name != "BPSFAST_JOB_KEY"}


@pytest.mark.parametrize("name", _SEVERAL)
def test_without_a_key_no_rank_of_several_machines_has_a_place(name):
    for rank in recorded_environment.read(name).ranks:
        environ = keyless(rank.environ)
        if name == "indexed_job":  # here is no pod's hosts file, which tells the domain
            environ["HOSTNAME"] += ".service.svc"
        with pytest.raises(ConfigError, match=r"there is no job key.*BPSFAST_JOB_KEY.*openssl rand -hex 32"):
            roles.detect(load_with_origins({}, environ)[0], environ)


class Job:
    """Ranks with variables of their own, each on a machine of *cluster*, and a stranger on one that is called *far*."""

    def __init__(self, cluster: Cluster, stack: contextlib.ExitStack, folder: Path, far: str) -> None:
        self._cluster, self._stack, self._folder, self._far = cluster, stack, folder, far
        self._started: list[subprocess.Popen] = []

    def start(self, machine: int, command: list[str], environ: dict[str, str]) -> subprocess.Popen:
        started = self._stack.enter_context(self._cluster[f"m{machine}"].popen(
            command, clean(environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        self._stack.callback(lambda: started.poll() is None and started.kill())
        self._started.append(started)
        return started

    def outlives(self, stranger: list[str], environ: dict[str, str]) -> str:
        """Let *stranger*, a command, run once the job trains; end the job and check its sums. Return what it said."""
        trains = [each for each in self._started if "step" in (each.stdout or [""]).readline()]
        assert len(trains) == len(self._started)
        own = self._cluster[self._far].popen(
            stranger, clean(environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = own.communicate(timeout=_TIMEOUT_S)
        assert own.returncode == 0, out + err
        (self._folder / "stop").touch()
        for each in self._started:
            out_of, err_of = each.communicate(timeout=_TIMEOUT_S)
            assert each.returncode == 0 and out_of.split()[-1] == "right", err_of
        return out


def _scheduler(environ: dict[str, str], cluster: Cluster, numbers: dict[str, int]) -> str:
    """Return where the scheduler of the rank with *environ* listens, as other machines reach it."""
    host, port = roles.detect(load_with_origins({}, environ)[0], environ).scheduler
    return format_address(cluster[f"m{numbers[host]}"].address if host in numbers else host, port)


@pytest.mark.slow
@pytest.mark.root
@_as_root
@pytest.mark.parametrize("name", _SEVERAL)
def test_a_stranger_with_all_variables_but_the_key_is_refused(name, tmp_path):
    recorded = recorded_environment.read(name)
    numbers = {alias: number for machine, number in recorded.machines.items()
               for alias in (machine, machine.partition(".")[0])}
    with Cluster(max(numbers.values()) + 2) as cluster, contextlib.ExitStack() as stack:
        addresses = [machine.address for machine in cluster]
        job = Job(cluster, stack, tmp_path, f"m{max(numbers.values()) + 1}")
        for rank in recorded.ranks:
            hosts = hosts_file(tmp_path, recorded, addresses, rank.machine)
            environ = rank.environ
            if name == "indexed_job":
                environ = environ | {"HOSTNAME": next(full for full, each in recorded.machines.items()
                                                      if each == rank.machine)}
            job.start(rank.machine, ["sh", "-c", f"mount --bind {hosts} /etc/hosts && exec \"$@\"", "sh",
                                     sys.executable, "-c", TRAINS, str(tmp_path / "stop")], environ)
            if rank is recorded.ranks[0]:
                address = _scheduler(environ, cluster, numbers)
        assert job.outlives([sys.executable, "-c", STRANGER, address], {}) == "refused 2\n"


@pytest.mark.slow
@pytest.mark.root
@_as_root
def test_a_stranger_beside_byteps_style_roles_is_refused(tmp_path):
    with Cluster(3) as cluster, contextlib.ExitStack() as stack:
        common = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": cluster["m0"].address,
                  "DMLC_PS_ROOT_PORT": "9000", "BPSFAST_JOB_KEY": recorded_environment.KEY}
        job = Job(cluster, stack, tmp_path, "m2")
        dmlc = [sys.executable, "-m", "bpsfast", "dmlc"]
        others = [stack.enter_context(cluster["m0"].popen(
            dmlc, clean(common | {"DMLC_ROLE": role}), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
            for role in ("scheduler", "server")]
        for each in others:
            stack.callback(lambda each=each: each.poll() is None and each.kill())
        for number in range(2):
            job.start(number, [sys.executable, "-c", TRAINS, str(tmp_path / "stop")],
                      common | {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(number), "BYTEPS_LOCAL_RANK": "0",
                                "BYTEPS_LOCAL_SIZE": "1"})
        address = f"{cluster['m0'].address}:9000"
        assert job.outlives([sys.executable, "-c", STRANGER, address], {}) == "refused 2\n"
        for each in others:
            assert each.wait(_TIMEOUT_S) == 0, each.stderr.read()


#: Reads all that ranks leave in torch's store, and prints every hexadecimal word of it that may be a key or a nonce.
_READS_STORE = """
import datetime, re, sys, torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=datetime.timedelta(seconds=20))
names = [f"default_pg/0//cpu//bpsfast/1/{name}" for name in ("table", "rank/0", "rank/1")]
if hasattr(store, "list_keys"):  # since torch 2.8
    names = [name for name in store.list_keys() if "joined" not in name]
text = "".join(store.get(name).decode() for name in names if store.check([name]))
print("read", text)
"""


@pytest.mark.slow
@pytest.mark.root
@_as_root
def test_a_stranger_who_reads_the_store_of_a_process_group_is_refused(tmp_path):
    """MASTER_PORT is open to everybody, as torch has it."""
    pytest.importorskip("torch")
    with Cluster(3) as cluster, contextlib.ExitStack() as stack:
        job = Job(cluster, stack, tmp_path, "m2")
        common = {"MASTER_ADDR": cluster["m0"].address, "MASTER_PORT": "29500", "WORLD_SIZE": "2",
                  "BPSFAST_JOB_KEY": recorded_environment.KEY}
        for rank in range(2):
            job.start(rank, [sys.executable, "-c", _BY_STORE, str(tmp_path / "stop")],
                      common | {"RANK": str(rank)})
        reads = [sys.executable, "-c", _READS_STORE, cluster["m0"].address, "29500"]
        script = f"""
import re, subprocess, sys
text = subprocess.run({reads!r}, capture_output=True, text=True, check=True).stdout
address = re.search(r'"scheduler":"([^"]+)"', text)[1]
words = sorted(set(re.findall(r'"((?:[0-9a-f][0-9a-f])+)"', text)))
assert {recorded_environment.KEY!r} not in text and words
print(len(words), flush=True)
sys.exit(subprocess.run([sys.executable, "-c", {STRANGER!r}, address, *[w for w in words if len(w) >= 32]]).returncode)
"""
        assert re.search(r"refused \d+", job.outlives([sys.executable, "-c", script], {}))


@pytest.mark.slow
@pytest.mark.root
@_as_root
def test_a_process_group_over_two_machines_without_a_key_ends_in_words(tmp_path):
    pytest.importorskip("torch")
    with Cluster(2) as cluster, contextlib.ExitStack() as stack:
        job = Job(cluster, stack, tmp_path, "m1")
        ranks = [job.start(rank, [sys.executable, "-c", _BY_STORE, str(tmp_path / "stop")],
                           {"MASTER_ADDR": cluster["m0"].address, "MASTER_PORT": "29500", "WORLD_SIZE": "2",
                            "RANK": str(rank)}) for rank in range(2)]
        for each in ranks:
            _, err = each.communicate(timeout=_TIMEOUT_S)
            assert each.returncode != 0 and "there is no job key" in err and "BPSFAST_JOB_KEY" in err, err
