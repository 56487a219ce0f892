"""An engine that gives up a part that it owned to a node that has come: what it passes on, and what it drops."""
from __future__ import annotations

import errno

import numpy as np
import pytest

from bpsfast import kernels
from bpsfast.pyx import engine as native
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import DONE
from tests.support.engine_node import PART, N


class Giver:
    """An engine that owns part 0, to which the node `peer` adds; `new_owner` and `third` are nodes that join later."""

    def __init__(self, v, **owned):
        self.v, self.engine = v, v.engine
        self.peer, self.new_owner, self.third = (self.engine.add_wire_peer() for _ in range(3))
        self.slot, self.partial = Segment(PART), Segment(PART)
        v.own(0, before=[(self.peer, self.slot.address)], to_wire=True, **owned)
        v.commit()

    def push(self, round_, only=None):
        for rank in range(self.v.n_ranks) if only is None else only:
            self.v.input(rank)[0] = 10 * rank + round_
            self.v.ports[rank].submit(0, 1, round_, 0, 0)

    def round(self, round_):
        np.frombuffer(self.slot, np.float32)[:] = 100
        self.engine.arrived(self.peer, 0, round_, 0)
        self.push(round_)
        (event,) = self.engine.events(10)
        assert event[:4] == (native.EVENT_RESULT, 0, 0, round_)

    def become_member(self, kept_round):
        self.engine.add_member(0, nbytes=PART, n_elements=N, unit_offset=0, kernel=kernels.address("float32"),
                               local=self.v.ranks, owner=self.new_owner, partial=(self.partial.address, 3, 64),
                               kept_round=kept_round)

    def commit(self):
        self.engine.commit(self.engine.generation + 1, [0] * self.v.n_parts)


@pytest.fixture
def giver(engine_node):
    return lambda n_ranks=1, **owned: Giver(engine_node(n_ranks=n_ranks, n_parts=2), **owned)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_what_ranks_here_have_pushed_goes_to_the_heir(giver, n_ranks):
    g = giver(n_ranks)
    g.round(1)
    g.push(2)
    g.engine.freeze(5)
    g.engine.arrived(g.peer, 0, 2, 0)  # the peer sends that to the new_owner as well
    g.become_member(1)
    assert g.engine.progress(0) == (1, 1)
    g.commit()
    (event,) = g.engine.events(10)
    address = g.v.inputs[0].address if n_ranks == 1 else g.partial.address
    assert event == (native.EVENT_FORWARD, g.new_owner, 0, 2, 0, address, PART)
    if n_ranks == 2:
        assert (np.frombuffer(g.partial, np.float32) == 2 + 12).all()
    assert g.engine.counters()["stale"] == 1
    g.engine.arrived(g.new_owner, 0, 2, 0)
    assert all(port.wait(0, 1, 2, 10) == DONE for port in g.v.ports)


def test_what_some_ranks_have_pushed_waits_for_the_others(giver):
    g = giver(2)
    g.round(1)
    g.push(2, only=[1])
    g.engine.freeze(5)
    g.become_member(1)
    g.commit()
    assert g.engine.events(0.05) == []
    g.push(2, only=[0])
    assert g.engine.events(10)[0][:4] == (native.EVENT_FORWARD, g.new_owner, 0, 2)


def test_an_input_that_was_on_its_way_is_dropped_once_it_comes(giver):
    """Whether ranks here push the part or not; anything else of a peer is nonsense."""
    for has_ranks in (True, False):
        g = giver() if has_ranks else giver(local=[])
        g.engine.freeze(5)
        if has_ranks:
            g.become_member(0)
        else:
            g.engine.give_up(0, 0)
        g.commit()
        g.engine.arrived(g.peer, 0, 1, 0)
        assert g.engine.events(0.02) == [] and g.engine.counters()["stale"] == 1
        g.engine.arrived(g.peer, 0, 2, 0)
        assert g.engine.events(10) == [(native.EVENT_LOST, g.peer, 0, 2, errno.EPROTO, 0, 0)]


