"""Workloads: what makes no sense is named; partitions are the job's own."""
from __future__ import annotations

import math

import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.simulator.workload import Layer, one_bulk, partitioned, workload


@pytest.mark.parametrize(("layers", "words"), [
    ([], "no layers"), ([Layer("a", -1.0, 0.0, ())], "forward time of -1.0"),
    ([Layer("a", 0.0, math.nan, ())], "backward time"), ([Layer("a", 0, 0, ("x",))], "no shape"),
    ([Layer("a", 0, 0, ("w",)), Layer("b", 0, 0, ("w",))], "two layers")])
def test_bad_layers_are_named(layers: list[Layer], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        workload("job", layers, {"w": (4,)})


def test_a_bulk_has_its_bytes_and_tensors() -> None:
    assert one_bulk(1000, 3).nbytes == 1000 and len(one_bulk(1000, 3).shapes) == 3
    with pytest.raises(ConfigError, match="cannot be spread"):
        one_bulk(4, 2)


def test_a_fused_unit_belongs_to_all_its_layers() -> None:
    job = workload("job", [Layer("a", 1, 1, ("x",)), Layer("b", 1, 1, ("y", "big"))],
                   {"x": (10,), "y": (10,), "big": (100_000,)})
    alone, fused = partitioned(job, 4096), partitioned(job, 4096, fusion_nbytes=8192)
    assert [len(units) for units in alone.units_of_layer] == [1, 2] and alone.layers_of_unit == [1, 1, 1]
    assert fused.units_of_layer[0][0] in fused.units_of_layer[1] and sorted(fused.layers_of_unit) == [1, 2]
