"""Tests the package's public names, the cost of importing it, and a tree that was not built."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

import bpsfast
from bpsfast.base.settings import environment, load, take_job_key

KEY = "ab" * 32


@pytest.fixture
def key_in_environment(monkeypatch):
    """Restore the job key of this process after the test."""
    monkeypatch.setattr("bpsfast.base.settings._taken_key", "")
    monkeypatch.setenv("BPSFAST_JOB_KEY", KEY)


def program(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def test_every_public_name_exists():
    for name in bpsfast.__all__:
        assert getattr(bpsfast, name) is not None and name in dir(bpsfast)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(bpsfast, "all_reduce")


def test_importing_costs_nothing():
    done = program("import sys, bpsfast\n"
                   "heavy = 'numpy', 'numba', 'torch', 'zmq', 'bpsfast.trainer.session'\n"
                   "print([name for name in heavy if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_using_it_imports_neither_numba_nor_torch_nor_zeromq():
    done = program("import sys, bpsfast; bpsfast.Gradients, bpsfast.push_pull, bpsfast.broadcast, bpsfast.init\n"
                   "print([m for m in ('numba', 'torch', 'scipy') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_node_loads_nothing_that_it_does_not_need():
    done = program("import sys, bpsfast.cli, bpsfast.launch.daemons, bpsfast.node.main\n"
                   "heavy = ('numpy', 'numba', 'llvmlite', 'http.server', 'ssl', 'importlib.metadata', 'tempfile',\n"
                   "         'importlib.resources', 'bpsfast.trainer.session')\n"
                   "print([name for name in heavy if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_tree_that_was_not_built_says_what_to_do():
    done = program("import sys; sys.modules['bpsfast.pyx.port'] = None\nimport bpsfast\nbpsfast.init()")
    assert done.returncode == 1
    assert "ImportError: bpsfast.init needs the native module bpsfast.pyx.port" in done.stderr
    assert "pip install" in done.stderr


#: Prints the environment of a child and the session's key, in this process and in a fork that joins another job.
_JOINS_AGAIN = """
import os, subprocess, sys, bpsfast
from bpsfast.trainer import process

def given():
    text = 'import os; print([os.environ.get("BPSFAST_JOB_KEY" + name) for name in ("", "_FILE")])'
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.strip()

for number in range(2):
    bpsfast.init()
    print(given(), process.current().role.job_key.hex(), flush=True)
    child = os.fork() if "RANK" not in os.environ else os.getpid()
    if child == 0:
        bpsfast.init()
        print(given(), process.current().role.job_key.hex(), flush=True)
        bpsfast.shutdown()
        os._exit(0)
    if child != os.getpid():
        os.waitpid(child, 0)
    bpsfast.shutdown()
"""


_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0",
             "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}


@pytest.mark.parametrize("launcher", [{}, _TORCHRUN], ids=["none", "torchrun"])
def test_what_a_rank_starts_is_not_given_the_key_and_joining_again_works(launcher):
    environ = {**os.environ, **launcher, "BPSFAST_JOB_KEY": KEY, "BPSFAST_JOB_KEY_FILE": "/a/path/is/no/secret"}
    done = subprocess.run([sys.executable, "-c", _JOINS_AGAIN], env=environ, capture_output=True, text=True,
                          timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    n_times = 2 if launcher else 4  # a fork has the rank of its parent, which is taken under torchrun
    assert done.stdout.splitlines() == [f"[None, '/a/path/is/no/secret'] {KEY}"] * n_times, done.stderr


@pytest.mark.usefixtures("key_in_environment")
def test_a_key_that_was_taken_out_of_the_environment_is_known_still():
    take_job_key()
    take_job_key()
    assert "BPSFAST_JOB_KEY" not in os.environ
    assert load().job_key == load(None, os.environ).job_key == KEY
    assert environment(load())["BPSFAST_JOB_KEY"] == KEY, "nodes and schedulers that a rank starts are given it"
    assert load({}, {}).job_key == "" and load({"job_key": "cd" * 32}).job_key == "cd" * 32


@pytest.mark.usefixtures("key_in_environment")
def test_a_key_that_is_set_anew_is_that_of_the_next_job(monkeypatch):
    take_job_key()
    monkeypatch.setenv("BPSFAST_JOB_KEY", "cd" * 32)
    assert load().job_key == "cd" * 32
    take_job_key()
    assert load().job_key == "cd" * 32
