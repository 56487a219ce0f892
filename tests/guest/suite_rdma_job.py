"""Whole jobs over rdma: nodes on hosts of their own, bit for bit what tcp gives, and a steady state that costs writes.

Runs in the guest: node i and its rank on host i with the device rxe<i>, the scheduler and the helper on host 0.
"""
from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from bpsfast.base.exit_codes import ABORTED
from bpsfast.node.transport.rdma import rails
from tests.guest import spare_device
from tests.guest.training import (
    N_STEPS,
    SHAPES,
    push_in_other_ways,
    push_many_partitions,
    push_until_it_fails,
    push_until_it_goes_by_tcp,
    train,
)
from tests.guest.verbs_end import until
from tests.support import lossy_training
from tests.support.changing_units import editions
from tests.support.jobs import Job

PATIENCE = {"start_timeout_s": 300, "timeout_s": 120, "lease_s": 60, "helper_lease_s": 0, "heartbeat_s": 5}


class HostedJob(Job):
    """A job whose machines are hosts of the guest; emulated processes take their time."""

    def _start(self, command: Any, values: dict[str, Any]) -> None:
        role, _, number = command.name.partition(" ")
        host = int(number) if role == "node" else self._hosts[int(number)] if role == "rank" else 0
        environ = {**command.environ, "BPSFAST_SCHEDULER": "10.9.1.1:7700", "BPSFAST_NODE_HOST": f"10.9.1.{host + 1}",
                   "BPSFAST_RDMA_DEVICES": f"=rxe{host}", **self.more.get(command.name, {})}
        super()._start(msgspec.structs.replace(command, argv=("on", str(host), *command.argv), environ=environ), values)

    def __init__(self, more: dict[str, dict[str, str]] | None = None, **values: Any) -> None:
        self.more = more or {}
        self._hosts = [node for node, n_ranks in enumerate(values["ranks"]) for _ in range(n_ranks)]
        super().__init__(attach=False, **PATIENCE | values)
        try:
            self.call("init", timeout_s=300)
        except BaseException:
            self.kill()
            raise
        self._attached = True

    def close(self) -> None:
        try:
            self.call("shutdown", timeout_s=100)
            for pipe in self._pipes:
                pipe.close()
            alive = [self.ranks[rank] for rank in self.remaining]
            codes = [process.wait(100) for process in (*alive, *self.daemons.values())]
        finally:
            self.kill()
        assert not any(codes), f"exit codes after an orderly end: {codes}"


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the kernel once for all nodes: in the guest that takes a minute."""
    subprocess.run([sys.executable, "-c", "from bpsfast import kernels; kernels.address('float32')"], check=True,
                   timeout=300)


@contextlib.contextmanager
def running(*arguments: Any, **values: Any) -> Iterator[HostedJob]:
    job = HostedJob(*arguments, **values)
    try:
        yield job
    finally:
        job.kill()


@contextlib.contextmanager
def errors_into(path: Path) -> Iterator[None]:
    """Have what is started meanwhile write its standard error there, and show it afterwards."""
    before = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        sys.stderr.write(path.read_text())


class Training(NamedTuple):
    """What each rank returned, and what all processes said."""

    found: list[dict[str, Any]]
    said: str


@pytest.fixture(scope="module")
def over_tcp(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training with transport=auto of two nodes, one of which names a device that is not there."""
    path = tmp_path_factory.mktemp("tcp") / "said"
    more = {"node 1": {"BPSFAST_RDMA_DEVICES": f"={spare_device.NAME}", "BPSFAST_LOG_LEVEL": "INFO"}}
    with errors_into(path), running(more, ranks=(1, 1), transport="auto") as job:
        found = job.run(train, timeout_s=200)
        job.close()
    return Training(found, path.read_text())


def wires(counters: dict[str, int], name: str) -> int:
    return sum(value for key, value in counters.items() if key.startswith("wire_") and key.endswith("_" + name))


def steady(found: dict[str, Any]) -> dict[str, int]:
    """Check what every training over rdma has in common; return by how much the counters grew."""
    before, after = found["before"], found["after"]
    grown = {name: after[name] - before[name] for name in after}
    # per step and partition a node sends one write: the partial to the owner, or the result to the other rank
    assert grown["dispatch_partitions"] > 0 and grown["dispatch_partitions"] % N_STEPS == 0
    assert wires(grown, "writes_sent") == wires(grown, "writes_received") == grown["dispatch_partitions"]
    nbytes = N_STEPS * sum(4 * int(np.prod(shape)) for shape in SHAPES)
    assert nbytes <= wires(grown, "bytes_sent") < nbytes * 1.05  # with what pads fused tensors
    assert grown["rdma_registrations"] == wires(grown, "address_exchanges") == 0
    assert grown["engine_allocations"] == grown["memory_segments"] == 0
    return grown


