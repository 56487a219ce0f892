"""``bpsfast run --elastic`` and ``bpsfast add``: what they refuse, and what their processes are told."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bpsfast import settings
from bpsfast.launch import elastic_job
from bpsfast.launch.job import Shape
from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.muster import Rules


def cli(*arguments):
    return subprocess.run([sys.executable, "-m", "bpsfast", *arguments], capture_output=True, text=True, timeout=60,
                          check=False)


@pytest.mark.parametrize(("options", "text"), [
    (("--lost-worker", "wait"), "--lost-worker: for jobs with --elastic only"),
    (("--min-ranks", "1", "--control", "x"), "--min-ranks, --control: for jobs with --elastic only"),
    (("--elastic", "-H", "a:2"), "-H with --elastic: elastic jobs are started on this machine"),
    (("--elastic", "--helpers", "1", "--dry-run"), "--helpers, --dry-run with --elastic"),
    (("--elastic", "--max-ranks", "1"), "--min-ranks 1, -n 2, --max-ranks 1: must be in this order"),
    (("--elastic", "--min-ranks", "3"), "--min-ranks 3, -n 2, --max-ranks 2: must be in this order")])
def test_what_makes_no_sense_is_refused(options, text):
    done = cli("run", "-n", "2", *options, "--", "true")
    assert done.returncode == 2 and f"ConfigError: {text}" in done.stderr


def test_workers_are_told_the_muster_and_no_place():
    found = elastic_job.plan(Shape(ranks=(2, 1)), ["prog"], settings.load({"rank": 3, "timeout_s": 7}, {}),
                             {"PATH": "/bin", "RANK": "9", "BPSFAST_SIZE": "9"}, "127.0.0.1:99", "ab" * 16)
    assert [command.name for command in found] == ["worker 0", "worker 1", "worker 2"]
    environ = found[2].environ
    assert {name: value for name, value in environ.items() if name.startswith("BPSFAST_")} == {
        "BPSFAST_MUSTER": "127.0.0.1:99", "BPSFAST_JOB_KEY": "ab" * 16, "BPSFAST_MEMBER": "2",
        "BPSFAST_NODE_ID": "node1", "BPSFAST_NODE_HOST": "127.0.0.1", "BPSFAST_TIMEOUT_S": "7.0"}
    assert environ["PATH"] == "/bin" and "RANK" not in environ
    assert all("ab" * 16 not in word for command in found for word in command.argv)


def test_helpers_are_refused():
    with pytest.raises(ConfigError, match="--helpers 1 with --elastic"):
        elastic_job.run(Shape(ranks=(1,), n_helpers=1), ["true"], settings.load({}, {}), Rules(max_ranks=1))


def test_add_needs_the_file_of_a_running_job(tmp_path):
    (tmp_path / "old").write_bytes(b"no json")
    for name in ("old", "none"):
        done = cli("add", str(tmp_path / name))
        assert done.returncode == 2 and "whose job still runs" in done.stderr


def test_add_says_when_nobody_answers(tmp_path):
    path = tmp_path / "control"
    with elastic_job._shown(path, elastic_job.Control(muster="127.0.0.1:1", job_key="ab" * 16)):
        assert os.stat(path).st_mode & 0o777 == 0o600
        with pytest.raises(elastic_job.PeerLostError, match=r"has not answered at 127\.0\.0\.1:1 within 0\.3 s"):
            elastic_job.add(path, 1, timeout_s=0.3)
    assert not path.exists()


def test_a_worker_without_a_key_says_who_starts_workers():
    environ = {**os.environ, "BPSFAST_MUSTER": "127.0.0.1:1"}
    done = subprocess.run([sys.executable, "-c", "import bpsfast; bpsfast.init()"], capture_output=True, text=True,
                          timeout=60, check=False, env=environ)
    assert done.returncode == 1
    assert "ConfigError: BPSFAST_MUSTER is set, but BPSFAST_JOB_KEY or BPSFAST_MEMBER is not" in done.stderr


def test_a_muster_that_does_not_answer_is_named():
    environ = {**os.environ, "BPSFAST_MUSTER": "127.0.0.1:1", "BPSFAST_JOB_KEY": "ab" * 16, "BPSFAST_MEMBER": "0",
               "BPSFAST_START_TIMEOUT_S": "1"}
    done = subprocess.run([sys.executable, "-c", "import bpsfast; bpsfast.init()"], capture_output=True, text=True,
                          timeout=60, check=False, env=environ)
    assert done.returncode == 1
    assert "StallError: worker 0: nobody answers at 127.0.0.1:1" in done.stderr
