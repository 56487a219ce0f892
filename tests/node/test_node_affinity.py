"""CPU affinity applied for real: jobs on this machine, which their nodes take for one with two sockets."""
from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

import bpsfast
from bpsfast.base.value_formats import parse_cpus

_NODE = str(Path(__file__).parents[1] / "support" / "recorded_node.py")
_CPUS = sorted(os.sched_getaffinity(0))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(len(_CPUS) < 2, reason="needs two CPUs")]


def two_sockets(root: Path) -> Path:
    """Write down a machine whose two sockets have one of our CPUs each, and whose card is at the second."""
    near, far = _CPUS[1], _CPUS[0]
    for path, text in {
            "proc/self/status": f"Cpus_allowed_list:\t{far},{near}",
            "sys/devices/system/node/node0/cpulist": str(far), "sys/devices/system/node/node1/cpulist": str(near),
            "sys/class/net/eth9/ifindex": "9", "sys/class/net/eth9/device/numa_node": "1",
            "answers.json": '{"addresses": {"eth9": ["127.0.0.1/8"]}}'}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


def seated_job(root: Path, *arguments, calls=(), **values):
    """A job whose nodes find the machine recorded below *root*; the kernel refuses *calls* to them."""
    from tests.support.jobs import Job  # ranks load this file as well, and know no other tests

    class SeatedJob(Job):
        def _start(self, command, values):
            if command.name.startswith(("node", "helper")):
                command = msgspec.structs.replace(command, argv=[sys.executable, _NODE, str(root), *calls])
            super()._start(command, values)

    return SeatedJob(*arguments, log_level="INFO", **values)


def threads_of(pid: int) -> set[frozenset[int]]:
    """What the kernel says each thread is kept to."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    assert len(texts) > 1
    return {parse_cpus(re.search(r"Cpus_allowed_list:\s*(.*)", text)[1]) for text in texts}


def sum_and_tell():
    """Sum, and return the sum's ends with the CPUs of every thread of the rank."""
    summed = bpsfast.push_pull(np.full(1 << 20, bpsfast.rank() + 1.0, np.float32), average=False, name="x")
    tasks = [int(name) for name in os.listdir("/proc/self/task")]
    return float(summed[0]), float(summed[-1]), {frozenset(os.sched_getaffinity(task)) for task in tasks}


def shutdown_and_tell():
    bpsfast.shutdown()
    return {frozenset(os.sched_getaffinity(int(name))) for name in os.listdir("/proc/self/task")}


def policies(pid: int) -> dict[str, set[str]]:
    """The memory policies of a process's segments by kind."""
    found: dict[str, set[str]] = {}
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if match := re.match(r"\S+ (\S+) file=/memfd:bpsfast-(\w+)", line):
            found.setdefault(match[2], set()).add(match[1])
    return found


def test_threads_run_where_the_plan_has_them_and_sums_are_right(tmp_path, capfd):
    far, near = (frozenset({cpu}) for cpu in _CPUS[:2])
    job = seated_job(two_sockets(tmp_path), (2, 2), transport="tcp")
    try:
        pids = [job.daemons[f"node {index}"].pid for index in range(2)]
        for number, (first, last, cpus) in enumerate(job.run(sum_and_tell)):
            assert (first, last) == (10.0, 10.0)
            assert cpus == {near if number % 2 else far}, "the second rank of each machine sits beside the card"
        for pid in pids:
            assert threads_of(pid) == {near}, "engine, service, control loop, a sender and a receiver for each stream"
            if Path(f"/proc/{pid}/numa_maps").exists():
                assert "prefer:0" in policies(pid)["input"], "of the first rank, while node 1 does not really exist"
        assert job.run(shutdown_and_tell) == [{frozenset(_CPUS)}] * 4, "let go with the job"
        job.close()
    finally:
        job.kill()
    said = capfd.readouterr().err
    assert len(re.findall(r"mbind\(MPOL_PREFERRED, node 1\) was refused: EINVAL .*\. Memory is placed by", said)) == 2
    assert len(re.findall(r"was refused", said)) == 2, "one warning in a process"
    assert re.search(rf"CPU affinity: this node on CPUs {_CPUS[1]}, its memory on NUMA node 1, beside eth9", said)
    assert re.search(rf"CPU affinity: local rank 0 on CPUs {_CPUS[0]}, its memory on NUMA node 0; local rank 1", said)


def test_a_kernel_that_refuses_everything_costs_one_warning(tmp_path, capfd):
    from tests.support.refused_calls import can_refuse

    if not can_refuse():
        pytest.skip("the numbers of this machine's system calls are not known here")
    job = seated_job(two_sockets(tmp_path), (2,), calls=("mbind", "sched_setaffinity"))
    try:
        assert [each[:2] for each in job.run(sum_and_tell)] == [(3.0, 3.0)] * 2
        assert threads_of(job.daemons["node 0"].pid) == {frozenset(_CPUS)}
        job.close()
    finally:
        job.kill()
    said = capfd.readouterr().err
    assert len(re.findall(r"was refused", said)) == 1
    assert re.search(r"sched_setaffinity\(CPUs \d\) was refused: EPERM .*--cap-add SYS_NICE.*BPSFAST_NUMA=0", said)


@pytest.mark.parametrize(("values", "node", "ranks"), [
    ({"numa": False}, {0, 1}, [{0, 1}, {0, 1}]),
    ({"rank_cpus": "1:0-1"}, {1}, [{1}, {0, 1}]),
    ({"avoid_cpus": "0"}, {1}, [{0, 1}, {0, 1}]),  # one core is left for two ranks
])
def test_settings(tmp_path, values, node, ranks):
    def real(cpus):
        return {_CPUS[number] for number in cpus}

    values = {name: re.sub(r"\d", lambda digit: str(_CPUS[int(digit[0])]), value) if isinstance(value, str) else value
              for name, value in values.items()}
    job = seated_job(two_sockets(tmp_path), (2,), **values)
    try:
        assert [each[2] for each in job.run(sum_and_tell)] == [{frozenset(real(cpus))} for cpus in ranks]
        assert threads_of(job.daemons["node 0"].pid) == {frozenset(real(node))}
        job.close()
    finally:
        job.kill()


def test_a_rank_that_binds_its_own_threads_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    job = seated_job(two_sockets(tmp_path), (2,))
    try:
        assert [each[2] for each in job.run(sum_and_tell)] == [{frozenset(_CPUS)}] * 2
        job.close()
    finally:
        job.kill()


def test_wishes_that_do_not_fit_end_the_job_with_what_is_wrong(tmp_path):
    job = seated_job(two_sockets(tmp_path), (2,), rank_cpus=str(_CPUS[0]), attach=False)
    try:
        for outcome in job.attempt(try_init):
            assert outcome.value[0] == "ConfigError" and "names the CPUs of 1 local ranks" in outcome.value[1]
    finally:
        job.kill()


def try_init():
    try:
        bpsfast.init()
    except bpsfast.BpsError as exc:
        return type(exc).__name__, str(exc)