@pytest.mark.timeout(900)
def test_auto_goes_by_tcp_where_a_device_is_gone_and_says_so(over_tcp):
    for index, found in enumerate(over_tcp.found):
        assert found["after"][f"transport_{1 - index}"] == 2
    name = spare_device.NAME
    words = f"is reached by tcp, not by rdma: rdma_devices='={name}': ={name} matches nothing here"
    assert words in over_tcp.said, over_tcp.said


@pytest.mark.timeout(900)
def test_training_over_rdma_is_bit_identical_to_tcp_and_costs_one_write_per_partition_and_hop(over_tcp):
    with running(ranks=(1, 1), helpers=1, transport="rdma") as job:
        over_rdma = job.run(train, timeout_s=200)
        job.close()
    for rank in (0, 1):
        assert over_rdma[rank]["parameters"] == over_rdma[0]["parameters"] == over_tcp.found[rank]["parameters"]
    assert any(any(parameter) for parameter in over_rdma[0]["parameters"])
    for index, found in enumerate(over_rdma):
        steady(found)
        after = found["after"]
        assert [after[f"transport_{peer}"] for peer in (1 - index, 2)] == [3, 3]
        # no copy: a stream sends from registered memory only, and that is the segments which ranks and engine use
        assert after["rdma_registrations"] == after["registrations"] and after["rdma_rails"] == 1
        assert after["rdma_locked_nbytes"] == after["memory_segments"]


_COMPILES = """
from bpsfast.compression import topk
from bpsfast.kernels import stores
from bpsfast.kernels.codecs import codec_kernels
codec_kernels.addresses(topk(0.01, error_feedback=True), "float32")
stores.address("float32")
"""


@pytest.mark.timeout(900)
def test_compressed_tensors_rows_and_kept_weights_are_those_of_tcp():
    subprocess.run([sys.executable, "-c", _COMPILES], check=True, timeout=300)
    found = []
    for transport in ("rdma", "tcp"):
        with running(ranks=(1, 1), helpers=1, transport=transport) as job:
            found.append(job.run(push_in_other_ways, timeout_s=200))
            job.close()
    over_rdma, over_tcp = found
    assert over_rdma[0] == over_rdma[1] == over_tcp[0] == over_tcp[1]
    kept = np.frombuffer(over_rdma[0][-1], "f4")
    assert (kept == sum(2 * step + 1 for step in range(4))).all()


@pytest.mark.timeout(900)
def test_two_rails_of_two_queue_pairs_give_the_same_until_a_node_dies_in_the_middle_of_writes(over_tcp):
    more = {f"node {index}": {"BPSFAST_RDMA_DEVICES": "rxe0,rxe1"} for index in (0, 1)}
    with running(more, ranks=(1, 1), transport="rdma", rdma_queue_pairs=2) as job:
        for index, found in enumerate(job.run(train, timeout_s=200)):
            assert found["parameters"] == over_tcp.found[0]["parameters"]
            steady(found)
            assert found["after"]["rdma_rails"] == 2 and found["after"][f"wire_{1 - index}_queue_pairs"] == 4
        sent = packets("rxe1")
        job.begin(push_until_it_fails, 10_000)
        until(lambda: packets("rxe1") > sent + 500, 200)
        job.kill_daemon("node 1")
        outcome = job.outcomes(timeout_s=100, only=(0,))[0]
        assert outcome.error == "PeerLostError" and "node 1" in outcome.text, outcome
        assert job.daemons["node 0"].wait(60) == ABORTED


@contextlib.contextmanager
def card_of_its_own(transport: str, **values: Any) -> Iterator[tuple[HostedJob, str]]:
    """A job whose node 1 uses a device that may vanish; yield it with the device's name."""
    more = {f"node {index}": {"BPSFAST_LOG_LEVEL": "DEBUG"} for index in (0, 1)}
    more["node 1"]["BPSFAST_RDMA_DEVICES"] = f"={spare_device.NAME}"
    with spare_device.spare_device(mtu=4200, address="10.9.0.9/24") as name, \
            running(more, ranks=(1, 1), transport=transport, **values) as job:
        assert [found[f"transport_{1 - index}"] for index, found in enumerate(job.call("counters"))] == [3, 3]
        yield job, name


@contextlib.contextmanager
def pulled_out(job: HostedJob) -> Iterator[None]:
    """Pull the card out; the kernel lets that end when nobody uses the device, which has to be so afterwards."""
    process = subprocess.Popen(spare_device.PULL_OUT)
    try:
        yield
        assert process.wait(60) == 0
    except BaseException:
        show_where_all_are(job)
        raise
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel lets go of it when the job ends
            process.wait(1)