def test_a_result_that_is_lent_in_the_round_after_it_was_given_up_counts(giver):
    """The new_owner is lost when others have it: nobody takes it for an input that comes late."""
    g = giver()
    g.engine.freeze(5)
    g.become_member(0)
    g.commit()
    g.push(1)
    assert g.engine.events(10)[0][:4] == (native.EVENT_FORWARD, g.new_owner, 0, 1)
    g.engine.freeze(5)
    g.engine.detach(g.new_owner)
    g.engine.follow(0, g.third, 1, g.peer)
    g.commit()
    g.engine.arrived(g.peer, 0, 1, 0)
    assert g.v.ports[0].wait(0, 1, 1, 10) == DONE


def test_it_may_own_the_part_again(giver):
    g = giver()
    g.round(1)
    g.engine.freeze(5)
    g.become_member(1)
    g.commit()
    g.push(2)
    assert g.engine.events(10)[0][1] == g.new_owner
    g.engine.freeze(5)
    g.engine.detach(g.new_owner)
    g.v.own(0, before=[(g.peer, g.slot.address)], to_wire=True, kept_round=1)
    g.commit()
    g.engine.arrived(g.peer, 0, 2, 0)
    assert g.engine.events(10)[0][:4] == (native.EVENT_RESULT, 0, 0, 2)
    assert (g.v.output(2)[0] == 100 + 2).all()


def test_a_number_that_was_given_up_is_used_again(giver):
    g = giver(local=[])
    g.engine.freeze(5)
    g.engine.give_up(0, 0)
    with pytest.raises(ValueError, match="there is no part 0"):
        g.engine.progress(0)
    g.commit()
    g.v.own(0, before=[(g.peer, g.slot.address)], local=[], to_wire=True)
    g.v.commit()
    g.engine.arrived(g.peer, 0, 1, 0)
    assert g.engine.events(10)[0][:4] == (native.EVENT_RESULT, 0, 0, 1)


def test_what_cannot_be_given_up_is_refused_and_changes_nothing(giver):
    g = giver()
    g.round(1)
    with pytest.raises(ValueError, match="only a frozen engine changes owners"):
        g.become_member(1)
    g.engine.freeze(5)
    for kept in (0, 2):
        with pytest.raises(ValueError, match=f"part 0 after round {kept}: it is at another round here"):
            g.become_member(kept)
    for part in (1, 70000):
        with pytest.raises(ValueError, match="there is no such part, or it is owned elsewhere"):
            g.engine.give_up(part, 1)
    g.become_member(1)
    with pytest.raises(ValueError, match="or it is owned elsewhere"):
        g.become_member(1)
    g.commit()


@pytest.mark.parametrize("is_frozen_before", [False, True])
def test_an_owner_was_told_of_inputs_that_count_or_are_kept_for_the_commit(giver, is_frozen_before):
    g = giver()
    g.round(1)
    assert g.engine.was_told(0, g.peer, 1) and not g.engine.was_told(0, g.peer, 2)
    for act in [g.engine.freeze, lambda _: g.engine.arrived(g.peer, 0, 2, 0)][:: 1 if is_frozen_before else -1]:
        act(5)
    assert g.engine.was_told(0, g.peer, 2) and not g.engine.was_told(0, g.peer, 3)
    assert not g.engine.was_told(0, g.new_owner, 2) and not g.engine.was_told(1, g.peer, 2)
    g.engine.give_up(0, 1)
    g.commit()
    assert not g.engine.was_told(0, g.peer, 2), "it was dropped"


@pytest.mark.parametrize("is_frozen_before", [False, True])
def test_a_member_was_told_of_a_result_that_is_complete_or_kept_for_the_commit(giver, is_frozen_before):
    g = giver()
    g.round(1)
    g.engine.freeze(5)
    g.become_member(1)
    g.commit()
    g.push(2)
    assert g.engine.events(10)[0][:4] == (native.EVENT_FORWARD, g.new_owner, 0, 2)
    assert not g.engine.was_told(0, g.new_owner, 2)
    for act in [g.engine.freeze, lambda _: g.engine.arrived(g.new_owner, 0, 2, 0)][:: 1 if is_frozen_before else -1]:
        act(5)
    assert g.engine.was_told(0, g.new_owner, 2) and not g.engine.was_told(0, g.new_owner, 3)
    g.commit()
    assert g.v.ports[0].wait(0, 1, 2, 10) == DONE
