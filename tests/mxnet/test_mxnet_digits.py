"""The MXNet example: all ranks end with bit-equal weights."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mxnet", reason="mxnet is not installed: make test-mxnet")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")


@pytest.mark.slow
def test_replicas_are_equal():
    example = Path(__file__).resolve().parents[2] / "examples" / "mxnet_digits.py"
    job = [Path(sys.executable).with_name("bpsfast"), "run", "-n", "4", "--nodes", "2", "--helpers", "1", "--"]
    done = subprocess.run([*job, sys.executable, example], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = re.findall(r"rank (\d): accuracy (\S+), parameters (\w+)", done.stdout)
    assert sorted(rank for rank, _, _ in ranks) == list("0123") and len({digest for _, _, digest in ranks}) == 1
    assert all(float(accuracy) > 0.85 for _, accuracy, _ in ranks)
