"""The examples of the README run as they stand there."""
from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, re.S | re.M)
COMMANDS = [line.partition("#")[0].strip() for line in re.findall(r"^bpsfast .*$", README, re.M)]
BPSFAST = str(Path(sys.executable).with_name("bpsfast"))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=["torch", "numpy", "jax", "tensorflow", "keras", "elastic"])
def test_program(program: str, tmp_path: Path) -> None:
    for name in re.findall(r"^import (torch|jax|optax|tensorflow|keras)\b", program, re.M):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if "import keras" in program and importlib.util.find_spec("tensorflow") is None:
        environ["KERAS_BACKEND"] = "torch"
    (tmp_path / "train.py").write_text(program)
    command = [BPSFAST, "run", "-n", "2", "--timeout", "90", "--", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_understood(command: str) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "run":
        words[1:1] = ["--dry-run"]
    done = subprocess.run([BPSFAST, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
