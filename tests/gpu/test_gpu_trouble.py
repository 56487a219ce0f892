"""What goes wrong on a GPU is said in words, to whoever waits, and the job ends."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import bpsfast.torch as bps  # noqa: E402
from bpsfast.orchestration.errors import UnsupportedError  # noqa: E402
from tests.gpu.ranks import start_ranks  # noqa: E402

pytestmark = pytest.mark.cuda

EXAMPLE = Path(__file__).parents[2] / "examples" / "cupy_trainer.py"


def refused():
    said = []
    for call in (lambda: bps.push_pull(torch.zeros(4, 6, device="cuda").t(), name="refused"),
                 lambda: bps.push_pull(torch.zeros(4, device="meta"), name="refused"),
                 lambda: bps.push_pull(torch.zeros(4, dtype=torch.complex64, device="cuda"), name="refused"),
                 lambda: bps.push_pull(torch.eye(4, device="cuda").to_sparse(), name="refused")):
        try:
            call()
        except UnsupportedError as exc:
            said.append(str(exc))
        else:
            said.append("taken")
    return said


def test_what_is_refused(gpu_job):
    for transposed, elsewhere, dtype, sparse in gpu_job.run(refused):
        assert "not contiguous: use tensor.contiguous()" in transposed
        assert "is on meta" in elsewhere and "cannot be summed" in dtype and "not dense" in sparse


def without_cupy():
    sys.modules["cupy"] = None  # as where it is not installed
    try:
        bps.push_pull(torch.zeros(4, device="cuda"), name="without CuPy")
    except UnsupportedError as exc:
        return str(exc)
    finally:
        del sys.modules["cupy"]
    return "taken"


def test_without_cupy():
    job = start_ranks()
    try:
        for said in job.run(without_cupy):
            assert "CuPy, which is not installed: pip install bpsfast[cuda]" in said
    finally:
        job.close()


def broken():
    x = torch.zeros(1000, device="cuda")
    bps.push_pull(x, name="broken")
    if bps.rank() == 0:
        x[torch.full((1,), 10**9, device="cuda")] = 1  # a device-side assertion: nothing of the context works any more
    bps.push_pull(x, name="broken")
    return "summed"


def test_a_kernel_that_fails_is_said_to_whoever_waits():
    job = start_ranks(timeout_s=10)
    try:
        first, second = job.attempt(broken)
        assert first.error == "DeviceError" and "CUDA_LAUNCH_BLOCKING=1" in first.text, first
        assert second.error in ("StallError", "PeerLostError"), second
    finally:
        job.kill()


@pytest.mark.slow
def test_the_example():
    command = [sys.executable, "-m", "bpsfast", "run", "-n", "2", "--timeout", "100", "--", sys.executable,
               str(EXAMPLE), "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.rpartition(": ")[2] for line in done.stdout.splitlines() if " weights " in line]
    assert len(lines) == 2 and lines[0] == lines[1] and float(lines[0].split("%")[0]) > 85
