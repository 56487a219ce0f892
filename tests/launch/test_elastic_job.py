"""Tests ``bpsfast run --elastic`` and ``bpsfast add``: what they refuse, and the environment of their processes."""
from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec
import pytest

from bpsfast.base import settings
from bpsfast.launch import elastic_job
from bpsfast.launch.elastic_service import ElasticService
from bpsfast.launch.host_list import Host
from bpsfast.launch.local_job import JobShape
from bpsfast.orchestration.elastic.coordinator import ElasticRules
from bpsfast.orchestration.errors import ConfigError


def cli(*arguments):
    return subprocess.run([sys.executable, "-m", "bpsfast", *arguments], capture_output=True, text=True, timeout=60,
                          check=False)


@pytest.mark.parametrize(("options", "text"), [
    (("--lost-worker", "wait"), "--lost-worker: needs --elastic"),
    (("--min-ranks", "1", "--control", "x"), "--min-ranks, --control: needs --elastic"),
    (("--elastic", "-H", "a:2", "--hostfile", __file__), "-H and --hostfile both name hosts"),
    (("--elastic", "-H", "a:2", "--control", "x"), "--control: on hosts workers are started by themselves"),
    (("--elastic", "-H", "a:2", "--slots", "2"), "--slots: needs --host-discovery-script"),
    (("--elastic", "-H", "a:2", "--nodes", "2"), "--nodes simulates machines on this host, but -H names real hosts"),
    (("--elastic", "-H", "a:1"), "-n 2 asks for more ranks than the hosts have slots"),
    (("--elastic", "-H", "a:2", "--max-np", "1"), "--min-ranks 1, -n 2, --max-ranks 1: must be in this order"),
    (("--elastic", "-H", "a:2", "--scheduler-host", "b"), "--scheduler-host with --elastic"),
    (("--elastic", "-H", "a:2", "--set", "node_host=10.0.0.1"), "BPSFAST_NODE_HOST = 10.0.0.1 is the address of one"),
    (("--elastic", "--host-discovery-script", __file__), f"--host-discovery-script {__file__} is not executable"),
    (("--elastic", "--blacklist-cooldown", "5"), "--blacklist-cooldown: there are no hosts"),
    (("--slots", "5"), "--slots: needs --elastic"),
    (("--elastic", "--helpers", "1", "--dry-run"), "--helpers, --dry-run with --elastic"),
    (("--elastic", "--max-ranks", "1"), "--min-ranks 1, -n 2, --max-ranks 1: must be in this order"),
    (("--elastic", "--min-ranks", "3"), "--min-ranks 3, -n 2, --max-ranks 2: must be in this order")])
def test_what_makes_no_sense_is_refused(options, text):
    done = cli("run", "-n", "2", *options, "--", "true")
    assert done.returncode == 2 and f"ConfigError: {text}" in done.stderr


def test_workers_are_told_the_coordinator_and_no_place():
    found = elastic_job.plan(JobShape(ranks=(2, 1)), ["prog"], settings.load({"rank": 3, "timeout_s": 7}, {}),
                             {"PATH": "/bin", "RANK": "9", "BPSFAST_SIZE": "9"}, "127.0.0.1:99", "ab" * 16)
    assert [command.name for command in found] == ["worker 0", "worker 1", "worker 2"]
    environ = found[2].environ
    assert {name: value for name, value in environ.items() if name.startswith("BPSFAST_")} == {
        "BPSFAST_COORDINATOR": "127.0.0.1:99", "BPSFAST_JOB_KEY": "ab" * 16, "BPSFAST_MEMBER": "2",
        "BPSFAST_NODE_ID": "node1 of 127.0.0.1:99", "BPSFAST_NODE_HOST": "127.0.0.1", "BPSFAST_TIMEOUT_S": "7.0"}
    assert environ["PATH"] == "/bin" and "RANK" not in environ
    assert all("ab" * 16 not in word for command in found for word in command.argv)


def test_workers_on_hosts_are_told_the_address_by_which_their_host_reaches_the_coordinator():
    found = elastic_job.command_on(Host("me@gpu1", 2), ["prog"], settings.load({"timeout_s": 7}, {}),
                                   {"LANG": "C", "RANK": "9"}, "10.0.0.1:99", "ab" * 16)
    assert found.environ == {"LANG": "C", "BPSFAST_COORDINATOR": "10.0.0.1:99", "BPSFAST_JOB_KEY": "ab" * 16,
                             "BPSFAST_NODE_ID": "me@gpu1 of 10.0.0.1:99", "BPSFAST_TIMEOUT_S": "7.0"}
    assert list(found.argv) == ["prog"]


def test_helpers_are_refused():
    with pytest.raises(ConfigError, match="--helpers 1 with --elastic"):
        elastic_job.run(JobShape(ranks=(1,), n_helpers=1), ["true"], settings.load({}, {}), ElasticRules(max_ranks=1))


def test_add_needs_the_file_of_a_running_job(tmp_path):
    (tmp_path / "old").write_bytes(b"no json")
    for name in ("old", "none"):
        done = cli("add", str(tmp_path / name))
        assert done.returncode == 2 and "whose job still runs" in done.stderr


def test_add_says_when_nobody_answers(tmp_path):
    path = tmp_path / "control"
    with elastic_job._published(path, elastic_job.Control(coordinator="127.0.0.1:1", job_key="ab" * 16)):
        assert os.stat(path).st_mode & 0o777 == 0o600
        with pytest.raises(elastic_job.PeerLostError, match=r"has not answered at 127\.0\.0\.1:1 within 0\.3 s"):
            elastic_job.add(path, 1, timeout_s=0.3)
    assert not path.exists()


