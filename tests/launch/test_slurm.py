"""Tests roles from Slurm's variables: tasks, the scheduler's address, contradictions. Jobs: test_environments."""
from __future__ import annotations

import pytest

from bpsfast.base.settings import load_with_origins
from bpsfast.launch.process_role import ProcessRole
from bpsfast.launch.roles import detect
from bpsfast.orchestration.errors import ConfigError

JOB = {"SLURM_JOB_ID": "100", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2,1(x2)"}
TASK = JOB | {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[2-3]", "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "n3", "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}
FIRST = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n2"}
ONE_NODE = TASK | FIRST | {"SLURM_STEP_NODELIST": "n2", "SLURM_STEP_TASKS_PER_NODE": "3"}
KEY = "ab" * 32
#: What a batch script sees, and salloc's shell where it is a step of Slurm's own
BATCH = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
INTERACTIVE = TASK | {"SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290"}


def place(environ: dict[str, str], **settings: object) -> ProcessRole:
    return detect(load_with_origins({"job_key": KEY} | settings, environ)[0], environ)


def test_a_task_is_a_rank_of_the_step_not_of_the_job():
    found = place(TASK)
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == ("slurm", 2, 3, 0, 1)
    assert (found.node_index, found.num_nodes, found.scheduler[0]) == (1, 2, "n2")
    assert found.starts_node and not found.starts_scheduler
    first = place(TASK | FIRST)
    assert first.starts_node and first.starts_scheduler and first.local_size == 2
    assert (first.scheduler, first.job_key) == (found.scheduler, found.job_key)
    assert not found.is_joined_once


def test_the_scheduler_is_on_the_first_node_wherever_task_0_is():
    """As with --distribution=arbitrary: task 0 is on the second node."""
    on_first = place(TASK | FIRST | {"SLURM_PROCID": "1"})
    on_second = place(TASK | {"SLURM_PROCID": "0"})
    assert on_first.starts_scheduler and not on_second.starts_scheduler


def test_jobs_and_steps_have_ports_of_their_own():
    ports = {place(TASK | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).scheduler[1]
             for job in range(1000, 1050) for step in range(20)}
    assert len(ports) == 1000 and min(ports) >= 20000 and max(ports) < 32768


def test_on_one_node_only_the_starter_must_know_the_port():
    first = place(ONE_NODE, job_key="")
    other = place(ONE_NODE | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, job_key="")
    assert first.scheduler == other.scheduler == ("127.0.0.1", 0) and first.job_key == other.job_key
    assert first.starts_scheduler and not other.starts_node
    assert place(ONE_NODE | {"SLURM_STEP_ID": "1"}, job_key="").job_key != first.job_key
    helped = place(ONE_NODE, num_helpers=1)
    assert helped.scheduler == place(TASK | FIRST).scheduler, "helpers must know where it is"


def test_a_scheduler_elsewhere_and_a_key_are_obeyed():
    found = place(TASK, scheduler="10.0.0.1:5", job_key="cd" * 32)
    assert found.scheduler == ("10.0.0.1", 5) and found.job_key == bytes.fromhex("cd" * 32)


def test_a_step_of_several_nodes_needs_a_key():
    with pytest.raises(ConfigError, match=r"no job key.*BPSFAST_JOB_KEY.*openssl rand -hex 32"):
        place(TASK, job_key="")


def test_jobs_with_one_key_on_one_host_do_not_meet():
    names = {place(TASK | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).node_id
             for job in ("100", "101") for step in ("0", "1")}
    assert len(names) == 4 and place(TASK, node_id="mine").node_id == "mine"


def test_older_names_will_do():
    old = {"SLURM_JOBID": "100", "SLURM_STEPID": "0", "SLURM_NODELIST": "n[2-3]", "SLURM_NPROCS": "3",
           "SLURM_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    assert place(old) == place(TASK)


@pytest.mark.parametrize("environ", [JOB, BATCH, INTERACTIVE, BATCH | {"SLURM_STEP_ID": "batch"}])
def test_what_is_no_task_runs_alone_and_is_told_so(environ, caplog, monkeypatch):
    found = place(environ)
    assert (found.launcher, found.size) == ("single", 1)
    assert "SLURM_NTASKS = 4" in caplog.text and "srun" in caplog.text


def test_one_task_in_a_batch_script_is_nothing_to_talk_of(caplog, monkeypatch):
    assert place(BATCH | {"SLURM_NTASKS": "1"}).launcher == "single"
    assert not caplog.records


@pytest.mark.parametrize(("changes", "texts"), [
    ({"SLURM_NODEID": ""}, ["SLURM_NODEID not", "srun sets them all"]),
    ({"SLURM_LOCALID": "", "SLURM_JOB_ID": ""}, ["SLURM_LOCALID, SLURM_JOB_ID not"]),
    ({"SLURM_PROCID": "3"}, ["SLURM_PROCID = 3", "SLURM_STEP_NUM_TASKS = 3"]),
    ({"SLURM_PROCID": "two"}, ["SLURM_PROCID = 'two'", "whole number"]),
    ({"SLURM_NODEID": "2"}, ["SLURM_NODEID = 2", "number of nodes = 2"]),
    ({"SLURM_LOCALID": "1"}, ["SLURM_LOCALID = 1", "tasks of n3 = 1"]),
    ({"SLURM_STEP_NODELIST": "n[2-"}, ["SLURM_STEP_NODELIST = n[2-", "not closed"]),
    ({"SLURM_STEP_TASKS_PER_NODE": "two"}, ["SLURM_STEP_TASKS_PER_NODE = two"]),
    ({"SLURM_STEP_NODELIST": ""}, ["contradict", "SLURM_JOB_NODELIST = n[1-3] are 3 nodes", "3 tasks on 2 nodes"]),
    ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ["contradict", "4 tasks on 2 nodes", "SLURM_STEP_NUM_TASKS = 3"]),
    ({"SLURMD_NODENAME": "n9"}, ["SLURM_NODEID = 1 of SLURM_STEP_NODELIST = n[2-3] is n3", "SLURMD_NODENAME = n9"]),
    ({"SLURM_JOB_ID": "x"}, ["SLURM_JOB_ID = 'x'"]),
])
def test_what_is_left_out_or_contradicts_itself_is_named(changes, texts):
    with pytest.raises(ConfigError) as caught:
        place(TASK | changes)
    assert all(text in str(caught.value) for text in texts), str(caught.value)