def show_where_all_are(job: HostedJob) -> None:
    """Say what the kernel knows of the job's threads, the cards and their queue pairs."""
    for role, process in job.daemons.items():
        for task in sorted(Path(f"/proc/{process.pid}/task").glob("*")):
            with contextlib.suppress(OSError):
                calls = " < ".join(line.split()[-1] for line in (task / "stack").read_text().splitlines())
                print(role, task.name, (task / "comm").read_text().strip(), calls)
    for counter in sorted(Path("/sys/class/infiniband").glob("*/ports/1/hw_counters/*")):
        with contextlib.suppress(OSError):
            print(counter.parts[4], counter.name, counter.read_text().strip())
    for command in ("rdma resource show qp", "ip -brief link", "dmesg | tail -40"):
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20, check=False)
            print(command, done.stdout, done.stderr, sep="\n")


@pytest.mark.timeout(600)
def test_explicit_rdma_ends_in_words_when_a_card_is_pulled_out_under_writes():
    with card_of_its_own("rdma") as (job, name):
        job.begin(push_until_it_fails, 10_000)
        until(lambda: packets(name) > 500, 200)  # the first push loads the kernels
        with pulled_out(job):
            outcomes = job.outcomes(timeout_s=100)
            assert {outcome.error for outcome in outcomes} == {"PeerLostError"}, outcomes
            # whoever noticed first says it: the node that lost its card, or the other one, whose writes go unanswered
            assert all(f"over {name}/1 failed" in outcome.text
                       or "its data connection ended (RDMA WRITE" in outcome.text for outcome in outcomes), outcomes
            assert [job.daemons[f"node {index}"].wait(60) for index in (0, 1)] == [ABORTED, ABORTED]


@pytest.mark.timeout(900)
def test_auto_goes_on_by_tcp_when_a_card_is_pulled_out_under_writes_and_every_sum_is_right(tmp_path):
    said = tmp_path / "said"
    with errors_into(said), card_of_its_own("auto", partition_bytes=1 << 18) as (job, name):
        job.begin(push_until_it_goes_by_tcp, 200.0)
        until(lambda: packets(name) > 1500, 200)
        with pulled_out(job):  # nobody uses the device any more, although the job goes on
            outcomes = job.outcomes(timeout_s=250)
            assert not any(outcome.error for outcome in outcomes), outcomes
        for index, outcome in enumerate(outcomes):
            after = outcome.value["after"]
            assert after[f"transport_{1 - index}"] == 2, after
            assert ("rdma_rails" in after) is (index == 0), "the other card may be of use again"
        # memory and parts that come after the reconnect
        job.run(train, timeout_s=200)
        job.close()
    assert said.read_text().count("is reached by tcp from now on, not by rdma: ") == 2


@pytest.mark.timeout(900)
def test_the_job_goes_on_by_rdma_when_a_helper_is_lost_and_every_sum_is_right(tmp_path):
    """A new owner's slots are bound in the middle of training: they expect its round, not the first."""
    machines, path = ((0,), (1,)), tmp_path / "step"
    with running(ranks=(1, 1), helpers=1, transport="rdma", placement="ps") as job:
        job.begin(lossy_training.train, machines, 0, 14, str(path))
        lossy_training.until_step(path, 5, 300)
        job.lose("helper 0")
        assert [outcome.text or outcome.value for outcome in job.outcomes(400)] == [[], []]
        assert [recoveries for recoveries, _ in job.run(lossy_training.counts, timeout_s=100)] == [1, 1]
        job.close()


@pytest.mark.timeout(900)
def test_the_job_goes_on_by_rdma_without_a_lost_rank_and_every_average_is_right(tmp_path):
    """Partials with the input of the lost rank, and results of them, are written once more into the same slots."""
    path = tmp_path / "step"
    with running(ranks=(2, 1), transport="rdma", partition_bytes=65536, on_worker_loss="continue") as job:
        job.begin(lossy_training.train_without_lost, ((0, 1), (2,)), 0, 14, str(path))
        lossy_training.until_step(path, 5, 300)
        job.lose_ranks(1)
        outcomes = job.outcomes(400)
        assert [outcome.text or outcome.value[0] for outcome in outcomes] == [[], []]
        assert outcomes[0].value[1:] == outcomes[1].value[1:] and outcomes[0].value[1][-1] == (0, 2)
        job.close()


@pytest.mark.timeout(900)
def test_many_times_more_partitions_than_receive_requests_go_over_one_queue_pair():
    n = 4 * rails.RECEIVES + 100  # two nodes: each is written to in all of them, partials or results
    with running(ranks=(1, 1), transport="rdma", partition_bytes=4096, fusion_bytes=0) as job:
        for index, found in enumerate(job.run(push_many_partitions, n, 4096, timeout_s=400)):
            assert [after[f"transport_{1 - index}"] for after in found] == [3, 3, 3]
        job.close()


def packets(device: str) -> int:
    """Return how many packets the device has sent since it was made."""
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts").read_text())


@pytest.mark.timeout(900)
def test_what_is_retired_makes_room_for_the_next():
    with running(ranks=(1, 1), helpers=1, transport="rdma", placement="ps") as job:
        for wrong, counts in job.run(editions, 10, True, timeout_s=400):
            assert not wrong
            assert len(set(counts[5:])) == 1, counts
        job.close()
