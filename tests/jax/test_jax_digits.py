"""The JAX example: all ranks end with bit-equal weights, those of one process that adds in the same order."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed: pip install bpsfast[jax]")
pytest.importorskip("optax", reason="optax is not installed: pip install bpsfast[jax]")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "jax_digits.py")
BPSFAST = str(Path(sys.executable).with_name("bpsfast"))


def output_of(*command):
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"(rank \d|alone): accuracy (\S+), parameters (\w+)", done.stdout)


@pytest.mark.slow
def test_replicas_are_equal_and_those_of_one_process():
    ranks = output_of(BPSFAST, "run", "-n", "4", "--nodes", "2", "--helpers", "1", "--", sys.executable, EXAMPLE)
    assert sorted(who for who, _, _ in ranks) == [f"rank {n}" for n in range(4)]
    (alone,), (otherwise,) = (output_of(sys.executable, EXAMPLE, "--alone", nodes) for nodes in ("2,2", "4"))
    assert {digest for _, _, digest in ranks} == {alone[2]} != {otherwise[2]}, "and the order of addition matters"
    assert float(alone[1]) > 0.9
