"""A step's trace shows a partition on its way to the host while others are summed, sent, and on their way back."""
from __future__ import annotations

import importlib

import numpy as np
import pytest

import bpsfast
from bpsfast import trace
from bpsfast.gpu.host import HostArray
from bpsfast.trainer.gradients import Gradients


def steps():
    """A large tensor beside gradients, some steps long."""
    x = np.ones(1 << 20, "f4").view(HostArray)
    g = Gradients({f"layer{i}": ((200_000,), "f4") for i in range(4)}, group_small=False, device="host")
    for _ in range(3):
        handle = bpsfast.push_pull_async(x, name="large", out=x)
        for name in reversed(list(g)):
            g.ready(name)
        for name in g:
            g.wait(name)
        g.step()
        bpsfast.synchronize(handle)
    return float(x.sum())


def overlap(some, others):
    """Return how many of *some* overlap in time with one of *others* that is of another partition."""
    return sum(any(one.begin_ns < other.end_ns and other.begin_ns < one.end_ns and one.key != other.key
                   for other in others) for one in some)


@pytest.mark.parametrize("shape", [(2,), (1, 1)], ids=["one-node", "tcp"])
def test_stages_overlap_between_partitions(tmp_path, job, shape):
    started = job(ranks=shape, transport="tcp" if len(shape) > 1 else "auto", trace_dir=str(tmp_path),
                  partition_bytes=65_536)
    assert started.run(steps) == [float(1 << 20)] * 2
    started.close()
    whole = trace.load(tmp_path)
    assert whole.clocks.number == 1, "spans of all processes are on one clock"
    spans = {}
    for process in whole.processes:
        for span in process.spans:
            spans.setdefault(span.kind, []).append(span)
    n_parts = 64 + 4 * 13
    for kind in "to host", "to device":
        assert len(spans[kind]) == 2 * 3 * n_parts, "each partition of each rank and step, once"
        assert sum(span.args["nbytes"] for span in spans[kind]) == 2 * 3 * ((4 << 20) + 4 * 800_000)
    assert "copy in" not in spans
    assert "deliver" not in spans
    between = ["sum", "wire"] if len(shape) > 1 else ["sum"]
    for kind in between:
        assert overlap(spans["to host"], spans[kind]) > 0
        assert overlap(spans["to device"], spans[kind]) > 0
    assert overlap(spans["to host"], spans["to device"]) > 0
    sums = {}
    for span in spans["sum"]:
        sums[span.key] = max(span.end_ns, sums.get(span.key, 0))
    for span in spans["to device"]:
        assert span.begin_ns >= sums[span.key], "a sum goes back when it is complete"
    trace.merge(tmp_path, tmp_path / "trace.json")
    importlib.import_module("tests.support.trace_format").check(tmp_path / "trace.json")
