"""The engine: which sums go past the caches."""
from __future__ import annotations

import ctypes

import pytest

from bpsfast.pyx import engine as native
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import DONE
from tests.support.engine_node import PART, N

MUCH = 16 << 20


@pytest.fixture
def stores():
    """A kernel that sums nothing, and the list of what each of its calls was told: may stores go past the caches?"""
    told = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 6)
    def kernel(*arguments):
        told.append(bool(arguments[-1]))

    return ctypes.cast(kernel, ctypes.c_void_p).value, told, kernel


def test_sums_that_some_rank_reads_late_go_past_the_caches(engine_node, stores):
    kernel, told, _ = stores
    v = engine_node(n_ranks=2, nontemporal_nbytes=PART + 1)
    v.own(0, kernel=kernel)
    v.commit()
    for round, nbytes in enumerate([(0, 0), (MUCH, 0), (0, 0), (0, MUCH), (MUCH, MUCH), (0, MUCH - 1)], 1):
        for port, each in zip(v.ports, nbytes):
            port.submit(0, 1, round, 0, 0, nbytes=each)
        assert v.ports[0].wait(0, 1, round, 10) == DONE
    assert told == [False, True, False, True, True, False]


def test_large_sums_go_past_the_caches(engine_node, stores):
    kernel, told, _ = stores
    v = engine_node(n_ranks=1, nontemporal_nbytes=PART)
    v.own(0, kernel=kernel)
    v.commit()
    v.ports[0].submit(0, 1, 1, 0, 0)
    assert v.ports[0].wait(0, 1, 1, 10) == DONE and told == [True]


def test_sums_that_leave_the_machine_stay_in_caches(engine_node, stores):
    kernel, told, _ = stores
    v = engine_node(n_ranks=2, nontemporal_nbytes=PART + 1)
    peer, slot = v.engine.add_wire_peer(), Segment(PART)
    v.engine.add_member(0, nbytes=PART, n_elements=N, unit_offset=0, kernel=kernel, local=v.ranks, owner=peer,
                        partial=(v.outputs.address, 3, 0))
    v.own(1, kernel=kernel, before=[(peer, slot.address)], to_wire=True)
    v.commit()
    for port in v.ports:
        port.submit(0, 2, 1, 0, 0, nbytes=MUCH)
    v.engine.arrived(peer, 1, 1, 0)
    assert v.ports[0].wait(1, 1, 1, 10) == DONE
    forwarded = []
    while not forwarded:  # the owner cannot have the sum before it has this node's part of it
        found = v.engine.events(10)
        assert found, "nothing is forwarded"
        forwarded = [event for event in found if event[0] == native.EVENT_FORWARD]
    v.engine.arrived(peer, 0, 1, 0)
    assert v.ports[0].wait(0, 1, 1, 10) == DONE and told == [False, False]
