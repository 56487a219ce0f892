"""A helper is lost in the middle of training: the job goes on, and every sum has the bits of one that lost nobody."""
from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time

import msgspec
import numpy as np
import pytest

import bpsfast
from bpsfast.base.exit_codes import LEFT_BEHIND
from tests.support.jobs import Job
from tests.support.lossy_training import counts, say_step, train, until_step

pytestmark = pytest.mark.matrix

#: Ranks of each machine, as the job has them.
SHAPES = {(1, 1): ((0,), (1,)), (2, 1): ((0, 1), (2,)), (1, 1, 1): ((0,), (1,), (2,))}


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop *process*; return once all its threads have stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


@pytest.mark.parametrize("placement", ["optimal", "ps"])
@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 1, 1)], ids=str)
def test_the_job_goes_on_without_its_helpers(job, tmp_path, shape, transport, placement):
    machines, path = SHAPES[shape], tmp_path / "step"
    started = job(shape, helpers=2, transport=transport, placement=placement, partition_bytes=65536)
    started.begin(train, machines, 0, 60, str(path))
    until_step(path, 15)
    started.lose("helper 1")
    until_step(path, 40)
    started.lose("helper 0")
    assert [outcome.text or outcome.value for outcome in started.outcomes(60)] == [[]] * sum(shape)
    assert [recoveries for recoveries, _ in started.run(counts)] == [2] * sum(shape)


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_two_helpers_are_lost_at_once(job, tmp_path, transport):
    machines, path = SHAPES[1, 1, 1], tmp_path / "step"
    started = job((1, 1, 1), helpers=3, transport=transport, placement="ps", partition_bytes=65536)
    started.begin(train, machines, 0, 40, str(path))
    until_step(path, 12)
    started.lose("helper 0", "helper 2")
    assert [outcome.text or outcome.value for outcome in started.outcomes(60)] == [[]] * 3


@pytest.mark.parametrize("values", [{"lease_s": 60.0}, {"lease_s": 2.0, "heartbeat_s": 0.5, "helper_lease_s": 0}],
                         ids=["helper_lease_s", "lease_s"])
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_a_helper_that_hangs_is_left_behind_after_its_lease(job, tmp_path, transport, values):
    """It goes on later, in the middle of a sum maybe: by then nothing of it reaches anybody."""
    machines, path = SHAPES[1, 1], tmp_path / "step"
    started = job((1, 1), helpers=1, transport=transport, placement="ps", partition_bytes=65536, **values)
    started.begin(train, machines, 0, 40, str(path))
    until_step(path, 12)
    helper = started.daemons.pop("helper 0")
    stop(helper)
    assert [outcome.text or outcome.value for outcome in started.outcomes(60)] == [[]] * 2
    helper.send_signal(signal.SIGCONT)
    assert helper.wait(20) == (LEFT_BEHIND if transport == "tcp" else -signal.SIGKILL)
    assert started.run(train, machines, 40, 45) == [[]] * 2


def test_a_helper_that_hangs_for_less_than_its_lease_is_kept(job, tmp_path):
    machines, path = SHAPES[1, 1], tmp_path / "step"
    started = job((1, 1), helpers=1, transport="tcp", placement="ps", partition_bytes=65536, helper_lease_s=8.0)
    started.begin(train, machines, 0, 40, str(path))
    until_step(path, 12)
    stop(started.daemons["helper 0"])
    before = int(path.read_text())
    time.sleep(0.5)  # that is how long it hangs
    assert int(path.read_text()) <= before + 1, "the helper sums although it is stopped"
    started.daemons["helper 0"].send_signal(signal.SIGCONT)
    assert [outcome.text or outcome.value for outcome in started.outcomes(60)] == [[]] * 2
    assert [recoveries for recoveries, _ in started.run(counts)] == [0, 0]


def test_new_tensors_are_declared_while_a_helper_is_lost(job):
    started = job((1, 1), helpers=2, transport="tcp", placement="ps", partition_bytes=65536)
    started.begin(declare_one_after_the_other, 60)
    started.lose("helper 0")
    assert [outcome.text or outcome.value for outcome in started.outcomes(60)] == [[]] * 2
    assert [recoveries for recoveries, _ in started.run(counts)] == [1, 1]


