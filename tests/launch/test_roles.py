"""Tests roles of processes: each row of the table in docs/design/launch.md, and each incomplete or double set."""

from __future__ import annotations

import pytest

from bpsfast.base.addresses import is_loopback
from bpsfast.base.job_key import job_key
from bpsfast.base.settings import load_with_origins, parse_address
from bpsfast.launch.process_role import ProcessRole, scheduler_port
from bpsfast.launch.roles import detect
from bpsfast.orchestration import security
from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.host_lookup import format_address

KEY = "ab" * 32
EXPLICIT = {
    "BPSFAST_RANK": "3",
    "BPSFAST_SIZE": "5",
    "BPSFAST_LOCAL_RANK": "1",
    "BPSFAST_LOCAL_SIZE": "2",
    "BPSFAST_SCHEDULER": "10.0.0.1:77",
    "BPSFAST_JOB_KEY": KEY,
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "5",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "BPSFAST_JOB_KEY": KEY,
}
DMLC = {
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "3",
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "1234",
    "BPSFAST_JOB_KEY": KEY,
}
WORKER = DMLC | {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": "1", "BYTEPS_LOCAL_RANK": "0", "BYTEPS_LOCAL_SIZE": "2"}
LOCAL = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "1",
    "DMLC_NUM_SERVER": "1",
    "DMLC_WORKER_ID": "0",
    "BYTEPS_LOCAL_RANK": "0",
    "BYTEPS_LOCAL_SIZE": "1",
}


def place(environ: dict[str, str], **overrides: object) -> ProcessRole:
    return detect(load_with_origins(overrides, environ)[0], environ)


def test_no_variables_are_a_single_process_that_starts_everything():
    found = place({})
    assert (found.launcher, found.rank, found.size, found.local_size, found.num_nodes) == ("single", 0, 1, 1, 1)
    assert found.starts_node and found.starts_scheduler and found.scheduler == ("127.0.0.1", 0)
    other = place({})
    assert other.job_key != found.job_key and other.node_id != found.node_id, "two processes are two jobs"


def test_explicit_variables_start_nothing():
    found = place(EXPLICIT | {"BPSFAST_NODE_ID": "n1", "BPSFAST_NUM_NODES": "3"})
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == ("bpsfast", 3, 5, 1, 2)
    assert (found.node_id, found.num_nodes, found.scheduler) == ("n1", 3, ("10.0.0.1", 77))
    assert not found.starts_node and not found.starts_scheduler
    assert found.job_key == bytes.fromhex(KEY)


def test_torchrun_local_rank_0_starts_the_node():
    found = place(TORCHRUN)
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == ("torchrun", 3, 5, 0, 2)
    assert (found.node_index, found.num_nodes, found.scheduler) == (1, 2, ("10.0.0.1", scheduler_port(29500)))
    assert found.starts_node and not found.starts_scheduler


def test_torchrun_rank_0_starts_the_scheduler_too():
    found = place(TORCHRUN | {"RANK": "0", "GROUP_RANK": "0"})
    assert found.starts_node and found.starts_scheduler


def test_torchrun_other_local_ranks_start_nothing():
    found = place(TORCHRUN | {"RANK": "4", "LOCAL_RANK": "1"})
    assert not found.starts_node and not found.starts_scheduler


def test_torchrun_jobs_of_neighbouring_ports_do_not_collide():
    ports = [scheduler_port(master_port) for master_port in range(65536)]
    assert min(ports) >= 20000 and max(ports) < 32768, "Linux takes ephemeral ports from 32768 on"
    assert all(port != master_port for master_port, port in enumerate(ports))
    for begin in range(0, 65536 - 8192, 1000):
        assert len(set(ports[begin : begin + 8192])) == 8192
    near = range(29400, 29600)
    assert not set(near) & {ports[master_port] for master_port in near}, "the default's neighbourhood"


