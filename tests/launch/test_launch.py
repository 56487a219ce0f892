"""Tests `bpsfast run` and `bpsfast dmlc`: their processes, the environments of these, and the end of a real job."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from bpsfast.base.settings import Settings, load_with_origins
from bpsfast.launch import local_job as launch
from bpsfast.launch.processes import Kind
from bpsfast.launch.roles import detect
from bpsfast.orchestration.errors import ConfigError

_BPSFAST = [sys.executable, "-m", "bpsfast"]
_SHOW = """
import os
print(*(os.environ.get(name) for name in ('BPSFAST_RANK', 'BPSFAST_LOCAL_RANK', 'BPSFAST_NODE_ID', 'OMP_NUM_THREADS')))
"""


def bpsfast(*arguments: str, timeout_s: float = 60.0, **variables: str) -> subprocess.CompletedProcess:
    """Run the command line in a clean environment."""
    environ = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(
        [*_BPSFAST, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False, env=environ
    )


@given(n_ranks=st.integers(1, 40), n_nodes=st.integers(1, 40))
def test_ranks_are_spread_evenly(n_ranks, n_nodes):
    if n_nodes > n_ranks:
        with pytest.raises(ConfigError, match="cannot be spread"):
            launch.shape_of(n_ranks, n_nodes, 0)
        return
    ranks = launch.shape_of(n_ranks, n_nodes, 0).ranks
    assert sum(ranks) == n_ranks and len(ranks) == n_nodes
    assert max(ranks) - min(ranks) <= 1 and list(ranks) == sorted(ranks, reverse=True)


def test_ranks_can_be_given_node_by_node():
    shape = launch.shape_of(1, 1, 2, "2,3")
    assert shape.ranks == (2, 3)
    assert shape.machines == ["node0", "node1", "helper0", "helper1"]


@pytest.mark.parametrize("text", ["", "0,1", "2,", "two", "-1"])
def test_ranks_that_are_no_list_of_counts_are_an_error(text):
    with pytest.raises(ConfigError, match="--ranks"):
        launch.shape_of(1, 1, 0, text)


def test_every_process_of_the_plan_knows_its_place():
    shape = launch.shape_of(5, 2, 1)
    commands = launch.plan(
        shape,
        ["train"],
        Settings(partition_bytes=8192),
        {"HOME": "/h", "RANK": "9", "DMLC_ROLE": "worker"},
        ("127.0.0.1", 77),
        "ab" * 32,
    )
    assert [c.name for c in commands] == ["scheduler", "node 0", "node 1", "helper 0", *(f"rank {i}" for i in range(5))]
    for command in commands:
        settings = load_with_origins({}, command.environ)[0]
        assert (settings.scheduler, settings.job_key, settings.num_nodes) == ("127.0.0.1:77", "ab" * 32, 2)
        assert (settings.num_helpers, settings.size, settings.partition_bytes) == (1, 5, 8192)
        assert command.environ["HOME"] == "/h" and "DMLC_ROLE" not in command.environ
        assert ("RANK" in command.environ) == (command.kind is Kind.RANK), "those of another job are gone"
        assert "ab" * 32 not in " ".join(command.argv), "command lines are public"
    nodes = [load_with_origins({}, c.environ)[0] for c in commands[1:4]]
    assert [(n.node_id, n.node_index, n.local_size) for n in nodes] == [
        ("node0 of 127.0.0.1:77", 0, 3),
        ("node1 of 127.0.0.1:77", 1, 2),
        ("helper0 of 127.0.0.1:77", 2, 0),
    ]
    places = [detect(load_with_origins({}, c.environ)[0], c.environ) for c in commands if c.kind is Kind.RANK]
    assert [(p.rank, p.local_rank, p.local_size, p.node_id) for p in places] == [
        (0, 0, 3, "node0 of 127.0.0.1:77"),
        (1, 1, 3, "node0 of 127.0.0.1:77"),
        (2, 2, 3, "node0 of 127.0.0.1:77"),
        (3, 0, 2, "node1 of 127.0.0.1:77"),
        (4, 1, 2, "node1 of 127.0.0.1:77"),
    ]
    assert not any(p.starts_node or p.starts_scheduler for p in places)


def test_ranks_have_torchruns_variables_too():
    environ = {"NODE_RANK": "7", "MASTER_PORT": "1"}
    commands = launch.plan(launch.shape_of(0, 0, 1, "1,2"), ["train"], Settings(), environ, ("10.0.0.1", 77), "ab" * 32,
                           master_port=99)
    ours = ("BPSFAST_", "OMP_", "PYTHON")
    torchs = [{name: value for name, value in command.environ.items() if not name.startswith(ours)}
              for command in commands]
    common = {"WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"}
    assert torchs == [{}] * 4 + [
        common | {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": n_local, "GROUP_RANK": node, "NODE_RANK": node}
        for rank, local, n_local, node in (("0", "0", "1", "0"), ("1", "0", "2", "1"), ("2", "1", "2", "1"))]


#: Knows nothing of bpsfast.
_GLOO = """
import os, pathlib, time, torch, torch.distributed as dist
for turn in range(2):
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    print("of", dist.get_world_size(), "local", os.environ["LOCAL_RANK"], "sum", total.item(), flush=True)
    dist.destroy_process_group()
    # wait until rank 0 has closed this turn's store, so that the other rank does not connect to it again
    gone = pathlib.Path(FOLDER, str(turn))
    gone.mkdir(exist_ok=True)
    (gone / os.environ["RANK"]).touch()
    while len(list(gone.iterdir())) < 2:
        time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [("-np", "2"), ("--ranks", "1,1"), ("-H", f"{socket.gethostname()}:1,localhost:1")])
