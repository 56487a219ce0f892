"""Members: who pushes a unit, as each node sees it."""
from __future__ import annotations

import contextlib
import socket

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.node.generation import Generation, is_of
from bpsfast.node.partition_role import Members, members_of
from bpsfast.node.transport.tcp import TcpLink
from bpsfast.orchestration.messages import NodeInfo, Plan, UnitPlan

#: Ranks 0 and 1, 2, 3 and 4 on three nodes, and a helper. Ranks of a node need not follow one another.
NODES = [NodeInfo(index=i, host="a", pid=1, address="", shm_name="", ranks=ranks, nic_rate_bytes=0.0)
         for i, ranks in enumerate([(0, 3), (2,), (1, 4), ()])]
#: What an engine calls the ranks of a node.
LOCAL = {0: [7, 9], 1: [4], 2: [5, 6], 3: []}


@pytest.fixture(scope="module")
def wires():
    """Links over a wire to every node but the one that asks, as node 1 has them to 0 and 2, and all to the helper."""
    with contextlib.ExitStack() as stack:
        found = {}
        for index in range(len(NODES)):
            near, far = socket.socketpair()
            stack.callback(far.close)
            found[index] = TcpLink(index, {0: near}, n_slots=1)
            stack.callback(found[index].close)
        yield found


def of(node, ranks, wires, wired):
    links = {index: wires[index] for index in wired if index != node}
    return members_of(ranks, NODES[node], NODES, links, LOCAL[node])


def test_all_ranks(wires):
    assert of(0, (), wires, (1, 2, 3)) == Members(n_ranks=5, nodes=(0, 1, 2), wired=(1, 2), local=(7, 9))
    assert of(3, (), wires, (0, 1)) == Members(n_ranks=5, nodes=(0, 1, 2), wired=(0, 1), local=())


@pytest.mark.parametrize(("node", "ranks", "expected"), [
    (0, (0, 2), Members(2, (0, 1), (1,), (7,))),
    (0, (3,), Members(1, (0,), (), (9,))),
    (1, (0, 2), Members(2, (0, 1), (0,), (4,))),
    (2, (0, 2), Members(2, (0, 1), (0, 1), ())),
    (2, (1, 3, 4), Members(3, (0, 2), (0,), (5, 6))),
    (3, (4,), Members(1, (2,), (2,), ())),
])
def test_some_ranks(wires, node, ranks, expected):
    assert of(node, ranks, wires, range(4)) == expected


@settings(deadline=None)
@given(st.sets(st.integers(0, 4), min_size=1), st.sets(st.integers(0, 3)))
def test_every_rank_is_somewhere_and_no_other(ranks, wired):
    links = dict.fromkeys(wired)  # none of them a wire
    seen = [members_of(tuple(sorted(ranks)), node, NODES, links, LOCAL[node.index]) for node in NODES]
    assert {each.nodes for each in seen} == {tuple(node.index for node in NODES if set(node.ranks) & ranks)}
    assert [len(each.local) for each in seen] == [len(set(node.ranks) & ranks) for node in NODES]
    assert all((each.n_ranks, each.wired) == (len(ranks), ()) for each in seen)


def unit(ranks):
    return UnitPlan(unit=0, name="x", dtype="int8", average=False, priority=0, nbytes=0, stride=4096, members=(),
                    parts=(), ranks=ranks)


@pytest.mark.parametrize(("ranks", "asked", "expected"), [
    ((), (3,), True), ((), (), False), ((1, 3), (3, 4), True), ((1, 3), (2, 4), False), ((1, 3), (), False)])
def test_whom_a_unit_and_its_generation_concern(ranks, asked, expected):
    assert is_of(unit(ranks), asked) is expected
    generation = Generation(Plan(generation=1, units=(unit(ranks), unit(ranks))))
    assert generation.concerns(asked) is expected
