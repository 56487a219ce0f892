"""Inputs leave an engine, and rounds are summed again without them."""
from __future__ import annotations

import numpy as np
import pytest

from bpsfast.pyx.engine import EVENT_FORWARD, EVENT_RESULT
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import DONE, TIMED_OUT
from tests.support.engine_node import PART, EngineNode, N


@pytest.fixture
def node():
    made = EngineNode(n_ranks=3, n_parts=2)
    yield made
    made.close()


def push(node, rank, part, round):
    node.ports[rank].submit(part, 1, round, 0, part * PART)


def fill(node, step):
    for rank in range(3):
        node.input(rank)[:] = (rank + 1) * 10**step


def without(node, rank, divisor=1, redone=()):
    """Go on without *rank*; *redone*: (part, kept round)."""
    node.engine.freeze(5)
    node.engine.detach(node.ranks[rank])
    for part in range(node.n_parts):
        node.engine.set_divisor(part, divisor)
    left = [node.engine.lose_input(part, node.ranks[rank]) for part in range(node.n_parts)]
    for part, kept in redone:
        node.engine.redo(part, kept, True)
    node.engine.commit(node.engine.generation + 1, list(range(node.n_parts)))
    return left


def test_a_round_that_waits_only_for_a_lost_rank_is_summed_without_it(node):
    node.own(0, divisor=3)
    node.own(1, divisor=3)
    node.commit()
    fill(node, 0)
    for rank in (0, 1):
        push(node, rank, 0, 1)
    assert node.ports[0].wait(0, 1, 1, 0.05) == TIMED_OUT
    assert without(node, 2, divisor=2) == [True, True]
    assert node.ports[0].wait(0, 1, 1, 5) == DONE
    assert (node.output(1)[0] == 1.5).all(), "the average of those that are left"
    fill(node, 1)
    for rank in (0, 1):
        push(node, rank, 0, 2)
    assert node.ports[0].wait(0, 1, 2, 5) == DONE and (node.output(2)[0] == 15).all()


def test_what_was_complete_with_the_lost_rank_is_summed_again(node):
    node.own(0)
    node.own(1)
    node.commit()
    fill(node, 0)
    for rank in range(3):
        push(node, rank, 0, 1)
    for rank in (0, 1):
        push(node, rank, 1, 1)
    assert node.ports[0].wait(0, 1, 1, 5) == DONE and (node.output(1)[0] == 6).all()
    assert not node.ports[0].done(0, 2, 1)
    without(node, 2, redone=[(0, 0), (1, 0)])
    assert node.ports[0].wait(0, 2, 1, 5) == DONE
    assert (node.output(1) == 3).all(), "both partitions, without the input of the lost rank"
    fill(node, 1)
    for rank in (0, 1):
        node.ports[rank].submit(0, 2, 2, 0, 0)
    assert node.ports[0].wait(0, 2, 2, 5) == DONE and (node.output(2) == 30).all()


def test_a_wait_for_several_partitions_notices_that_one_has_gone_back(node):
    """The last partition is looked at first: it is complete, goes back, and is complete again only after the other."""
    node.own(0)
    node.own(1)
    node.commit()
    for rank in range(3):
        push(node, rank, 1, 1)
    assert node.ports[0].wait(1, 1, 1, 5) == DONE
    node.engine.freeze(5)
    node.engine.lose_input(0, node.ranks[2])
    node.engine.lose_input(1, node.ranks[2])
    node.engine.redo(1, 0, False)
    assert not node.ports[0].done(1, 1, 1)
    node.engine.redo(1, 0, False)  # once more, as after another loss
    node.engine.redo(1, 0, True)
    node.engine.await_again(1, node.ranks[0])
    node.engine.commit(node.engine.generation + 1, [0, 1])
    for rank in (0, 1):
        push(node, rank, 0, 1)
    assert node.ports[0].wait(0, 1, 1, 5) == DONE and node.ports[0].wait(0, 2, 1, 0.05) == TIMED_OUT
    push(node, 0, 1, 1)
    assert node.ports[0].wait(0, 2, 1, 5) == DONE


