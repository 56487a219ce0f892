"""Quota: which CPUs a node keeps to, and that all its threads do; what it leaves to others."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import msgspec
import numpy as np
import pytest

import bpsfast
from bpsfast.hardware.sysfs import Tree
from bpsfast.node import cpu_quota
from bpsfast.orchestration.errors import ConfigError

#: Starts a thread before and one after, and tells what every thread is kept to.
_PROCESS = """
import json, os, threading
from bpsfast.node import cpu_quota
from bpsfast.base.settings import load_with_origins
end = threading.Event()
threading.Thread(target=end.wait).start()
settings = cpu_quota.take(load_with_origins(json.loads(os.environ["GIVEN"]), {})[0])
threading.Thread(target=end.wait).start()
threads = [int(name) for name in os.listdir("/proc/self/task")]
print(json.dumps({
    "cpus": [sorted(os.sched_getaffinity(each)) for each in threads],
    "policies": [os.sched_getscheduler(each) for each in threads],
    "nice": [os.getpriority(os.PRIO_PROCESS, each) for each in threads],
    "engine_threads": settings.engine_threads, "awake_us": settings.awake_us}))
end.set()
"""


def tree(root, allowed="0-7", nodes=("0-3", "4-7"), siblings=()):
    """Write what is read of a machine: *nodes* are its NUMA nodes' CPUs, *siblings* the CPUs of each core."""
    def write(path, text):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")

    write("proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{allowed}")
    for number, cpus in enumerate(nodes):
        write(f"sys/devices/system/node/node{number}/cpulist", cpus)
    for core in siblings:
        for cpu in core:
            write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", ",".join(map(str, core)))
    return Tree(root)


def idle(*shares):
    return dict(enumerate(shares))


def test_the_idlest_cpus_of_one_numa_node_are_taken(tmp_path):
    machine = tree(tmp_path)
    shares = idle(1.0, 0.2, 0.2, 0.2, 0.1, 0.9, 0.8, 0.1)
    assert cpu_quota.choose(machine, 1, idle=shares) == {0}
    assert cpu_quota.choose(machine, 2, idle=shares) == {5, 6}, "0 and 5 are idler, but of two nodes"
    assert len(cpu_quota.choose(machine, 6, idle=shares)) == 6, "no node has so many"
    assert cpu_quota.choose(machine, 2, idle=idle(*[1.0] * 8)) == {0, 1}, "equally idle: always the same ones"
    assert cpu_quota.choose(machine, 2, idle=idle(0.98, 0.97, 1.0, 0.99, 1, 1, 1, 1)) == {0, 1}, "noise decides nothing"


def test_a_cpu_is_as_idle_as_the_busiest_of_its_core(tmp_path):
    machine = tree(tmp_path, allowed="0-3", nodes=("0-3",), siblings=[(0, 2), (1, 3)])
    assert cpu_quota.choose(machine, 2, idle=idle(1.0, 0.8, 0.0, 0.8)) == {1, 3}


def test_only_cpus_that_the_process_may_use_and_that_were_named(tmp_path):
    machine = tree(tmp_path, allowed="2-5")
    assert cpu_quota.choose(machine, 2, idle=idle(1, 1, 0, 0, 1, 1, 1, 1)) == {4, 5}
    assert cpu_quota.choose(machine, 2, "3,5", idle=idle(*[1.0] * 8)) == {3, 5}
    assert cpu_quota.choose(machine, 1, "3-5", idle=idle(1, 1, 1, 0.5, 0.1, 0.9, 1, 1)) == {5}
    with pytest.raises(ConfigError, match=r"BPSFAST_CORES = 5, but this process may use 2-5 .*4 of 5"):
        cpu_quota.choose(machine, 5)
    with pytest.raises(ConfigError, match=r"of CPUs 5-7 it may run on 5\): 1 of 2"):
        cpu_quota.choose(machine, 2, "5-7")
    with pytest.raises(ConfigError, match=r"of CPUs 6 it may run on none"):
        cpu_quota.choose(machine, 1, "6")


def test_idle_shares_are_those_of_the_time_watched(tmp_path):
    (tmp_path / "proc").mkdir()
    stat = tmp_path / "proc/stat"
    stat.write_text("cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 100 0 0 100 0 0 0 0 0 0\ncpu1 0 0 0 50 0 0 0 0 0 0\nintr 5\n")

    class Later(Tree):
        reads = 0

        def text(self, *parts):
            self.reads += 1
            if self.reads == 2:
                stat.write_text("cpu0 107 0 1 101 1 0 0 0 0 0\ncpu1 0 0 0 50 0 0 0 0 0 0\n")
            return super().text(*parts)

    assert cpu_quota.idle_shares(Later(tmp_path), 0.0) == {0: pytest.approx(0.2), 1: 1.0}
    real = cpu_quota.idle_shares(Tree(), 0.05)
    assert set(real) >= os.sched_getaffinity(0) and all(0.0 <= share <= 1.0 for share in real.values())