def test_a_program_of_torch_distributed_runs_unchanged(options, tmp_path):
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = bpsfast("run", *options, "--", sys.executable, "-c", _GLOO.replace("FOLDER", repr(str(tmp_path))),
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]), RANK="5", WORLD_SIZE="9")
    assert done.returncode == 0, done.stderr
    locals_ = ["0", "0"] if "--ranks" in options else ["0", "1"]
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == sorted(
        f"of 2 local {local} sum 3.0" for local in locals_ * 2)
    assert "no rank has joined the job (bpsfast.init): ending scheduler, node 0" in done.stderr
    assert "still running" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_program_may_take_its_time_before_it_joins():
    text = "import bpsfast, time; time.sleep(12); bpsfast.init(); print(bpsfast.size()); bpsfast.shutdown()"
    done = bpsfast("run", "--ranks", "1,1", "--helpers", "1", "--", sys.executable, "-c", text,
                   BPSFAST_START_TIMEOUT_S="10")
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["[rank 0] 2", "[rank 1] 2"], done.stderr


def test_an_interface_that_is_none_is_refused():
    done = bpsfast("run", "-n", "2", "--set", "interface=none0", "--", "true")
    assert done.returncode == 2 and "interface='none0' has no address here" in done.stderr \
        and "Traceback" not in done.stderr


