"""The command line: options arrive, errors are one line, nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from bpsfast import __version__
from bpsfast.base.settings import table
from bpsfast.cli import cli


def invoke(*arguments: str, **variables: str):
    """Run the command line in this process with *variables* set."""
    return CliRunner(env=variables).invoke(cli, arguments)


def test_version():
    assert invoke("version").output == invoke("--version").output == __version__ + "\n"


def test_env_shows_every_setting_with_its_origin():
    done = invoke(
        "env", "--set", "tcp-streams=4", BPSFAST_JOB_KEY="ab" * 16, BYTEPS_PARTITION_BYTES="8192", BPSFAST_NODE_ID="n7"
    )
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line for line in done.output.splitlines()}
    assert set(lines) == {row.variable for row in table()}
    assert "4 " in lines["BPSFAST_TCP_STREAMS"] and "command line" in lines["BPSFAST_TCP_STREAMS"]
    assert "8192" in lines["BPSFAST_PARTITION_BYTES"]
    assert "BYTEPS_PARTITION_BYTES (alias)" in lines["BPSFAST_PARTITION_BYTES"]
    assert " n7 " in lines["BPSFAST_NODE_ID"]
    assert "abab" not in done.output, "the key is a secret"


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("run", "--set", "partition_byte=1", "--", "x"), "did you mean partition_bytes?"),
        (("run", "--set", "partition_bytes", "--", "x"), "expected NAME=VALUE"),
        (("run", "--set", "job-key=00", "--", "x"), "every user of this machine can read command lines"),
        (("run", "--rate", "1gbit", "--", "x"), "--netns"),
        (("run", "-n", "2", "--nodes", "3", "--", "x"), "cannot be spread"),
        (("run", "-n", "2", "after.py"), "python after.py"),
        (("scheduler",), "BPSFAST_NUM_NODES"),
        (("scheduler", "--num-nodes", "2"), "BPSFAST_SCHEDULER"),
        (("node",), "BPSFAST_SCHEDULER"),
        (("node", "--scheduler", "nowhere"), "expected host:port"),
        (("node", "--helper", "--local-size", "2"), "--helper has no ranks, --local-size 2 has"),
        (("node", "--scheduler", "127.0.0.1:9", "--cores", "64"), "BPSFAST_CORES = 64, but this process"),
        (("node", "--helper", "--cpus", "1"), "BPSFAST_CPUS = 1 (command line)"),
        (("node", "--nic-rate", "0.0001"), "BPSFAST_NIC_LIMIT = 0.0001 (command line) is in Gbit/s and at least 0.001"),
        (("node", "--set", "nic_limit=inf"), "BPSFAST_NIC_LIMIT = 'inf' (from command line)"),
        (("node", "--nic-rate", "5", "--set", "transport=rdma"),
         "BPSFAST_NIC_LIMIT = 5.0 (command line) applies to tcp"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(arguments, text):
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert text in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [("run",), ("run", "--num-rank", "2", "--", "x"), ("run", "-n", "0", "--", "x"), ("no-command",)]
)
def test_wrong_usage_is_exit_code_2(arguments):
    assert invoke(*arguments).exit_code == 2


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("run",),
        ("scheduler",),
        ("node",),
        ("dmlc",),
        ("env",),
        ("version",),
        ("bench",),
        ("bench", "kernels"),
        ("bench", "push_pull"),
    ],
)
def test_every_command_explains_itself(command):
    done = invoke(*command, "--help")
    assert done.exit_code == 0
    assert done.output.startswith("Usage:")


def test_the_programs_own_options_are_its_own():
    done = invoke("run", "--dry-run", "--", "prog", "-n", "4", "--help")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].endswith("prog -n 4 --help")


def test_the_launcher_imports_nothing_heavy():
    text = (
        "import sys\nfrom bpsfast import cli\nfrom bpsfast.launch import local_job, supervisor\n"
        "print(sorted({'numpy', 'numba', 'torch', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
