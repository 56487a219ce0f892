"""What gradients on a GPU take of memory, and that everything they are copied from and to is pinned."""
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from bpsfast.bench.device import footprint  # noqa: E402
from bpsfast.bench.device.rank import hardware  # noqa: E402
from tests.gpu.place import REHEARSES  # noqa: E402
from tests.gpu.ranks import start_ranks  # noqa: E402

NBYTES = 32 << 20


def measured(way):
    return footprint.measure(hardware("host" if REHEARSES else "cuda"), way, NBYTES)._asdict()


@pytest.mark.parametrize(("way", "on_device", "at_most"), [
    ("push_pull in place", 0, 0), ("push_pull", 1, 2), ("DistributedOptimizer fp16", 0, 0.5)])
def test_of_each_byte(way, on_device, at_most):
    job = start_ranks()
    try:
        for found in job.run(measured, way):
            share = 0.5 if "fp16" in way else 1
            assert found["input_nbytes"] / NBYTES == pytest.approx(share, rel=0.3)
            assert found["result_nbytes"] / NBYTES == pytest.approx(2 * share, rel=0.3)
            assert found["pinned_nbytes"] == found["input_nbytes"] + found["result_nbytes"], "what is pinned"
            if not REHEARSES:
                assert found["device_nbytes"] / NBYTES == pytest.approx(on_device, abs=0.05)
                assert found["device_peak_nbytes"] / NBYTES <= at_most + 0.05
    finally:
        job.close()