def test_threads_are_shared_unless_the_user_says_otherwise():
    def threads(environ):
        plan = launch.plan(launch.shape_of(64, 1, 0), ["train"], Settings(), environ, ("127.0.0.1", 77), "ab" * 32)
        return plan[-1].environ["OMP_NUM_THREADS"]

    assert threads({}) == str(max(1, len(os.sched_getaffinity(0)) // 64))
    assert threads({"OMP_NUM_THREADS": "7"}) == "7"


def test_dry_run_prints_commands_to_start_by_hand():
    done = bpsfast(
        "run", "-n", "2", "--helpers", "1", "--set", "tcp-streams=3", "--dry-run", "--", "python", "train.py", "-n", "7"
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert re.fullmatch("export BPSFAST_JOB_KEY=[0-9a-f]{64}", lines[0]), "one key for all terminals"
    assert [line for line in lines if line.startswith("#")] == [
        "# scheduler",
        "# node 0",
        "# helper 0",
        "# rank 0",
        "# rank 1",
    ]
    assert "BPSFAST_TCP_STREAMS=3" in lines[2] and "-m bpsfast scheduler" in lines[2]
    assert lines[-1].endswith("python train.py -n 7") and "BPSFAST_RANK=1" in lines[-1]


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_script_without_python_is_told_so(tmp_path, more):
    script = tmp_path / "train.py"
    script.write_text("print('not executable')")
    with pytest.raises(ConfigError, match=rf"python {script} --epochs 3$"):
        if more:
            launch.dry_run(launch.shape_of(2, 1, 0), [str(script), "--epochs", "3"], Settings(), print)
        else:
            launch.run(launch.shape_of(2, 1, 0), [str(script), "--epochs", "3"], Settings())


@pytest.mark.slow
def test_a_job_ends_with_the_code_of_the_rank_that_failed():
    text = f"{_SHOW}\nimport sys, os, time\nif os.environ['BPSFAST_RANK'] == '1': sys.exit(3)\ntime.sleep(600)"
    done = bpsfast(
        "run", "-n", "3", "--nodes", "2", "--timeout", "50", "--", sys.executable, "-c", text, OMP_NUM_THREADS="5"
    )
    assert done.returncode == 3, done.stderr
    lines = [re.sub(r" of 127.0.0.1:\d+", "", line) for line in done.stdout.splitlines() if line.startswith("[rank")]
    assert set(lines) == {"[rank 0] 0 0 node0 5", "[rank 1] 1 1 node0 5", "[rank 2] 2 0 node1 5"}
    assert "rank 1 failed first: it ended with exit code 3" in done.stderr


_RANK_1_FAILS = """
import numpy as np, bpsfast
bpsfast.init()
while True:
    bpsfast.push_pull(np.ones(10), name="x")
    if bpsfast.rank() == 1:
        raise ValueError("a bug in the trainer")
"""


@pytest.mark.slow
def test_one_mistake_is_shown_once_and_its_cause_last(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(_RANK_1_FAILS)
    done = bpsfast("run", "--ranks", "2,1", "--helpers", "1", "--timeout", "50", "--", sys.executable, str(path))
    assert done.returncode == 1, done.stderr
    before, _, last = done.stderr.partition("[bpsfast run] rank 1 failed first")
    summary, others = last.splitlines()
    assert summary == ": it ended with exit code 1: ValueError: a bug in the trainer"
    assert "ranks 0, 2 ended because of that" in others
    assert before.count("Traceback") == before.count("a bug in the trainer\n") == 1, "of rank 1; what follows is folded"
    assert all(line.startswith("[rank 1] ") for line in before.splitlines()) and len(before.splitlines()) <= 5, before


@pytest.mark.slow
def test_the_variables_of_another_launcher_do_not_reach_the_ranks():
    done = bpsfast(
        "run",
        "--",
        sys.executable,
        "-c",
        "import os; print(os.environ['RANK'], os.environ.get('BYTEPS_LOCAL_RANK')); raise SystemExit(9)",
        RANK="4",
        BPSFAST_RANK="7",
        BYTEPS_LOCAL_RANK="3",
    )
    assert done.returncode == 9, done.stderr
    assert "[rank 0] 0 None" in done.stdout


@pytest.mark.slow
@pytest.mark.root
def test_a_job_in_network_namespaces_sees_its_own_interface():
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    text = (
        "import os; print(*map(os.environ.get, ('BPSFAST_NODE_HOST', 'MASTER_ADDR', 'MASTER_PORT')),\n"
        "                 open('/proc/net/dev').read().count('eth0:'))\n"
        "raise SystemExit(9)"
    )
    done = bpsfast("run", "-n", "2", "--nodes", "2", "--netns", "--rate", "1gbit", "--", sys.executable, "-c", text)
    assert done.returncode == 9, done.stderr
    lines = {line for line in done.stdout.splitlines() if line.startswith("[rank")}
    assert lines and lines <= {f"[rank {i}] 10.77.0.{i + 1} 10.77.0.1 29500 1" for i in range(2)}


def test_a_job_says_at_its_start_what_its_placement_promises():
    program = "import bpsfast; bpsfast.init(); bpsfast.shutdown()"

    def said(*options):
        done = bpsfast("run", *options, "--set", "log_level=INFO", "--", sys.executable, "-c", program)
        assert done.returncode == 0, done.stderr
        text = done.stdout + done.stderr
        return text.count("2 nodes with ranks, 1 helper; a step of M bytes takes at least 1.000 M/B"), text

    job = ("-n", "2", "--nodes", "2", "--helpers", "1")
    n_lines, text = said(*job, "--set", "transport=tcp")
    assert n_lines == 1 and text.count("WARNING: helpers cannot help two nodes with ranks") == 1
    n_lines, text = said(*job)
    assert n_lines == 1 and "WARNING" not in text, "on one host no NIC is in the way"


_LOCAL = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_WORKER_ID": "0"}


def test_dmlc_worker_starts_the_machines_ranks():
    text = (
        "from os import environ as e\nprint(e['BYTEPS_LOCAL_RANK'], e['BYTEPS_LOCAL_SIZE'], len(e['BPSFAST_JOB_KEY']))"
    )
    done = bpsfast("dmlc", "--", sys.executable, "-c", text, DMLC_ROLE="worker", NVIDIA_VISIBLE_DEVICES="0,1", **_LOCAL)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"[worker 0 local rank 0] 0 2 64", "[worker 0 local rank 1] 1 2 64"}


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_dmlc_local_job_needs_no_other_roles(role):
    done = bpsfast(DMLC_ROLE=role, **_LOCAL)
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stderr


@pytest.mark.parametrize(
    "variables, text",
    [
        ({"DMLC_ROLE": "worker", **_LOCAL}, "expected the program"),
        ({"DMLC_ROLE": "joint", **_LOCAL}, "joint"),
        ({}, "DMLC_ROLE"),
        ({"DMLC_ROLE": "server", "DMLC_NUM_WORKER": "2"}, "DMLC_PS_ROOT_URI"),
    ],
)
def test_dmlc_without_what_it_needs_says_what(variables, text):
    done = bpsfast("dmlc", **variables)
    assert done.returncode == 2
    assert text in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_dmlc_scheduler_serves_until_it_is_told_to_end():
    environ = {
        "PATH": os.environ["PATH"],
        "DMLC_ROLE": "scheduler",
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "0",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "BPSFAST_LOG_LEVEL": "INFO",
    }
    from bpsfast.launch.daemons import reserve_port

    with reserve_port("127.0.0.1") as reserved:
        environ["DMLC_PS_ROOT_PORT"] = str(reserved.getsockname()[1])
        with subprocess.Popen(_BPSFAST, env=environ, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr.readline(), "it says something first"
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
            assert process.returncode not in (0, None)