def declare_one_after_the_other(n: int) -> list[int]:
    """Push *n* tensors, each of which nobody has seen before; return those whose sum is wrong."""
    wrong = []
    for i in range(n):
        found = bpsfast.push_pull(np.full(40_000, bpsfast.rank() + i, np.float32), name=f"t{i}", average=False)
        if not (found == 2 * i + 1).all():
            wrong.append(i)
    return wrong


@pytest.mark.parametrize("codec", ["onebit", "topk"])
def test_compressed_tensors_go_on_at_another_helper_and_end_in_words_without_one(job, codec):
    started = job((1, 1), helpers=2, transport="tcp", placement="ps", partition_bytes=65536)
    undisturbed = job((1, 1), helpers=2, transport="tcp", placement="ps", partition_bytes=65536)
    assert started.run(compressed_rounds, codec, 0, 10) == undisturbed.run(compressed_rounds, codec, 0, 10)
    started.begin(compressed_rounds, codec, 10, 60)
    started.lose("helper 1")
    found = [outcome.text or outcome.value for outcome in started.outcomes(60)]
    assert found == undisturbed.run(compressed_rounds, codec, 10, 60)
    started.kill_daemon("helper 0")
    texts = [outcome.text for outcome in started.attempt(compressed_rounds, codec, 60, 70)]
    assert all("it is compressed, and no helper is left" in text for text in texts), texts
    started.kill()


def compressed_rounds(kind: str, begin: int, end: int) -> str:
    """Return a digest of all sums of a compressed tensor."""
    digest = hashlib.sha256()
    codec = bpsfast.compression.onebit() if kind == "onebit" else bpsfast.compression.topk(0.01)
    for step in range(begin, end):
        mine = np.random.default_rng((bpsfast.rank(), step)).standard_normal(200_000, dtype=np.float32)
        digest.update(bpsfast.push_pull(mine, name="c", compression=codec))
    return digest.hexdigest()


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_rows_go_on_at_another_owner(job, tmp_path, transport):
    started = job((1, 1), helpers=2, transport=transport, placement="ps", partition_bytes=65536)
    started.begin(push_rows, 150, str(tmp_path / "step"))
    until_step(tmp_path / "step", 30)
    started.lose("helper 0")
    assert [outcome.text or outcome.value for outcome in started.outcomes(60)] == [[]] * 2


def push_rows(n: int, path: str) -> list[int]:
    """Push rows of a table in *n* steps; return the steps whose sums are wrong."""
    wrong = []
    for step in range(n):
        say_step(path, step)
        indices = (np.arange(300) * 7 + step) % 50_000
        values = np.full((300, 16), bpsfast.rank() + step, np.float32)
        found, sums = bpsfast.push_pull_rows(indices, values, 50_000, name="rows", average=False)
        if not ((np.sort(indices) == found).all() and (sums == 2 * step + 1).all()):
            wrong.append(step)
    return wrong


class LittleRoom(Job):
    """A job whose node 1 has memory for inputs and results of 2 MiB, and for no slots."""

    def _start(self, command, values):
        limit = {"BPSFAST_MAX_BYTES": str(7 << 20)} if command.name == "node 1" else {}
        super()._start(msgspec.structs.replace(command, environ={**command.environ, **limit}), values)


def slots() -> int:
    """How many bytes the node of this rank has for what others push to it."""
    return bpsfast.stats().counters.get("memory_slot", 0)


def test_a_node_without_memory_for_its_share_of_what_was_lost_leaves_it_to_others(tmp_path):
    path, started = tmp_path / "step", LittleRoom((1, 1, 1), helpers=1, transport="tcp", placement="ps",
                                                  partition_bytes=65536)
    try:
        # Between two rounds, when all have the last result: what only node 1 has, no other one could own.
        assert started.run(train, SHAPES[1, 1, 1], 0, 30, str(path)) == [[], [], []]
        started.lose("helper 0")
        assert started.run(train, SHAPES[1, 1, 1], 30, 60, str(path)) == [[], [], []]
        assert [recoveries for recoveries, _ in started.run(counts)] == [1, 1, 1]
        assert [nbytes > 0 for nbytes in started.run(slots)] == [True, False, True]
        started.close()
    finally:
        started.kill()
