"""The package's face: names, cost of importing, and a tree that was not built."""
from __future__ import annotations

import subprocess
import sys

import bpsfast


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


def test_a_tree_that_was_not_built_says_what_to_do():
    done = program("import sys; sys.modules['bpsfast.pyx.port'] = None\nimport bpsfast\nbpsfast.init()")
    assert done.returncode == 1
    assert "ImportError: bpsfast.init needs the native module bpsfast.pyx.port" in done.stderr
    assert "pip install" in done.stderr
