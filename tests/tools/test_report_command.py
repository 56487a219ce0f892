"""``bpsfast report``: the archive is whole, opens by the command it names, and tells nobody's name, key or address."""
from __future__ import annotations

import json
import os
import resource
import socket
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bpsfast.cli import cli
from bpsfast.tools import bug_report

KEY, TOKEN = "5e" * 32, 'a"b \\ ünï'
NAMES = ["info.json", "settings.json", "doctor.json", "devices.json", "gids.json", "topo.json", "packages.txt",
         "environment.txt", "kernel.txt"]


def invoke(*arguments: str, **variables: str) -> Result:
    return CliRunner(env=variables).invoke(cli, ["report", *arguments])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no command run: what they say is checked once."""
    monkeypatch.setattr(bug_report, "_command", lambda *arguments: {"command": arguments})


@pytest.mark.slow
def test_a_report_is_whole_and_without_secrets(tmp_path: Path) -> None:
    host = socket.gethostname()
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank0.log").write_text("old\n" * 50 + f"node 1 (far01) {KEY} {TOKEN} 192.0.2.77 on {host} /home/zoe/x\n")
    (logs / "core").write_bytes(b"\0\1\2")
    done = subprocess.run(
        [sys.executable, "-m", "bpsfast", "report", "logs", "-o", "r.tar.gz", "--lines", "10"], cwd=tmp_path,
        env={**os.environ, "BPSFAST_JOB_KEY": KEY, "WANDB_API_KEY": TOKEN, "USER": "zoe", "BPSFAST_NODE_HOST": "far01"},
        capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert "omitted: logs/core: it holds no text" in done.stdout and "tar -xzOf r.tar.gz | less" in done.stdout
    path = tmp_path / "r.tar.gz"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as archive:
        found = {entry.name.removeprefix("bpsfast-report/"): archive.extractfile(entry).read().decode()  # type: ignore
                 for entry in archive.getmembers()}
        assert all(entry.uname == "" and entry.uid == 0 and entry.mtime == 0 for entry in archive.getmembers())
    assert list(found) == ["README.txt", *NAMES, "logs/01-rank0.log"]
    data = {name: json.loads(text) for name, text in found.items() if name.endswith(".json")}
    assert data["info.json"]["transports"] and data["doctor.json"]["findings"] and data["topo.json"]["parts"]
    settings = {each["name"]: each for each in data["settings.json"]}
    assert settings["job_key"]["value"] == "(set)" and settings["node_host"]["value"].startswith("host-")
    assert "BPSFAST_JOB_KEY=(set)" in found["environment.txt"] and "numpy==" in found["packages.txt"]
    assert "WANDB" not in found["environment.txt"] and "/proc/self/limits" in found["kernel.txt"]
    log = found["logs/01-rank0.log"].splitlines()
    assert len(log) == 10 and log[0] == "old"
    words = log[-1].split()
    assert words[2] == f"({settings['node_host']['value']})" and words[3:5] == ["(hidden)", "(hidden)"]
    assert words[5].startswith("10.0.") and words[-1] == "/home/user-1/x"
    whole = "\n".join(found.values())
    for secret in (KEY, TOKEN, json.dumps(TOKEN)[1:-1], "far01", "192.0.2.77", "zoe"):
        assert secret not in whole, secret


def test_a_dry_run_writes_nothing(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("--dry-run", "--json")
    told: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == 0 and told["path"] is None and told["nbytes"] is None
    assert [each["name"] for each in told["files"]] == ["README.txt", *NAMES]
    text = invoke("--dry-run").stdout
    assert all(name in text for name in NAMES) and "nothing was written" in text
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_had_is_named_and_the_rest_is_there(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: str) -> None:
        raise subprocess.TimeoutExpired(list(arguments), 60.0)

    monkeypatch.setattr(bug_report, "_command", broken)
    told = json.loads(invoke("--dry-run", "--json").stdout)
    assert [each["name"] for each in told["left_out"]] == NAMES[:6]
    assert "timed out" in told["left_out"][0]["reason"] and "kernel.txt" in {each["name"] for each in told["files"]}


def test_an_archive_that_finds_no_room_is_not_left_there_in_part(tmp_path: Path, quick: None) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        done = invoke("-o", str(tmp_path / "r.tar.gz"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.exit_code == 3 and "File too large" in done.output and not list(tmp_path.iterdir())


def test_a_line_that_a_log_s_end_begins_in_is_left_out(tmp_path: Path, quick: None) -> None:
    """What is left of it may be the end of a secret, which nothing would know again."""
    end = "line\n" * ((bug_report.MOST_LOG_NBYTES - len(KEY) // 2) // 5)
    path = tmp_path / "long.log"
    path.write_text(f"first\nkey {KEY}\n{end}")
    assert invoke(str(path), "-o", str(tmp_path / "r.tar.gz"), "--lines", "1000000", BPSFAST_JOB_KEY=KEY).exit_code == 0
    with tarfile.open(tmp_path / "r.tar.gz") as archive:
        shown = archive.extractfile("bpsfast-report/logs/01-long.log").read().decode()  # type: ignore[union-attr]
    assert shown == end
    path.write_text(f"first\nkey {KEY}\n")
    assert bug_report.last_lines(path, 5) == path.read_text()


def test_the_rest_of_a_private_key_is_left_out(tmp_path: Path) -> None:
    """Of the lines that are taken nothing says what they are, if its beginning is not among them."""
    key = ["-----BEGIN RSA PRIVATE KEY-----", "MIIEowIBAAKCAQEA", "c2VjcmV0", "-----END RSA PRIVATE KEY-----"]
    path = tmp_path / "a.log"
    path.write_text("\n".join(["first", *key, "after", "-----BEGIN PRIVATE KEY-----"]) + "\n")
    for n_lines in range(3, 6):
        rest = "(the rest of a private key)\nafter\n-----BEGIN PRIVATE KEY-----\n"
        assert bug_report.last_lines(path, n_lines) == rest
    assert bug_report.last_lines(path, 2).startswith("after\n") and "c2VjcmV0" in bug_report.last_lines(path, 6)


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (("no.log",), 2, "no.log"), (("--lines", "0"), 2, "--lines"), (("-o", "there"), 2, "the file exists"),
    (("-o", "no/x.tar.gz"), 2, "the folder does not exist"), (("-o", "/sys/kernel/x.tar.gz"), 3, "x.tar.gz")])
def test_wrong_arguments(arguments: tuple[str, ...], code: int, words: str, quick: None, tmp_path: Path,
                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("mine")
    done = invoke(*arguments)
    assert done.exit_code == code and words in done.output, done.output
    assert (tmp_path / "there").read_text() == "mine"
