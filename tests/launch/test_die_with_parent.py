"""Tests that a command tied to its parent replaces the wrapper, and dies with the parent."""

from __future__ import annotations

import select
import subprocess
import sys

from bpsfast.base import process_identity
from bpsfast.launch.daemons import tie_to_parent

_PARENT = """
import subprocess, sys
from bpsfast.launch.daemons import tie_to_parent
child = subprocess.Popen(tie_to_parent([sys.executable, "-c", "print('up', flush=True); input()"]),
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_the_command_replaces_the_wrapper():
    done = subprocess.run(tie_to_parent([sys.executable, "-c", "raise SystemExit(7)"]), timeout=30, check=False)
    assert done.returncode == 7


def test_a_missing_command_is_named():
    done = subprocess.run(tie_to_parent(["no-such-command"]), timeout=30, check=False, capture_output=True, text=True)
    assert done.returncode == 127
    assert "no-such-command" in done.stderr


def test_a_command_that_cannot_be_executed_is_named(tmp_path):
    done = subprocess.run(tie_to_parent([str(tmp_path)]), timeout=30, check=False, capture_output=True, text=True)
    assert done.returncode == 126
    assert str(tmp_path) in done.stderr


def test_it_dies_with_a_parent_that_is_killed(pidfd_of):
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = pidfd_of(int(parent.stdout.readline()))
        parent.kill()
        assert select.select([child], [], [], 20.0)[0], "the command outlives its parent"


def test_it_does_not_start_without_its_parent():
    command = tie_to_parent([sys.executable, "-c", "print('started')"])
    command[command.index(process_identity.mark())] = "1.0.0"  # somebody else's child
    done = subprocess.run(command, timeout=30, check=False, capture_output=True, text=True)
    assert done.returncode == 128 + 9
    assert done.stdout == ""
