"""examples/cupy_trainer.py: the same weights on all ranks, and by the host device as by shared memory alone."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "cupy_trainer.py"


def trained(device, *shape):
    """Return the weights of all ranks in one short word each, and which share was read right."""
    command = [str(Path(sys.executable).with_name("bpsfast")), "run", *shape, "--timeout", "90", "--", sys.executable,
               str(EXAMPLE), "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"weights ([0-9a-f]{16})", done.stdout), float(re.findall(r"([\d.]+)% of", done.stdout)[0])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [("-n", "2"), ("-n", "3", "--nodes", "2", "--set", "transport=tcp")],
                         ids=["one node", "two nodes"])
def test_the_host_device_gives_the_same_weights(shape):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    (by_device, read_right), (by_memory, _) = trained("host", *shape), trained("none", *shape)
    assert len(by_device) == len(by_memory) == int(shape[1])
    assert len({*by_device, *by_memory}) == 1
    assert read_right > 85
