"""A change of epoch as a node goes through it: what it says when it cannot prepare for that."""
from __future__ import annotations

from types import SimpleNamespace

import pytest

from bpsfast.node.recovery import Recovery
from bpsfast.node.transport import Epochs
from bpsfast.orchestration.errors import CapacityError, ProtocolError
from bpsfast.orchestration.messages import Freeze, FreezeReport, PrepareFailed, Recover


@pytest.fixture
def told():
    return []


@pytest.fixture
def recovery(told):
    def no_room(message):
        raise CapacityError("no room for slots")

    installer = SimpleNamespace(near=(), progress=lambda lost, everything: (), prepare_owner_change=no_room,
                             ownable_nbytes=12345, room_nbytes=777)
    runtime = SimpleNamespace(connected=True, installer=installer, freeze=lambda purpose: None)
    node = SimpleNamespace(send=told.append, run_with_heartbeats=lambda work: work(), name="node 0")
    plans = SimpleNamespace(forget=lambda: None, drop_early=lambda: told.append("planned early: dropped"))
    runtime.exclude = lambda index: told.append(f"excluded {index}")
    return Recovery(node, runtime, plans, lambda index: told.append(f"parted with {index}"), lambda index: None,
                    Epochs(1), told.append)


def test_who_cannot_prepare_for_new_owners_says_what_it_can_own(recovery, told):
    recovery.freeze(Freeze(epoch=2, lost=(), joined=(3,), reason="node 3 has come"))
    recovery.prepare(Recover(epoch=2, generation=9, units=(), owner_changes=()))
    frozen, failed = told
    assert isinstance(frozen, FreezeReport) and frozen.epoch == 2
    assert failed == PrepareFailed(generation=9, reason="no room for slots", ownable_nbytes=12345, room_nbytes=777)


def test_nothing_is_prepared_for_an_epoch_that_was_not_frozen_for(recovery, told):
    with pytest.raises(ProtocolError, match="recovers in epoch 2, for which this node is not frozen"):
        recovery.prepare(Recover(epoch=2, generation=9, units=(), owner_changes=()))
    assert told == []


def test_a_node_that_is_still_connecting_parts_at_once_and_freezes_when_it_is_connected(recovery, told):
    recovery._runtime.connected = False
    recovery.connected()
    recovery.freeze(Freeze(epoch=2, lost=(3,), reason="node 3 is lost"))
    recovery.freeze(Freeze(epoch=3, lost=(3, 4), reason="node 4 is lost"))
    assert told == ["planned early: dropped", "parted with 3",
                    "planned early: dropped", "parted with 3", "parted with 4"]
    told.clear()
    recovery._runtime.connected = True
    recovery.connected()
    recovery.connected()
    assert [each for each in told if isinstance(each, FreezeReport)] == [FreezeReport(epoch=3, progress=(), near=())]
