"""What GPUDirect asks of the islands of a machine: one of all, whose one root is the rank that the settings name."""
from __future__ import annotations

import pytest

from bpsfast.base.settings import Settings
from bpsfast.collectives.island_routes import _Member, _routes
from bpsfast.orchestration.errors import ConfigError

HERE = [_Member(4, 1, 0, ""), _Member(5, 1, 1, "")]


def test_the_root_that_is_named():
    found = _routes(HERE, Settings(gpu_direct=True, islands="auto", reduce_roots="1"))
    assert found.islands() == [(4, 5)]
    assert {found.partition_route(part, rank).root for part in range(20) for rank in (4, 5)} == {5}


def test_several_roots_and_islands_are_none():
    with pytest.raises(ConfigError, match=r"BPSFAST_GPU_DIRECT is on.*roots \[4, 5\].*now by topology"):
        _routes(HERE, Settings(gpu_direct=True, islands="auto", pcie_switch_size=2))
    with pytest.raises(ConfigError, match=r"islands \[\(4,\), \(5,\)\]"):
        _routes(HERE, Settings(gpu_direct=True, islands="auto", pcie_switch_size=1))


def test_ranks_that_share_a_gpu_are_no_island():
    shared = [_Member(0, 0, 0, "0000:3b:00.0"), _Member(1, 0, 1, "0000:3b:00.0")]
    with pytest.raises(ConfigError, match="share GPUs"):
        _routes(shared, Settings(gpu_direct=True, islands="auto", reduce_roots="0"))
