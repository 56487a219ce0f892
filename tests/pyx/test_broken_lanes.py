"""A rank whose lane says what cannot be: it is told of once, and nobody else waits for it."""
import errno

import pytest

from bpsfast.pyx import engine as native, ring
from bpsfast.pyx.port import DONE

HEAD = 64


def announce(v, *entry):
    ring.Lane(v.lanes[0]).push(*entry)
    ring.Doorbell(v.bell).ring()


def end_of_the_ring(v):
    memoryview(v.lanes[0]).cast("B")[HEAD : HEAD + 4] = (1 << 31).to_bytes(4, "little")
    ring.Doorbell(v.bell).ring()


@pytest.mark.parametrize("spoil", [
    end_of_the_ring, lambda v: announce(v, 1, 65000, 1, 0, 0, 0), lambda v: announce(v, 1, 65000, 1, 2, 0, 1),
], ids=["a head that is too far", "parts that are not there", "rates of parts that are not there"])
def test_a_broken_lane_is_told_of_once_and_read_no_more(engine_node, spoil):
    v = engine_node(n_ranks=2)
    v.own(0, local=v.ranks[1:])
    v.own(3, local=v.ranks[:1])
    v.commit()
    spoil(v)
    [(kind, source, _, _, code, _, _)] = v.engine.events(10)
    assert (kind, source, code) == (native.EVENT_LOST, v.ranks[0], errno.EPROTO)
    announce(v, 3, 1, 1, 0, 0, 0)
    for round in (1, 2, 3):
        v.input(1)[0] = round
        v.ports[1].submit(0, 1, round, 0, 0)
        assert v.ports[1].wait(0, 1, round, 10) == DONE
        assert (v.output(round)[0] == round).all()
    assert v.engine.events(0) == []
    assert not v.ports[0].done(3, 1, 1)
