"""How a node is wired to its peers: what they say ahead of its own plans, and how long that is kept."""
from __future__ import annotations

import pytest

from bpsfast.node.generation import Generation
from bpsfast.node.regions import Regions
from bpsfast.node.wiring import Wiring
from bpsfast.orchestration.messages import NodeInfo, Plan
from bpsfast.transport.shm import PeerExtents


@pytest.fixture
def wiring(vertex):
    me = NodeInfo(index=0, host="here", pid=1, address="", shm_name="", ranks=(0,), nic_rate_bytes=0.0)
    regions = Regions()
    yield Wiring(me, [me], vertex(n_ranks=1).engine, regions, {}, {}, [0])
    regions.close()


@pytest.mark.parametrize("is_succession", [False, True])
def test_what_was_said_of_a_generation_that_was_withdrawn_goes_with_the_next_commit(wiring, is_succession):
    for number in (3, 4, 5, 6):
        wiring.peer_said(None, 1, PeerExtents(generation=number, extents=()))
    generation = Generation(Plan(generation=5, units=()), is_succession=is_succession)
    (wiring.succeeded if is_succession else wiring.committed)(generation)
    assert set(wiring._early) == {6}, "the others were not, and will not be"