CONTROL = elastic_job.Control(coordinator="127.0.0.1:1", job_key="ab" * 16)


def refused(path, text):
    with pytest.raises(ConfigError, match=text), elastic_job._published(path, CONTROL):
        raise AssertionError("it was taken for ours")
    assert not list(path.parent.glob(f"{path.name}.*")), "what was begun is gone"


@pytest.mark.parametrize("content", [b"my thesis", b"{}", b"", b"\xff",
                                     b'{"coordinator": "127.0.0.1:1", "job_key": "", "x": 1}'])
def test_a_file_of_somebody_else_is_neither_overwritten_nor_removed(tmp_path, content):
    path = tmp_path / "thesis"
    path.write_bytes(content)
    path.chmod(0o600)
    refused(path, "there is such a file, and it was not made by")
    assert path.read_bytes() == content


def test_a_link_a_folder_and_a_file_that_others_may_read_are_not_ours(tmp_path):
    ours = tmp_path / "ours"
    ours.write_bytes(msgspec.json.encode(CONTROL))
    link, folder = tmp_path / "link", tmp_path / "folder"
    link.symlink_to(ours)
    folder.mkdir()
    for path in (ours, link, folder):
        refused(path, "was not made by")
    assert ours.exists() and link.is_symlink() and folder.is_dir()


def test_what_a_killed_launcher_has_left_is_replaced_unless_its_job_runs(tmp_path):
    path = tmp_path / "control"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = elastic_job.Control(coordinator=f"127.0.0.1:{listener.getsockname()[1]}", job_key="cd" * 16)
        path.write_bytes(msgspec.json.encode(running))
        path.chmod(0o600)
        refused(path, "its job runs, and listens at 127")
    with elastic_job._published(path, CONTROL):
        assert msgspec.json.decode(path.read_bytes(), type=elastic_job.Control) == CONTROL
    assert not path.exists()


def test_only_the_file_that_was_made_is_removed(tmp_path):
    path = tmp_path / "control"
    with elastic_job._published(path, CONTROL):
        path.unlink()
        path.write_text("another one's")
    assert path.read_text() == "another one's"
    with elastic_job._published(tmp_path / "gone", CONTROL):
        (tmp_path / "gone").unlink()
    refused(tmp_path / "none" / "control", "no file can be made there")


def test_the_key_of_a_file_is_the_jobs(tmp_path):
    (tmp_path / "key").write_text("ef" * 32)
    program = f"import os, pathlib; pathlib.Path({str(tmp_path / 'seen')!r}).write_text(os.environ['BPSFAST_JOB_KEY'])"
    environ = {**os.environ, "BPSFAST_JOB_KEY_FILE": str(tmp_path / "key")}
    for options in (("--elastic",), ()):
        done = subprocess.run([sys.executable, "-m", "bpsfast", "run", *options, "--", sys.executable, "-c", program],
                              capture_output=True, text=True, timeout=60, check=False, env=environ)
        assert (tmp_path / "seen").read_text() == "ef" * 32, done.stderr
        (tmp_path / "seen").unlink()


def test_a_worker_without_a_key_says_who_starts_workers():
    environ = {**os.environ, "BPSFAST_COORDINATOR": "127.0.0.1:1"}
    done = subprocess.run([sys.executable, "-c", "import bpsfast; bpsfast.init()"], capture_output=True, text=True,
                          timeout=60, check=False, env=environ)
    assert done.returncode == 1
    assert "ConfigError: BPSFAST_COORDINATOR is set, but BPSFAST_JOB_KEY or BPSFAST_MEMBER is not" in done.stderr


@pytest.mark.parametrize(("program", "out"), [
    ("import bpsfast; bpsfast.init(); print('trains')", ""),
    ("import bpsfast, bpsfast.torch as bps\nfrom bpsfast.trainer import process\nprocess._suspended = []\n"
     "from bpsfast.elastic.coordinator_client import open_client\n"
     "from bpsfast.base.settings import load\nopen_client(load({}))\n"
     "bps.resume(1, 0, 0); print('trains')", ""),
    ("import bpsfast, bpsfast.elastic as e\ntry: bpsfast.init()\n"
     "except Exception: print('no error')\nexcept e.TrainingOver as over: print(over)",
     "the training has ended without this worker, which came too late\n")])
def test_who_comes_after_the_end_ends_well_and_says_nothing(program, out):
    key = "ab" * 16
    service = ElasticService(ElasticRules(max_ranks=1), [0], bytes.fromhex(key), "127.0.0.1")
    try:
        service._coordinator.done()
        service.start()
        environ = {**os.environ, "BPSFAST_COORDINATOR": service.address, "BPSFAST_JOB_KEY": key, "BPSFAST_MEMBER": "1"}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False,
                              env=environ)
        assert (done.returncode, done.stdout, done.stderr) == (0, out, "")
    finally:
        service.close()


def test_a_coordinator_that_does_not_answer_is_named():
    environ = {**os.environ, "BPSFAST_COORDINATOR": "127.0.0.1:1", "BPSFAST_JOB_KEY": "ab" * 16, "BPSFAST_MEMBER": "0",
               "BPSFAST_START_TIMEOUT_S": "1"}
    done = subprocess.run([sys.executable, "-c", "import bpsfast; bpsfast.init()"], capture_output=True, text=True,
                          timeout=60, check=False, env=environ)
    assert done.returncode == 1
    assert "StallError: worker 0: no process answers at 127.0.0.1:1" in done.stderr
