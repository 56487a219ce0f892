"""Tests roles from the variables of mpirun and horovodrun; whole jobs under them are in test_environments."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bpsfast.base.settings import load_with_origins
from bpsfast.launch.process_role import ProcessRole, scheduler_port
from bpsfast.launch.roles import detect
from bpsfast.orchestration.errors import ConfigError

NAMES = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                 "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Horovod": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
}
pytestmark = pytest.mark.parametrize("launcher", NAMES)


def environ(launcher: str, rank: int, size: int, local_rank: int, local_size: int, **more: str) -> dict[str, str]:
    return dict(zip(NAMES[launcher], map(str, (rank, size, local_rank, local_size)))) | more


def place(variables: dict[str, str], **settings: object) -> ProcessRole:
    return detect(load_with_origins(settings, variables)[0], variables)


KEY = "ab" * 32


def test_on_one_machine_everything_follows(launcher):
    first, other = (place(environ(launcher, rank, 3, rank, 3)) for rank in (0, 2))
    assert (first.launcher, first.rank, first.size, first.local_rank, first.local_size) == (launcher, 0, 3, 0, 3)
    assert first.starts_node and first.starts_scheduler and first.scheduler == ("127.0.0.1", 0)
    assert not other.starts_node and not other.starts_scheduler and not other.is_joined_once
    assert (first.num_nodes, other.num_nodes) == (1, 1) and first.job_key == other.job_key


_MPIRUN = """
import json, os, subprocess, sys
rank = [sys.executable, "-c", "import json, sys; from tests.launch.test_mpi import environ, place; "
        "print(place(environ(sys.argv[1], 0, 3, 0, 3)).job_key.hex())", sys.argv[1]]
for command in (rank, ["sh", "-c", '"$@"; true', "sh", *rank]):
    subprocess.run(command, env=os.environ | json.loads(sys.argv[2]), check=True)
"""


def test_another_job_of_the_same_machine_has_another_key(launcher):
    """Its ranks have another parent; a shell in between, which has the rank's variables, changes nothing."""
    command = [sys.executable, "-c", _MPIRUN, launcher, json.dumps(environ(launcher, 0, 3, 0, 3))]
    keys = [subprocess.run(command, env=os.environ | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True,
                           timeout=60, check=True).stdout.split() for _ in range(2)]
    assert keys[0][0] == keys[0][1] and keys[1][0] == keys[1][1] and keys[0] != keys[1]


_MPIRUN_OF_SCRIPTS = """
import ctypes, json, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: a rank whose script has ended becomes ours
read, write = os.pipe()
script = subprocess.Popen(["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", sys.argv[1], sys.argv[2], str(read)],
                          env=os.environ | json.loads(sys.argv[3]), pass_fds=[read])
script.wait()
os.close(write)  # it is gone, and its rank may go on
os.wait()
print(os.getpid())
"""
_RANK = """
import os, signal, sys
from bpsfast.launch import environments as mpi
look, script = mpi._has_variable, os.getppid()

def after_the_end(pid, name):
    if pid == script:
        os.kill(pid, signal.SIGKILL)
        os.read(int(sys.argv[2]), 1)
    return look(pid, name)

mpi._has_variable = after_the_end
print(mpi._launcher_process(sys.argv[1], "mpirun").split("|")[0], flush=True)
"""


def test_a_script_that_ends_meanwhile_is_no_ancestor_any_more(launcher):
    command = [sys.executable, "-c", _MPIRUN_OF_SCRIPTS, _RANK, NAMES[launcher][0],
               json.dumps(environ(launcher, 0, 3, 0, 3))]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found, mpirun = done.stdout.split()
    assert found == mpirun


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="pid namespaces need root")
def test_ranks_in_containers_of_their_own_are_told_what_to_give(launcher):
    program = ("from tests.launch.test_mpi import environ, place\n"
               f"print(place(environ({launcher!r}, 0, 2, 0, 2, BPSFAST_SCHEDULER='10.0.0.1:7'), "
               f"job_key={KEY!r}).scheduler)\n"
               f"place(environ({launcher!r}, 0, 2, 0, 2))")
    done = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program],
                          env=os.environ | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=60,
                          check=False)
    assert done.stdout.strip() == "('10.0.0.1', 7)"
    assert "ConfigError: the process that started this rank is not in its container" in done.stderr


@pytest.mark.parametrize(("variables", "address"), [
    ({"BPSFAST_SCHEDULER": "10.0.0.1:77"}, ("10.0.0.1", 77)),
    ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}, ("10.0.0.1", scheduler_port(1234))),
    ({"MASTER_ADDR": "10.0.0.1"}, ("10.0.0.1", scheduler_port(29500))),
    ({"BPSFAST_SCHEDULER": "10.0.0.1:77", "MASTER_ADDR": "10.0.0.2"}, ("10.0.0.1", 77)),
])
def test_on_several_the_address_is_given(launcher, variables, address):
    found = place(environ(launcher, 2, 4, 0, 2, **variables), job_key=KEY)
    assert found.scheduler == address and (found.num_nodes, found.node_index) == (-1, -1)
    assert found.starts_node and not found.starts_scheduler
    assert found.job_key == bytes.fromhex(KEY)
    with pytest.raises(ConfigError, match=r"no job key.*BPSFAST_JOB_KEY.*openssl rand -hex 32"):
        place(environ(launcher, 2, 4, 0, 2, **variables))


def test_on_several_without_an_address_the_error_says_what_to_type(launcher):
    with pytest.raises(ConfigError, match=r"rank 2 is one of 2 on this machine and of 4.*BPSFAST_SCHEDULER.*host:port"):
        place(environ(launcher, 2, 4, 0, 2))


def test_helpers_need_an_address_even_on_one_machine(launcher):
    with pytest.raises(ConfigError, match="BPSFAST_SCHEDULER"):
        place(environ(launcher, 0, 2, 0, 2), num_helpers=1)
    found = place(environ(launcher, 0, 2, 0, 2, MASTER_ADDR="10.0.0.1"), num_helpers=1, job_key=KEY)
    assert found.num_helpers == 1 and found.scheduler[0] == "10.0.0.1"


def test_a_master_addr_for_torch_does_no_harm_on_one_machine(launcher):
    assert place(environ(launcher, 0, 2, 0, 2, MASTER_ADDR="elsewhere")).scheduler == ("127.0.0.1", 0)


@pytest.mark.parametrize("dropped", range(4))
def test_half_a_set_is_named(launcher, dropped):
    variables = environ(launcher, 0, 2, 0, 2)
    del variables[NAMES[launcher][dropped]]
    if dropped in (0, 2):  # the marks
        assert NAMES[launcher][2 - dropped] in variables
    with pytest.raises(ConfigError, match=f"{NAMES[launcher][dropped]} not"):
        place(variables)


@pytest.mark.parametrize("numbers", [(2, 2, 0, 2), (0, 2, 2, 2), (-1, 2, 0, 2)])
def test_impossible_numbers_are_named(launcher, numbers):
    with pytest.raises(ConfigError, match=r"must be at least 0 and less than"):
        place(environ(launcher, *numbers))
    with pytest.raises(ConfigError, match="whole number"):
        place(environ(launcher, 0, 2, 0, 2) | {NAMES[launcher][0]: "first"})