def test_torchrun_on_one_machine_needs_no_key_and_listens_on_the_loopback_only():
    alone = TORCHRUN | {"LOCAL_WORLD_SIZE": "5", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "BPSFAST_JOB_KEY": ""}
    found = [place(alone | {"RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "3")]
    assert {each.scheduler for each in found} == {("127.0.0.1", 0)} and found[0].job_key == found[1].job_key
    assert [each.starts_scheduler for each in found] == [True, False]
    other = alone | {"MASTER_PORT": "29501"}
    assert place(other).job_key != place(alone).job_key
    for helpers in ("BPSFAST_NUM_HELPERS", "BPSFAST_MAX_HELPERS"):
        with pytest.raises(ConfigError, match="no job key"):
            place(alone | {helpers: "1"})
    with pytest.raises(ConfigError, match="no job key"):
        place(TORCHRUN | {"BPSFAST_JOB_KEY": ""})


def test_two_torchrun_jobs_of_one_machine_and_one_key_have_nodes_of_their_own():
    assert place(TORCHRUN).node_id != place(TORCHRUN | {"MASTER_PORT": "29501"}).node_id


def test_two_torchrun_agents_of_one_host_are_two_machines():
    assert place(TORCHRUN).node_id != place(TORCHRUN | {"GROUP_RANK": "0"}).node_id
    assert place(TORCHRUN | {"BPSFAST_NODE_ID": "mine"}).node_id == "mine"


def test_torchrun_with_the_scheduler_elsewhere():
    found = place(
        TORCHRUN | {"BPSFAST_SCHEDULER": "10.0.0.9:5", "MASTER_ADDR": "", "MASTER_PORT": "", "GROUP_WORLD_SIZE": ""}
    )
    assert found.scheduler == ("10.0.0.9", 5)
    assert found.num_nodes == 3, "5 ranks by 2"


def test_dmlc_worker_local_rank_0_starts_the_node():
    found = place(WORKER)
    assert (found.launcher, found.role, found.local_rank, found.local_size) == ("dmlc", "rank", 0, 2)
    assert (found.rank, found.size) == (-1, -1), "machines may differ in local size: the scheduler counts"
    assert (found.node_index, found.num_nodes, found.num_servers, found.scheduler) == (1, 2, 3, ("10.0.0.1", 1234))
    assert found.starts_node and not found.starts_scheduler
    assert not place(WORKER | {"BYTEPS_LOCAL_RANK": "1"}).starts_node


def test_dmlc_global_rank_is_obeyed():
    assert place(WORKER | {"BYTEPS_GLOBAL_RANK": "7"}).rank == 7


def test_dmlc_server_is_its_machines_node_or_a_helper():
    worker, server = place(WORKER), place(DMLC | {"DMLC_ROLE": "server"})
    assert (server.role, server.local_size, server.node_index) == ("server", -1, -1)
    assert (server.node_id, server.job_key) == (worker.node_id, worker.job_key), "they must find each other's socket"
    assert not server.starts_node


def test_two_jobs_on_one_machine_may_have_one_key():
    key = {"BPSFAST_JOB_KEY": "ab" * 32}
    for environ, scheduler in ((EXPLICIT, "BPSFAST_SCHEDULER"), (WORKER, "BPSFAST_SCHEDULER")):
        names = {place(environ | key | {scheduler: f"10.0.0.1:{port}"}).node_id for port in (1, 2)}
        assert len(names) == 2, "else ranks of one find the other's node"
    assert place(EXPLICIT | key | {"BPSFAST_NODE_ID": "mine"}).node_id == "mine"


def test_dmlc_scheduler():
    found = place(DMLC | {"DMLC_ROLE": "scheduler"})
    assert (found.role, found.num_nodes, found.num_servers, found.scheduler) == ("scheduler", 2, 3, ("10.0.0.1", 1234))


def test_dmlc_one_worker_machine_is_a_local_job():
    found = place(LOCAL)
    assert (found.rank, found.size, found.num_nodes, found.num_servers) == (0, 1, 1, -1)
    assert found.starts_node and found.starts_scheduler and found.scheduler == ("127.0.0.1", 0)


def test_dmlc_forced_distributed_needs_the_scheduler():
    with pytest.raises(ConfigError, match="DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT not"):
        place(LOCAL | {"BYTEPS_FORCE_DISTRIBUTED": "1"})


def test_dmlc_local_ranks_need_something_in_common():
    two = LOCAL | {"BYTEPS_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigError, match="BPSFAST_JOB_KEY"):
        place(two)
    with_address = two | {"DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "1"}
    assert place(with_address).job_key == place(with_address | {"BYTEPS_LOCAL_RANK": "1"}).job_key
    assert place(two | {"BPSFAST_JOB_KEY": KEY}).job_key == bytes.fromhex(KEY)


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_dmlc_local_job_has_no_other_roles(role):
    assert place(LOCAL | {"DMLC_ROLE": role}).job_key == b""


@pytest.mark.parametrize(
    "environ, setting, value",
    [
        ({"DMLC_ENABLE_RDMA": "1"}, "transport", "rdma"),
        ({}, "transport", "auto"),
        ({"BYTEPS_ENABLE_IPC": "0"}, "allow_shm", False),
        ({"BYTEPS_ENABLE_MIXED_MODE": "1"}, "placement", "optimal"),
    ],
)
def test_dmlc_transport_rows(environ, setting, value):
    settings = load_with_origins({}, WORKER | environ)[0]
    assert getattr(detect(settings, WORKER | environ).settings(settings), setting) == value


@pytest.mark.parametrize(
    "complete, dropped",
    [
        *(
            (EXPLICIT, name)
            for name in ("BPSFAST_SIZE", "BPSFAST_LOCAL_RANK", "BPSFAST_LOCAL_SIZE", "BPSFAST_SCHEDULER")
        ),
        *((TORCHRUN, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")),
        *((WORKER, name) for name in ("DMLC_ROLE", "DMLC_NUM_SERVER", "DMLC_WORKER_ID", "BYTEPS_LOCAL_SIZE")),
    ],
)
def test_half_a_set_is_an_error_that_names_what_is_missing(complete, dropped):
    with pytest.raises(ConfigError, match=f"{dropped}.* not"):
        place({name: value for name, value in complete.items() if name != dropped})


@pytest.mark.parametrize(
    "one, other, texts",
    [
        (EXPLICIT, TORCHRUN, ("bpsfast", "torchrun", "local_rank")),
        (TORCHRUN, WORKER | {"BYTEPS_LOCAL_SIZE": "4"}, ("torchrun", "dmlc", "local_size")),
        (EXPLICIT, DMLC | {"DMLC_ROLE": "server"}, ("bpsfast", "dmlc", "role")),
        ({"BPSFAST_RANK": "0"}, TORCHRUN, ("BPSFAST_RANK", "LOCAL_RANK", "torchrun")),
    ],
)
def test_two_sets_that_disagree_are_an_error_that_names_both(one, other, texts):
    with pytest.raises(ConfigError) as caught:
        place(one | other)
    assert all(text in str(caught.value) for text in texts)


SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "BPSFAST_JOB_KEY": KEY,
}
OPEN_MPI = dict(OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_LOCAL_RANK="1",
                OMPI_COMM_WORLD_LOCAL_SIZE="2", MASTER_ADDR="10.0.0.1", BPSFAST_JOB_KEY=KEY)
PMI = dict(PMI_RANK="3", PMI_SIZE="4", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2", MASTER_ADDR="10.0.0.1",
           BPSFAST_JOB_KEY=KEY)
HOROVOD = dict(HOROVOD_RANK="3", HOROVOD_SIZE="5", HOROVOD_LOCAL_RANK="1", HOROVOD_LOCAL_SIZE="2",
               MASTER_ADDR="10.0.0.1", BPSFAST_JOB_KEY=KEY)
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2",
       "MASTER_ADDR": "10.0.0.1", "BPSFAST_JOB_KEY": KEY}
SETS = {"bpsfast": EXPLICIT, "torchrun": TORCHRUN, "dmlc": WORKER, "Horovod": HOROVOD, "Open MPI": OPEN_MPI,
        "PMI": PMI, "slurm": SLURM, "kubernetes": POD}
_MPI, _OUTER = ("Open MPI", "PMI"), ("slurm", "kubernetes")


@pytest.mark.parametrize(
    "inner, outer",
    [
        *((inner, outer) for inner in ("bpsfast", "torchrun", "dmlc", "Horovod") for outer in (*_MPI, *_OUTER)),
        *((inner, outer) for inner in _MPI for outer in _OUTER),
        ("slurm", "kubernetes"),
    ],
)
def test_of_launchers_inside_each_other_the_innermost_counts(inner, outer):
    alone, both = place(SETS[inner]), place(SETS[outer] | SETS[inner])
    assert both == alone and both.launcher == inner


@pytest.mark.parametrize(
    "one, other",
    [
        ("bpsfast", "torchrun"), ("bpsfast", "Horovod"), ("torchrun", "dmlc"), ("torchrun", "Horovod"),
        ("dmlc", "Horovod"), ("Open MPI", "PMI"),
    ],
)
def test_launchers_beside_each_other_must_agree(one, other):
    """No two of the sets above say the same once one of them is changed."""
    changed = {"torchrun": {"LOCAL_WORLD_SIZE": "3"}, "dmlc": {"BYTEPS_LOCAL_SIZE": "3"}, "PMI": {"PMI_SIZE": "5"},
               "Horovod": {"HOROVOD_LOCAL_SIZE": "3"}}[other]
    with pytest.raises(ConfigError) as caught:
        place(SETS[one] | SETS[other] | changed)
    assert "disagree" in str(caught.value) and one in str(caught.value) and other in str(caught.value)


@pytest.mark.parametrize("outer", [SLURM | {"SLURM_LOCALID": "0"}, OPEN_MPI, PMI])
def test_what_a_script_writes_from_a_complete_set_is_no_set_of_its_own(outer):
    alone = place(outer)
    written = {"RANK": str(alone.rank), "WORLD_SIZE": str(alone.size), "LOCAL_RANK": str(alone.local_rank)}
    assert place(outer | written) == alone
    for name in written:
        with pytest.raises(ConfigError, match=f"set, but .*{alone.launcher}"):
            place(outer | written | {name: "0" if written[name] != "0" else "1"})


def test_pmi_of_slurm_is_slurms():
    """Slurm knows where its first node is, and MPI's variables do not say."""
    numbers = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    by_pmix = {f"OMPI_COMM_WORLD_{name}": number for name, number in numbers.items()}
    for more in ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "10"}, by_pmix):
        assert place(SLURM | more) == place(SLURM)
    with pytest.raises(ConfigError, match=r"PMI_RANK set, but .*slurm"):
        place(SLURM | {"PMI_RANK": "0", "PMI_SIZE": "2"})


@pytest.mark.parametrize("half", [{"BPSFAST_RANK": "1"}, {"DMLC_ROLE": "worker"}, {"HOROVOD_RANK": "1"}])
def test_half_a_set_inside_a_complete_one_is_an_error_that_names_both(half):
    (mark,) = half
    if mark == "HOROVOD_RANK":
        half = half | {"HOROVOD_SIZE": "3"}  # and Slurm says 2
    with pytest.raises(ConfigError, match=rf"{mark} set, but .*SLURM_PROCID.*\(slurm\)"):
        place(SLURM | half)


def test_a_set_that_contradicts_itself_around_a_complete_one_is_nobodys_business():
    assert place(OPEN_MPI | SLURM | {"SLURM_NTASKS": "9"}) == place(OPEN_MPI)


#: as `bpsfast run` sets them beside EXPLICIT
BESIDE = TORCHRUN | {"LOCAL_RANK": "1", "NODE_RANK": "1"}


@pytest.mark.parametrize("dropped", [(), *((name,) for name in BESIDE if name != "BPSFAST_JOB_KEY"),
                                     ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")])
def test_torchruns_variables_beside_those_of_bpsfast_run_change_nothing(dropped):
    """And a program may remove some, or name another port for a store of its own."""
    beside = {name: value for name, value in BESIDE.items() if name not in dropped}
    assert place(EXPLICIT | beside) == place(EXPLICIT)
    assert place(EXPLICIT | beside | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345"}) == place(EXPLICIT)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_torchruns_variables_that_say_otherwise_are_an_error(name):
    for beside in (BESIDE, {}) if name in ("RANK", "LOCAL_RANK") else (BESIDE,):
        with pytest.raises(ConfigError, match=r"two launchers disagree|cannot tell which rank"):
            place(EXPLICIT | beside | {name: "4" if name == "RANK" else "9" if "SIZE" in name else "0"})


def test_a_bad_interface_is_told_before_anything_is_asked_of_the_job():
    with pytest.raises(ConfigError, match="interface='none0,=none1' has no address here"):
        place({name: value for name, value in TORCHRUN.items() if name != "BPSFAST_JOB_KEY"}, interface="none0,=none1")


def test_half_a_set_around_a_complete_one_is_nobodys_business():
    assert place(TORCHRUN | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}) == place(TORCHRUN)


def test_two_sets_that_agree_are_fine():
    same = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert place(EXPLICIT | same).launcher == "bpsfast"


@pytest.mark.parametrize(
    "environ",
    [
        EXPLICIT | {"BPSFAST_RANK": "5"},
        EXPLICIT | {"BPSFAST_LOCAL_RANK": "2"},
        TORCHRUN | {"RANK": "9"},
        TORCHRUN | {"RANK": "first"},
        WORKER | {"BYTEPS_LOCAL_RANK": "2"},
        DMLC | {"DMLC_ROLE": "joint"},
        {"BPSFAST_SCHEDULER": "10.0.0.1:77"},
    ],
)
def test_impossible_values_are_errors(environ):
    with pytest.raises(ConfigError):
        place(environ)


@pytest.mark.parametrize(
    "environ, once", [({}, False), (TORCHRUN, False), (LOCAL, False), (EXPLICIT, True), (WORKER, True)]
)
def test_who_starts_no_daemons_can_join_only_once(environ, once):
    assert place(environ).is_joined_once is once


def test_the_settings_of_a_place_lead_to_the_same_place():
    settings, environ = load_with_origins({}, TORCHRUN)[0], TORCHRUN
    filled = detect(settings, environ).settings(settings)
    assert (filled.rank, filled.size, filled.num_nodes) == (3, 5, 2)
    assert filled.scheduler == f"10.0.0.1:{scheduler_port(29500)}"
    assert filled.job_key == KEY
    assert detect(filled, {}).rank == 3


def test_the_key_comes_from_variable_then_file_and_else_none_leaves_the_machine(tmp_path, caplog):
    file = tmp_path / "key"
    file.write_text("cd" * 32 + "\n")
    assert job_key(load_with_origins({"job_key": KEY, "job_key_file": str(file)}, {})[0], "h:1") == bytes.fromhex(KEY)
    assert job_key(load_with_origins({"job_key_file": str(file)}, {})[0], "h:1") == bytes.fromhex("cd" * 32)
    file.write_bytes(b"\xef\xbb\xbf" + b"cd" * 32 + b"\r\n")  # from another system
    assert job_key(load_with_origins({"job_key_file": str(file)}, {})[0], "h:1") == bytes.fromhex("cd" * 32)
    assert not caplog.records
    plain = load_with_origins({}, {})[0]
    for remote in ("h:1", "10.0.0.1:1", "[fd00::1]:1"):
        with pytest.raises(ConfigError, match=r"no job key.*BPSFAST_JOB_KEY.*openssl rand -hex 32.*BPSFAST_INSECURE=1"):
            job_key(plain, remote)
    assert job_key(plain, "127.0.0.1:1") == job_key(plain, "127.0.0.1:1") != job_key(plain, "127.0.0.1:2")
    assert job_key(plain, "127.0.0.1:1") != security.job_key(None, "bpsfast|127.0.0.1:1"), "others know the address"
    assert not caplog.records
    insecure = load_with_origins({"insecure": True}, {})[0]
    assert job_key(insecure, "h:1") == job_key(insecure, "h:1") != job_key(insecure, "h:2")
    assert "BPSFAST_INSECURE=1" in caplog.text and "h:1" in caplog.text
    with pytest.raises(ConfigError, match="cannot be read"):
        job_key(load_with_origins({"job_key_file": str(tmp_path / "none")}, {})[0], "h:1")




@pytest.mark.parametrize(
    "host, only_here",
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("node1.example", False)],
)
def test_loopback(host, only_here):
    assert is_loopback(host) == only_here
    assert parse_address(format_address(host, 5)) == (host, 5)