def test_a_part_without_inputs_is_forgotten(node):
    node.own(0, local=node.ranks[:1])
    node.own(1)
    node.commit()
    node.engine.freeze(5)
    assert node.engine.lose_input(0, node.ranks[1]), "it has none of that rank"
    assert not node.engine.lose_input(0, node.ranks[0])
    with pytest.raises(ValueError, match="there is no such part"):
        node.engine.lose_input(0, node.ranks[0])
    node.engine.commit(node.engine.generation + 1, [0, 1])
    for rank in range(3):
        push(node, rank, 1, 1)
    assert node.ports[0].wait(1, 1, 1, 5) == DONE


def test_only_a_frozen_engine_loses_inputs(node):
    node.own(0)
    node.own(1)
    node.commit()
    for call in (lambda: node.engine.lose_input(0, node.ranks[0]), lambda: node.engine.set_divisor(0, 2),
                 lambda: node.engine.redo(0, 0, True),
                 lambda: node.engine.await_again(0, node.ranks[0])):
        with pytest.raises(ValueError, match="only a frozen engine"):
            call()
    node.engine.freeze(5)
    with pytest.raises(ValueError, match="at another round"):
        node.engine.redo(0, 7, True)
    node.engine.commit(node.engine.generation + 1, [0, 1])


def test_a_member_passes_its_partial_on_again():
    node = EngineNode(n_ranks=3, n_parts=1)
    try:
        owner, partial = node.engine.add_wire_peer(), Segment(PART)
        from bpsfast import kernels

        node.engine.add_member(0, nbytes=PART, n_elements=N, unit_offset=0, kernel=kernels.address("float32"),
                               local=node.ranks, owner=owner, partial=(partial.address, 0, 0))
        node.commit()
        fill(node, 0)
        for rank in range(3):
            push(node, rank, 0, 1)
        ((kind, _, _, round, _, address, _),) = node.engine.events(5)
        assert (kind, round, address) == (EVENT_FORWARD, 1, partial.address)
        assert (np.frombuffer(partial, np.float32) == 6).all()
        without(node, 1, redone=[(0, 0)])
        ((kind, _, _, round, _, _, _),) = node.engine.events(5)
        assert (kind, round) == (EVENT_FORWARD, 1) and (np.frombuffer(partial, np.float32) == 4).all()
        node.engine.arrived(owner, 0, 1, 0)
        assert node.ports[0].wait(0, 1, 1, 5) == DONE
    finally:
        node.close()


def test_what_came_while_frozen_is_dropped_and_what_follows_counts():
    node = EngineNode(n_ranks=1, n_parts=1)
    try:
        peer, slot = node.engine.add_wire_peer(), Segment(PART)
        node.own(0, local=node.ranks, after=[(peer, slot.address)], to_wire=True)
        node.commit()
        node.input(0)[:], np.frombuffer(slot, np.float32)[:] = 1, 5
        push(node, 0, 0, 1)
        node.engine.freeze(5)
        assert not node.engine.has_come(0, peer, 1)
        node.engine.arrived(peer, 0, 1, 0)
        assert node.engine.has_come(0, peer, 1)
        node.engine.drop_early(0, peer, 1)
        assert not node.engine.has_come(0, peer, 1)
        node.engine.commit(node.engine.generation + 1, [0])
        assert node.ports[0].wait(0, 1, 1, 0.05) == TIMED_OUT
        np.frombuffer(slot, np.float32)[:] = 2
        node.engine.arrived(peer, 0, 1, 0)
        assert node.ports[0].wait(0, 1, 1, 5) == DONE and (node.output(1)[0] == 3).all()
        ((kind, *_),) = node.engine.events(5)
        assert kind == EVENT_RESULT
    finally:
        node.close()


def test_an_empty_input_stays_empty_when_a_round_is_summed_again(node):
    node.own(0)
    node.own(1)
    node.commit()
    fill(node, 0)
    node.ports[0].submit(0, 1, 1, 0, 0, True)
    for rank in (1, 2):
        push(node, rank, 0, 1)
    assert node.ports[0].wait(0, 1, 1, 5) == DONE and (node.output(1)[0] == 5).all()
    without(node, 2, redone=[(0, 0)])
    assert node.ports[0].wait(0, 1, 1, 5) == DONE and (node.output(1)[0] == 2).all()


def test_the_board_says_how_many_ranks_are_lost(node):
    assert node.ports[0].n_lost == 0
    node.engine.set_n_lost(2)
    assert [port.n_lost for port in node.ports] == [2] * 3
