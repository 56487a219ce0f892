"""Partitions that get another owner, on two nodes: what has to arrive before one that lives gives them up."""
from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from bpsfast.base.settings import Settings
from bpsfast.node import owner_changes as module
from bpsfast.orchestration.messages import OwnerChange, Recover
from bpsfast.pyx.port import DONE
from tests.support.two_nodes import End, connect, declare, order_of


@pytest.fixture
def ends():
    """Two nodes with a rank each; node 0 owns two partitions, of which round 1 is complete."""
    made = [End(index, Settings(transport="tcp", engine_threads=1, huge_pages="off")) for index in (0, 1)]
    connect(made)
    for end in made:
        end.finish()
    plan = declare(made, [4096, 4096], [0, 0])
    for end in made:
        end.commit(order_of(plan))
        end.plan, end.places = plan, [end.allocate(4096)[:2] for _ in range(2)]
        for part in (0, 1):
            end.port.submit(part, 1, 1, *end.places[part], False)
    for end in made:
        assert all(end.port.wait(part, 1, 1, 20.0) == DONE for part in (0, 1))
    yield made
    for end in made:
        end.close()


def prepare(end, *successions):
    end.runtime.freeze("a test")
    generation, found = end.runtime.installer.prepare_owner_change(
        Recover(epoch=2, generation=end.plan.generation + 1, units=end.plan.units, owner_changes=successions))
    return generation, found


def until(is_so):
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline


def test_inputs_that_are_under_way_to_who_gives_up_are_named_until_they_have_come(ends, monkeypatch):
    giver, member = ends
    _, found = prepare(giver, *(OwnerChange(part=part, owner=0, kept_round=1, giver=0, pushed=(1,)) for part in (0, 1)))
    assert found.given_up == {0, 1} and not found.arrived
    assert found.missing == "round 2 of partition 0 of 't0' from node 1, round 2 of partition 1 of 't1' from node 1"
    monkeypatch.setattr(module, "_N_NAMED", 1)
    assert found.missing == "round 2 of partition 0 of 't0' from node 1 and 1 more"
    for part in (1, 0):
        assert not found.arrived
        member.port.submit(part, 1, 2, *member.places[part], False)
        until(lambda part=part: found.arrived or part not in [awaited[1] for awaited in found._awaited])
    assert found.arrived and found.missing == ""


def test_what_the_engine_was_not_told_of_has_not_arrived(ends):
    """The bytes are in place, and the thread that has received them is about to say so."""
    giver, member = ends
    change = OwnerChange(part=0, owner=0, kept_round=1, giver=0, pushed=(1,))
    _, found = prepare(giver, change)
    link = found._wire(1)
    found._wire = lambda node: SimpleNamespace(next_round=lambda part: 3)
    assert not found.arrived and found.missing
    member.port.submit(0, 1, 2, *member.places[0], False)
    until(lambda: found.arrived)
    assert link.next_round(0) == 3


def test_of_a_lost_owner_nothing_is_given_up_nor_awaited(ends):
    _, found = prepare(ends[1], OwnerChange(part=0, owner=0, kept_round=1))
    assert found.given_up == set() and found.arrived
