"""The same training under what each launcher sets: recorded variables, real processes, a network namespace a machine.

Names are those of the recording: each machine sees them in a hosts file of its own, where its own name is the loopback,
as Debian has it (in pods it is the pod's address).
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from bpsfast.base.reference_sum import reduce
from bpsfast.base.settings import load_with_origins
from bpsfast.launch import roles
from bpsfast.launch.namespaces import Cluster
from tests.support import recorded_environment

pytestmark = pytest.mark.matrix

_TIMEOUT_S = 90.0
_PROGRAM = """
import bpsfast, hashlib
from tests.end_to_end.test_environments import train
bpsfast.init()
weights = train(bpsfast.rank(), lambda gradient: bpsfast.push_pull(gradient, name="gradient"))
print(bpsfast.rank(), bpsfast.size(), hashlib.sha256(weights.tobytes()).hexdigest(), flush=True)
bpsfast.shutdown()
"""
#: The same, as a program of torch.distributed that knows nothing of the launcher.
_TORCH_PROGRAM = """
import torch, torch.distributed as dist, hashlib
import bpsfast.torch.backend
from tests.end_to_end.test_environments import train

def mean(gradient):
    found = torch.from_numpy(gradient.copy())
    dist.all_reduce(found, op=dist.ReduceOp.AVG)
    return found.numpy()

dist.init_process_group("bpsfast")
weights = train(dist.get_rank(), mean)
print(dist.get_rank(), dist.get_world_size(), hashlib.sha256(weights.tobytes()).hexdigest(), flush=True)
dist.destroy_process_group()
"""


def train(rank: int, mean: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the weights after some steps of linear regression on *rank*'s samples; *mean* of all ranks' gradients."""
    samples = np.random.default_rng(rank).standard_normal((64, 300), np.float32)
    weights = np.zeros(300, np.float32)
    for _ in range(6):
        error = samples @ weights - samples.sum(1)
        weights = weights - np.float32(0.05) * mean(samples.T @ error / np.float32(64))
    return weights


def expected(layout: list[list[int]]) -> str:
    """Return the digest of the same training in one process, ranks grouped into nodes as in *layout*."""
    from threading import Barrier, Thread

    size = sum(map(len, layout))
    gradients, sums, results = {}, {}, {}
    everybody = Barrier(size)

    def mean_on(rank: int, gradient: np.ndarray) -> np.ndarray:
        gradients[rank] = gradient
        if everybody.wait(30) == 0:
            sums["mean"] = reduce([[gradients[each] for each in node] for node in layout], average=True)
        everybody.wait(30)
        return sums["mean"]

    def run(rank: int) -> None:
        results[rank] = train(rank, lambda gradient: mean_on(rank, gradient))

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({weights.tobytes() for weights in results.values()}) == 1
    return hashlib.sha256(results[0].tobytes()).hexdigest()


def digests(outputs: Sequence[str]) -> list[list[str]]:
    return sorted(line.split() for output in outputs for line in output.splitlines())


def clean(variables: dict[str, str]) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1",
            "BPSFAST_START_TIMEOUT_S": "60", "BPSFAST_TIMEOUT_S": "60", **variables}


@pytest.mark.parametrize("name", recorded_environment.names())
def test_ranks_find_their_places(name):
    recorded = recorded_environment.read(name)
    if name == "indexed_job":  # here is no pod's hosts file, which tells the domain
        full = {number: machine for machine, number in recorded.machines.items()}
        recorded.ranks[:] = [each._replace(environ=each.environ | {"HOSTNAME": full[each.machine]})
                             for each in recorded.ranks]
    places = [roles.detect(load_with_origins({}, rank.environ)[0], rank.environ) for rank in recorded.ranks]
    assert [place.rank for place in places] == list(range(4)) and {place.size for place in places} == {4}
    assert len({place.job_key for place in places}) == 1 and len({place.scheduler for place in places}) == 1
    assert sum(place.starts_scheduler for place in places) == 1
    for index, ranks in enumerate(recorded.layout):
        assert [places[rank].local_rank for rank in ranks] == list(range(len(ranks)))
        assert {places[rank].local_size for rank in ranks} == {len(ranks)}
        assert {places[rank].node_index for rank in ranks} <= {index, -1}
        assert [places[rank].starts_node for rank in ranks] == [True] + [False] * (len(ranks) - 1)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize("program", [_PROGRAM, _TORCH_PROGRAM], ids=["bpsfast", "torch"])
@pytest.mark.parametrize("name", recorded_environment.names())
def test_the_same_script_trains_to_the_same_bits(name, program, tmp_path):
    recorded = recorded_environment.read(name)
    with Cluster(max(recorded.machines.values()) + 1) as cluster, contextlib.ExitStack() as stack:
        addresses = [machine.address for machine in cluster]
        hosts = {machine: hosts_file(tmp_path, recorded, addresses, machine) for machine in recorded.machines.values()}
        started = []
        for rank in reversed(recorded.ranks):
            command = ["sh", "-c", f"mount --bind {hosts[rank.machine]} /etc/hosts && exec \"$@\"", "sh",
                       sys.executable, "-c", program]
            started.append(stack.enter_context(cluster[f"m{rank.machine}"].popen(
                command, clean(rank.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)))
        outputs = [each.communicate(timeout=_TIMEOUT_S) for each in started]
    assert not any(each.returncode for each in started), [err for _, err in outputs]
    digest = expected(recorded.layout)
    assert digests([out for out, _ in outputs]) == [[str(rank), "4", digest] for rank in range(4)]


def hosts_file(folder: Path, recorded: recorded_environment.Recorded, addresses: list[str], own: int) -> Path:
    """Write the names that the machine *own* knows; return the file."""
    in_pods = "KUBERNETES_SERVICE_HOST" in recorded.ranks[0].environ
    lines = ["127.0.0.1 localhost"]
    for name, machine in recorded.machines.items():
        address = "127.0.1.1" if machine == own and not in_pods else addresses[machine]
        lines.append(f"{address} {name} {name.partition('.')[0]}")
    path = folder / f"hosts-{own}"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed (make mpi installs it as root)")
@pytest.mark.parametrize("program", [_PROGRAM, _TORCH_PROGRAM], ids=["bpsfast", "torch"])
def test_mpirun_itself(program, tmp_path):
    command = ["mpirun", "--oversubscribe", "-np", "3"] + ["--allow-run-as-root"] * (os.geteuid() == 0)
    script = tmp_path / "train.sh"  # the ranks' parent is a shell; mpirun mixes what they print, in the middle of lines
    script.write_text('"$@" > "$0.$OMPI_COMM_WORLD_RANK"\n')
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "BPSFAST_"))}
    done = subprocess.run([*command, "sh", str(script), sys.executable, "-c", program], env=environ | clean({}),
                          capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    printed = [Path(f"{script}.{rank}").read_text() for rank in range(3)]
    assert digests(printed) == [[str(rank), "3", expected([[0, 1, 2]])] for rank in range(3)]
