"""Tests that `import byteps.torch` finds bpsfast.torch where the alias is installed, and no other module of ours."""
from __future__ import annotations

import subprocess
import sys

import pytest


def run(program, tmp_path, *words):
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, *words, "program.py", "--epochs", "3"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)


SAME = """
import sys
import byteps.torch as bps
import bpsfast.byteps_alias, bpsfast.torch
import byteps.torch.cross_barrier as crossing
from byteps.torch.ops import push_pull_async_inplace, poll, synchronize
from byteps.torch.compression import Compression
from byteps.torch.parallel import DistributedDataParallel as DDP

assert bps is bpsfast.torch and sys.modules["byteps"].torch is bps
assert DDP is bpsfast.torch.DistributedDataParallel and crossing.CrossBarrier is bps.CrossBarrier
assert push_pull_async_inplace is bps.byteps_push_pull and Compression is bps.Compression
try:
    import byteps.server
except ModuleNotFoundError as exc:
    assert "byteps.torch.ops" in str(exc) and exc.name == "byteps.server"
else:
    raise AssertionError("byteps.server was found")
try:
    import byteps.torch.broadcast
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("a module was loaded a second time")
assert bpsfast.torch.__spec__.name == "bpsfast.torch" and "tensorflow" not in sys.modules
bps.init()
print(sys.argv[1:], __name__, bps.size(), sys.path[0])
bps.shutdown()
"""


def test_an_unchanged_program(tmp_path):
    done = run(SAME, tmp_path, "-m", "bpsfast.byteps_alias")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"['--epochs', '3'] __main__ 1 {tmp_path.resolve()}"


def test_one_line_in_the_program(tmp_path):
    done = run("import bpsfast.byteps_alias\n" + SAME, tmp_path)
    assert done.returncode == 0, done.stderr


def test_it_is_not_there_unasked(tmp_path):
    done = run("import bpsfast.torch\nimport byteps.torch", tmp_path)
    assert "No module named 'byteps'" in done.stderr


def test_byteps_itself_is_not_hidden(tmp_path):
    (tmp_path / "byteps").mkdir()
    (tmp_path / "byteps" / "__init__.py").touch()
    done = run("import bpsfast.byteps_alias", tmp_path)
    assert done.returncode == 1 and "BytePS itself is installed" in done.stderr


@pytest.mark.parametrize("words", [["-m", "bpsfast.byteps_alias"]])
def test_a_program_is_needed(words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "which program?" in done.stderr
