"""`bpsfast tune` as a command: options that contradict, a machine without RDMA, a profile taken back, a job."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from bpsfast.base import profile
from bpsfast.cli import cli
from bpsfast.tools.commands import tune
from bpsfast.tools.tune.search import Outcome
from tests.support import measurement_schemas as schemas

without_devices = pytest.mark.skipif(
    os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
    reason="there are RDMA devices here")


def run(*arguments, env=None):
    return CliRunner().invoke(cli, ["tune", "rdma", *arguments], env={"BPSFAST_PROFILE": ""} | (env or {}))


@without_devices
@pytest.mark.parametrize("arguments", [(), ("localhost", "--wait", "1")])
def test_a_machine_without_rdma_is_told_so(arguments):
    found = run(*arguments)
    assert found.exit_code == 1 and "no RDMA port can be used: there is no RDMA device" in found.output
    assert "bpsfast doctor" in found.output
    shown = run(*arguments, "--json").output
    assert "UnsupportedError" in json.loads(shown[:shown.index("\n")])["error"]["class"]


@without_devices
def test_apply_changes_nothing_when_nothing_was_measured(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("rdma_mtu = 1024\n")
    assert run("localhost", "--wait", "1", "--apply", "--profile", str(file)).exit_code == 1
    assert file.read_text() == "rdma_mtu = 1024\n" and os.listdir(tmp_path) == ["job.toml"]


@pytest.mark.parametrize(("arguments", "words"), [
    (("--apply",), "name it with --profile FILE or BPSFAST_PROFILE"),
    (("--undo",), "name it with --profile FILE or BPSFAST_PROFILE"),
    (("--apply", "--profile", "x.toml"), "name the host to measure with"),
    (("h", "--undo", "--profile", "x.toml"), "--undo measures nothing"),
    (("h", "--budget", "0s"), "expected seconds such as 90"),
    (("h", "--budget", "soon"), "expected seconds such as 90"),
    (("h", "--traffic-class", "0,256"), "expected numbers from 0 to 255"),
    (("h", "--service-level", "x"), "expected numbers from 0 to 15"),
    (("h", "--goal", "fame"), "'fame' is not one of"),
    (("h:x",), "expected HOST or HOST:PORT"),
    (("h", "--only", "fame"), "fame cannot be tuned; supported: partition_bytes"),
    (("h", "--apply", "--profile", "/absent/x.toml"), "/absent is not a writable folder"),
])
def test_options_that_cannot_be_are_usage_errors(arguments, words):
    found = run(*arguments)
    assert found.exit_code == 2 and words in " ".join(found.output.split()), found.output


def test_undo_says_which_file_and_what_was_taken_back(tmp_path):
    file = tmp_path / "job.toml"
    profile.apply(str(file), {"rdma_mtu": 1024}, "tune rdma: two-way better")
    found = run("--undo", env={"BPSFAST_PROFILE": str(file)})
    assert found.exit_code == 0 and not list(tmp_path.iterdir())
    assert f"{file}: removed" in found.output and "tune rdma: two-way better" in found.output
    assert run("--undo", "--profile", str(file)).exit_code == 2
    profile.apply(str(file), {"rdma_mtu": 1024}, "x")
    shown = json.loads(run("--undo", "--json", "--profile", str(file)).output)
    assert shown["profile"]["path"] == str(file) and shown["profile"]["removed"]


def test_only_what_is_asked_for_is_written(tmp_path):
    file = str(tmp_path / "job.toml")
    better = Outcome({"rdma_mtu": 0, "rdma_cores": ""}, {"rdma_mtu": 1024, "rdma_cores": ""}, True, "two-way better")
    same = Outcome({"rdma_mtu": 0}, {"rdma_mtu": 0})
    origins = {"rdma_mtu": "BPSFAST_RDMA_MTU", "rdma_cores": "default"}
    assert tune._write(better, origins, "")[0] is None and not list(tmp_path.iterdir())
    assert tune._write(same, origins, file)[1] == [f"nothing was changed: {file} is as it was"]
    assert not list(tmp_path.iterdir())
    change, words = tune._write(better, origins, file)
    assert change["path"] == file and profile.read(file) == {"rdma_mtu": 1024}
    assert "rdma_mtu is set by BPSFAST_RDMA_MTU, which overrides the profile: remove it there" in words


TRAINING = """
import sys, bpsfast
bpsfast.init()
g = bpsfast.Gradients({"a": ((300_000,), "f4"), "b": ((10,), "f4")})
for step in range(int(sys.argv[1])):
    for name in g:
        g.ready(name)
    g.step()
bpsfast.shutdown()
sys.exit(int(sys.argv[2]))
"""


def tune_job(tmp_path, n_steps, code=0, *options):
    (tmp_path / "train.py").write_text(TRAINING)
    bpsfast = str(Path(sys.executable).with_name("bpsfast"))
    command = [bpsfast, "tune", *options, "--", bpsfast, "run", "-n", "2", "--nodes", "2", "--set", "transport=tcp"]
    return subprocess.run(
        [*command, "--", sys.executable, "train.py", str(n_steps), str(code)], cwd=tmp_path, capture_output=True,
        text=True, timeout=100, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, check=False)


def test_a_job_is_tuned_and_the_result_kept(tmp_path):
    done = tune_job(tmp_path, 70)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "present" in done.stdout and "<- chosen" in done.stdout and "chosen after" in done.stdout
    assert len(list((tmp_path / "bpsfast" / "tuned").iterdir())) == 1


def test_a_job_that_ends_early_is_said_to(tmp_path):
    done = tune_job(tmp_path, 9, 3, "--json", "-o", "found.json")
    assert done.returncode != 0, "the program's own"
    found = json.loads((tmp_path / "found.json").read_text())
    msgspec.convert(found, schemas.TunedJob, strict=True)
    assert not found["is_over"] and found["trials"][0]["reason"] == "present"
    assert not (tmp_path / "bpsfast" / "tuned").exists()


@pytest.mark.parametrize("program", [["true"], ["no such program"]])
def test_a_program_that_trains_nothing(program):
    found = CliRunner().invoke(cli, ["tune", "--", *program])
    assert found.exit_code in (1, 2) and ("nothing was measured" in found.output or "cannot be started" in found.output)
