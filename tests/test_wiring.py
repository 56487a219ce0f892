"""How a node is wired to its peers: what they say ahead of its own plans, and how long that is kept."""
from __future__ import annotations

import pytest

from bpsfast.node.generation import Generation
from bpsfast.node.regions import Regions
from bpsfast.node.wiring import Wiring
from bpsfast.orchestration.messages import NodeInfo, Plan
from bpsfast.transport.shm import PeerExtents
from bpsfast.transport.tcp import TcpLink


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


@pytest.fixture
def newcomer(vertex):
    """The wiring of helper 1, to which node 0 writes over a wire; with memory for so many bytes, or any number."""
    made = []

    def make(max_nbytes=0):
        nodes = [NodeInfo(index=index, host="here", pid=1, address="", shm_name="", ranks=ranks, nic_rate_bytes=0.0)
                 for index, ranks in enumerate([(0,), ()])]
        made.append(Regions(max_nbytes))
        return made[-1], Wiring(nodes[1], nodes, vertex(n_ranks=1).engine, made[-1], {0: TcpLink(0, {})}, {0: 0}, [])

    yield make
    for regions in made:
        regions.close()


def test_who_comes_late_has_memory_at_hand_before_everybody_waits(newcomer):
    regions, wiring = newcomer()
    wiring.warm([("float32", "sum")], 10 << 20)
    assert (regions.results.free_nbytes, regions.slots.free_nbytes) == (20 << 20, 10 << 20)
    n_segments = regions.n_segments
    for arena, n in ((regions.results, 2), (regions.slots, 1)):
        for _ in range(10 * n):
            arena.allocate(1 << 20)
    assert regions.n_segments == n_segments == 2


@pytest.mark.parametrize("max_nbytes", [20 << 20, 1 << 20])
def test_memory_at_hand_is_no_less_to_own(newcomer, max_nbytes):
    regions, wiring = newcomer(max_nbytes)
    before = wiring.ownable_nbytes
    wiring.warm([], 10 << 20)
    assert regions.nbytes <= max_nbytes and wiring.ownable_nbytes >= before
