"""How a node is wired to its peers: what they say ahead of its own plans, and how long that is kept."""
from __future__ import annotations

import pytest

from bpsfast.node.generation import Generation, UnitResources
from bpsfast.node.plan_installer import PlanInstaller
from bpsfast.node.regions import Regions
from bpsfast.node.transport.shm import PeerExtents
from bpsfast.node.transport.tcp import TcpLink
from bpsfast.orchestration.errors import PeerLostError
from bpsfast.orchestration.messages import (
    Extent,
    MemberPlan,
    NodeInfo,
    OwnerChange,
    PartPlan,
    Plan,
    Recover,
    UnitPlan,
)


@pytest.fixture
def installer(engine_node):
    me = NodeInfo(index=0, host="here", pid=1, address="", shm_name="", ranks=(0,), nic_rate_bytes=0.0)
    regions = Regions()
    yield PlanInstaller(me, [me], engine_node(n_ranks=1).engine, regions, {}, {}, [0])
    regions.close()


@pytest.mark.parametrize("is_owner_change", [False, True])
def test_what_was_said_of_a_generation_that_was_withdrawn_goes_with_the_next_commit(installer, is_owner_change):
    for number in (3, 4, 5, 6):
        installer.peer_message(None, 1, PeerExtents(generation=number, extents=()))
    generation = Generation(Plan(generation=5, units=()), is_owner_change=is_owner_change)
    (installer.succeeded if is_owner_change else installer.committed)(generation)
    assert set(installer._early) == {6}, "the others were not, and will not be"


@pytest.fixture
def newcomer(engine_node):
    """The plan installer of helper 1, to which node 0 writes over a wire; with limited or any memory."""
    made = []

    def make(max_nbytes=0):
        nodes = [NodeInfo(index=index, host="here", pid=1, address="", shm_name="", ranks=ranks, nic_rate_bytes=0.0)
                 for index, ranks in enumerate([(0,), ()])]
        made.append(Regions(max_nbytes))
        engine = engine_node(n_ranks=1).engine
        return made[-1], PlanInstaller(nodes[1], nodes, engine, made[-1], {0: TcpLink(0, {})}, {0: 0}, [])

    yield make
    for regions in made:
        regions.close()


def test_who_comes_late_has_memory_at_hand_before_everybody_waits(newcomer):
    regions, installer = newcomer()
    installer.warm([("float32", "sum")], 10 << 20)
    assert (regions.results.free_nbytes, regions.slots.free_nbytes) == (20 << 20, 10 << 20)
    n_segments = regions.n_segments
    for arena, n in ((regions.results, 2), (regions.slots, 1)):
        for _ in range(10 * n):
            arena.allocate(1 << 20)
    assert regions.n_segments == n_segments == 2


@pytest.mark.parametrize("max_nbytes", [20 << 20, 1 << 20])
def test_memory_at_hand_is_no_less_to_own(newcomer, max_nbytes):
    regions, installer = newcomer(max_nbytes)
    before = installer.ownable_nbytes
    installer.warm([], 10 << 20)
    assert regions.nbytes <= max_nbytes and installer.ownable_nbytes >= before


@pytest.mark.parametrize("new_owner", [0, 1])
def test_nobody_inherits_what_lies_on_a_device_and_cannot_reach_it(installer, new_owner):
    """Neither the node itself nor one behind tcp; what lies in memory goes on as ever."""
    unit = UnitPlan(unit=0, name="u", dtype="float32", average=False, priority=0, nbytes=8192, stride=4096,
                    members=(MemberPlan(name="w", shape=(2048,), offset=0, nbytes=8192),),
                    parts=tuple(PartPlan(part=part, offset=4096 * part, nbytes=4096, owner=new_owner)
                                for part in (0, 1)))
    installer._links = {1: TcpLink(1, {})}
    installer._unit_resources[0] = UnitResources(extents={
        part: Extent(node=0, segment=0, offset_even=0, offset_odd=0, nbytes=4096, on_device=part == 1)
        for part in (0, 1)})

    def recover(*parts):
        return Recover(epoch=1, generation=1, units=(unit,),
                       owner_changes=tuple(OwnerChange(part=part, owner=new_owner, kept_round=1) for part in parts))

    installer._require_reach(recover(0))
    who = "this node" if new_owner == 0 else "node 1"
    with pytest.raises(PeerLostError, match=f"{who} would sum a partition of 'w'.*GPU memory.*BPSFAST_GPU_DIRECT"):
        installer._require_reach(recover(0, 1))
