"""Tests ``bpsfast clean``: it removes what killed launchers and benches have left, and nothing else."""
from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bpsfast.base import process_identity
from bpsfast.cli import cli
from bpsfast.launch import stale_resources
from bpsfast.launch.namespaces import netns
from tests.launch.test_orphan_reaper import guardian_of
from tests.support.terminal import on_terminal

_BENCH = """
import sys, tempfile
from bpsfast.base.process_identity import folder_prefix
folder = tempfile.TemporaryDirectory(prefix=folder_prefix("bench"))
open(folder.name + "/x", "w").write("12345")
print(folder.name, flush=True)
sys.stdin.read()
"""
_CLUSTER = """
import sys
from bpsfast.launch.namespaces import Cluster
cluster = Cluster(["a"])
print(cluster.hub.namespace, cluster["a"].namespace, flush=True)
sys.stdin.read()
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["clean", *arguments])


def told(*arguments: str) -> dict[str, dict[str, object]]:
    """Return what the command tells, by name."""
    return {each["name"]: each for each in json.loads(invoke("--json", *arguments).stdout)["stale_resources"]}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let temporary folders be made, and looked for, below the test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path  # type: ignore[misc]
    tempfile.tempdir = None


@pytest.fixture
def running() -> Iterator[Callable[..., subprocess.Popen]]:
    """Start programs; what they have not been killed by, ends them."""
    started: list[subprocess.Popen] = []

    def start(*argv: str) -> subprocess.Popen:
        started.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        with process:
            process.wait(20)


@pytest.mark.slow
def test_what_a_killed_launcher_left_is_ended_and_a_daemon_of_the_user_s_is_not(
        running: Callable[..., subprocess.Popen], pidfd_of: Callable[[int], int]) -> None:
    rank = "sleep 600 & echo $!; setsid sleep 601 & echo $!; trap '' TERM; sleep 602 & echo $!; wait"
    launcher = running(sys.executable, "-m", "bpsfast", "run", "-n", "1", "--", "bash", "-c", rank)
    assert launcher.stdout is not None
    left, daemon, stubborn = (int(launcher.stdout.readline().split()[-1]) for _ in range(3))
    names = {str(left), str(daemon), str(stubborn)}
    try:
        assert not names & told("--yes").keys(), "the job runs"
        launcher.send_signal(signal.SIGSTOP)  # so that it does not start another guardian
        os.kill(guardian_of(launcher.pid), signal.SIGKILL)
        launcher.kill()
        launcher.wait(20)
        listed = told()
        assert names & listed.keys() == {str(left), str(stubborn)}
        assert listed[str(left)] == {"kind": "process", "name": str(left), "owner_pid": launcher.pid,
                                     "about": "sleep 600", "removed": False, "reason": ""}
        plain = invoke()
        assert plain.exit_code == 1 and "nothing was removed; use --yes to remove" in plain.output
        dry = invoke("--dry-run")
        assert dry.exit_code == 0 and f"pid {launcher.pid}" in dry.output
        ends = [pidfd_of(left), pidfd_of(stubborn)]
        removed = told("--yes")
        assert removed[str(left)]["removed"] is removed[str(stubborn)]["removed"] is True
        assert all(select.select([end], [], [], 0.0)[0] for end in ends)
        assert process_identity.start_time(daemon) != "gone"
        assert not names & told().keys()
    finally:
        os.kill(daemon, signal.SIGKILL)


def test_folders_of_the_dead_go_and_others_stay(temporary: Path, running: Callable[..., subprocess.Popen]) -> None:
    benches = [running(sys.executable, "-c", _BENCH) for _ in range(2)]
    dead, alive = (bench.stdout.readline().strip() for bench in benches if bench.stdout is not None)
    benches[0].kill()
    benches[0].wait(20)
    mark = Path(dead).name.split("-")[2]
    kept = [temporary / f"bpsfast-bench-{mark[:-8]}00000000-x",  # of another boot or container
            temporary / "bpsfast-bench-abcdefgh", temporary / f"other-bench-{mark}-x"]
    for path in kept:
        path.mkdir()
    link = temporary / f"bpsfast-bench-{mark}-link"
    link.symlink_to(alive)
    for typed, left in ((b"n\n", True), (b"y\n", False)):
        code, text = on_terminal(["clean"], width=80, typed=typed)
        assert "Remove 1 resource?" in text and Path(dead).exists() is left and code == left
    Path(dead).mkdir()
    Path(dead, "x").write_text("12345")
    found = told()
    assert list(found) == [dead] and found[dead]["about"] == "5 bytes" and found[dead]["owner_pid"] == benches[0].pid
    assert told("--yes")[dead]["removed"] is True
    assert not Path(dead).exists() and all(path.exists() for path in (*kept, link, Path(alive)))
    done = invoke()
    assert done.exit_code == 0 and "no stale resources" in done.output


def test_a_folder_that_does_not_go_is_named(temporary: Path, running: Callable[..., subprocess.Popen],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running(sys.executable, "-c", _BENCH)
    assert bench.stdout is not None
    dead = bench.stdout.readline().strip()
    bench.kill()
    bench.wait(20)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(stale_resources.shutil, "rmtree", refuse)
    done = invoke("--yes")
    assert done.exit_code == 1 and f"folder {dead} is still there: Permission denied" in done.output


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.root
def test_namespaces_of_the_dead_go(running: Callable[..., subprocess.Popen], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = running(sys.executable, "-c", _CLUSTER)
    assert cluster.stdout is not None
    left = set(cluster.stdout.readline().split())
    assert not left & told("--yes").keys()
    cluster.kill()
    cluster.wait(20)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1000)
        one = min(left)
        resource = stale_resources.StaleResource("namespace", one, cluster.pid, "")
        assert dict(stale_resources.remove([resource])).popitem()[1] == "it needs root"
    invoke("--yes")
    assert not any(Path("/run/netns", name).exists() for name in left)  # whoever has removed them
    assert not left & set(netns.stale())


def test_wrong_arguments() -> None:
    assert invoke("--yes", "--dry-run").exit_code == 2
    assert invoke("now").exit_code == 2


def test_a_mark_of_elsewhere_or_none_is_nobody_dead() -> None:
    pid, start, place = process_identity.mark().split(".")
    assert place == process_identity.pid_namespace_id() and not process_identity.is_dead(process_identity.mark())
    assert process_identity.is_dead(f"{pid}.1.{place}")
    for mark in ("", "x", f"{pid}.1", f"{pid}.1.00000000", f"{pid}.{start}.00000000", f"{pid}.x.{place}"):
        assert not process_identity.is_dead(mark), mark