def taken(**given):
    """Return what a process that has taken this quota says of its threads."""
    done = subprocess.run([sys.executable, "-c", _PROCESS], env=os.environ | {"GIVEN": json.dumps(given)},
                          capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def test_every_thread_keeps_to_the_cpus_and_yields():
    said = taken(cores=1, nice=True)
    assert len(said["cpus"]) >= 3
    assert {len(cpus) for cpus in said["cpus"]} == {1} and len({cpus[0] for cpus in said["cpus"]}) == 1
    assert set(said["policies"]) == {os.SCHED_IDLE} and set(said["nice"]) == {19}
    assert (said["engine_threads"], said["awake_us"]) == (1, 0)


def test_without_a_quota_nothing_changes():
    said = taken()
    assert {tuple(cpus) for cpus in said["cpus"]} == {tuple(sorted(os.sched_getaffinity(0)))}
    assert set(said["policies"]) == {os.sched_getscheduler(0)}
    assert (said["engine_threads"], said["awake_us"]) == (0, 50)
    assert taken(cores=1, engine_threads=3)["engine_threads"] == 3, "what was asked for counts"


def job_with_quota(options, *arguments, **values):
    """A job whose helper is started by hand, with these options."""
    from tests.support.jobs import Job  # ranks load this file as well, and know no other tests

    class JobWithQuota(Job):
        def _start(self, command, values):
            if command.name == "helper 0":
                argv = [sys.executable, "-m", "bpsfast", "node", "--helper", *options.split()]
                environ = {name: value for name, value in command.environ.items() if name != "BPSFAST_LOCAL_SIZE"}
                command = msgspec.structs.replace(command, argv=argv, environ=environ)
            super()._start(command, values)

    return JobWithQuota(*arguments, **values)


def push_more_than_the_helper_holds():
    sums = bpsfast.push_pull(np.full(1 << 20, bpsfast.rank() + 1.0, np.float32), average=False, name="small")
    with pytest.raises(bpsfast.CapacityError) as refused:
        bpsfast.push_pull(np.ones(1 << 23, np.float32), name="large")
    again = bpsfast.push_pull(np.full(1 << 20, 2.0, np.float32), average=False, name="small")
    return float(sums[0]), str(refused.value), float(again[-1])


@pytest.mark.slow
def test_a_helper_on_spare_cores_keeps_its_quota_in_a_real_job():
    job = job_with_quota("--cores 1 --nic-rate 4 --max-bytes 24M --nice", (1, 1), 1, "tcp", placement="ps", nic_rate=10)
    try:
        for first, refused, last in job.run(push_more_than_the_helper_holds):
            assert (first, last) == (3.0, 4.0)
            assert re.search(r"helper 0 \(node 2, host .*\) cannot prepare generation 2: .* needs \d+ more bytes, but "
                             r"BPSFAST_MAX_BYTES=25165824 leaves \d+ \(segments hold \d+\): raise it", refused), refused
        pid = job.daemons["helper 0"].pid
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        assert len(threads) > 8, "engine, dispatcher, two for each of four connections"
        cpus = {cpu for thread in threads for cpu in os.sched_getaffinity(thread)}
        assert len(cpus) == 1 and {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_IDLE}
        job.close()
    finally:
        job.kill()


def push_twice():
    sums = [bpsfast.push_pull(np.full(1 << 22, bpsfast.rank() + 1.0, np.float32), average=False, name=name)
            for name in ("first", "second")]
    return [float(each[i]) for each in sums for i in (0, -1)]


def test_the_placement_gives_a_helper_what_its_memory_holds(capfd):
    job = job_with_quota("--max-bytes 24M", (1, 1, 1), 1, "tcp", partition_bytes=1 << 18)
    try:
        assert job.run(push_twice) == [[6.0] * 4] * 3  # by shares it would have to own more than it can hold
        job.close()
    finally:
        job.kill()
    said = re.findall(r"node 0.*a step takes (.*) times .*: helper 0 \(node 3, .*\) may use too little memory",
                      capfd.readouterr().err)
    assert len(said) == 1 and 1.0 < float(said[0]) < 1.5
