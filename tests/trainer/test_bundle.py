"""The tensors that one call of a framework sums: among ranks of one machine by themselves, else by nodes."""
from __future__ import annotations

import numpy as np
import pytest

import bpsfast
from bpsfast.trainer import process
from bpsfast.trainer.bundle import Bundle, Leaf, specs_of

#: By name the shapes; the small ones are fused, up to the setting's bytes.
SHAPES = {"small": (10,), "scalar": (), "empty": (0, 3), "matrix": (30, 40), "large": (1 << 20,)}


def sums(steps, in_place):
    """Sum a bundle a few times; return how many of its sums were direct, by unit."""
    leaves = [Leaf(f"{name} {in_place}", shape, "float32") for name, shape in SHAPES.items()]
    bundle = Bundle(process.current(), specs_of(leaves, False, [None] * len(leaves)))
    for step in range(steps):
        sources = [np.full(leaf.shape, bpsfast.rank() + step + 1, np.float32) for leaf in leaves]
        targets = sources if in_place else [np.zeros_like(x) for x in sources]
        bundle.run([x.ctypes.data for x in sources], [x.ctypes.data for x in targets])
        total = sum(rank + step + 1 for rank in range(bpsfast.size()))
        assert all((x == total).all() for x in targets), step
    units = {process.current().tensors.unit(leaf.name) for leaf in leaves if 0 not in leaf.shape}
    return {len(unit.members): unit.direct.n_sums if unit.direct is not None else None for unit in units}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("shape", "values", "expected"), [
    ((2,), {"direct_sums": "auto"}, {3: 5, 1: 5}), ((2,), {"direct_sums": "off"}, {3: None, 1: None}),
    ((1,), {"direct_sums": "auto"}, {3: 5, 1: 5}), ((1, 1), {"direct_sums": "auto"}, {3: None, 1: None})])
def test_each_tensor_gets_its_sum(job, shape, values, expected, in_place):
    assert job(ranks=shape, fusion_bytes=1 << 20, **values).run(sums, 5, in_place) == [expected] * sum(shape)


def overlapping():
    """One rank's target overlaps its source, so that the node sums; return what the ranks have counted."""
    bundle = Bundle(process.current(), specs_of([Leaf("overlapping", (1000,), "float32")], False, [None]))
    for step in range(4):
        memory = np.ones(1500, np.float32)
        source, target = memory[500:], memory[:1000] if bpsfast.rank() == 0 and step % 2 else np.zeros(1000, np.float32)
        bundle.run([source.ctypes.data], [target.ctypes.data])
        assert (target == 2).all(), step
    direct = process.current().tensors.unit("overlapping").direct
    return direct.n_sums, direct.n_declined


def test_a_target_that_overlaps_its_source_is_summed_by_the_node(job):
    assert job(ranks=(2,), direct_sums="auto").run(overlapping) == [(2, 0), (2, 2)]


def wide():
    leaves = [Leaf(f"w{i}", (20_000,), "float32") for i in range(4)]
    bundle = Bundle(process.current(), specs_of(leaves, True, [None] * 4))
    xs = [np.full(20_000, i + bpsfast.rank(), np.float32) for i in range(4)]
    bundle.run([x.ctypes.data for x in xs], [x.ctypes.data for x in xs])
    assert all((x == i + 0.5).all() for i, x in enumerate(xs))
    unit = process.current().tensors.unit("w0")
    return len(unit.members), unit.direct is not None


def test_fused_tensors_of_many_bytes_are_left_to_the_node(job):
    assert job(ranks=(2,), fusion_bytes=1 << 20, direct_sums="auto").run(wide) == [(4, False)] * 2
