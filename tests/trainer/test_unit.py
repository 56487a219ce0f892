"""Where a unit's results lie: extents that follow each other, over several segments, and ones that do not fit."""
from __future__ import annotations

import mmap
import os
from types import SimpleNamespace

import numpy as np
import pytest

from bpsfast.orchestration.errors import ProtocolError
from bpsfast.orchestration.messages import Extent, MemberPlan, PartPlan, UnitPlan, UnitReady
from bpsfast.pyx.direct import Rounds
from bpsfast.pyx.pages import Segment
from bpsfast.trainer.unit import Unit

STRIDE = 2 * mmap.PAGESIZE


@pytest.fixture
def segments():
    """Return two result segments whose bytes say where they lie: 1 and 2 in the even halves, 101 and 102 in the odd."""
    made = {}
    for node in (1, 2):
        with Segment(8 * STRIDE, huge=False) as original:
            array = np.frombuffer(original, np.uint8)
            array[: 4 * STRIDE], array[4 * STRIDE :] = node, 100 + node
            del array
            made[f"result:{node}", 0] = Segment.attach(os.dup(original.fileno()))
    return made


class _NoSession:
    """Units that only look at results need rounds, and nothing else of a session."""

    clock = SimpleNamespace(rounds=lambda first_round: Rounds(None, first_round - 1))
    size, membership = 1, SimpleNamespace(known_lost=frozenset())


def unit(segments, nbytes, *extents):
    parts = tuple(PartPlan(part=10 + i, offset=at, nbytes=min(STRIDE, nbytes - at), owner=0)
                  for i, at in enumerate(range(0, nbytes, STRIDE)))
    plan = UnitPlan(unit=0, name="u", dtype="uint8", average=False, priority=0, nbytes=nbytes, stride=STRIDE,
                    members=(MemberPlan(name="u", shape=(nbytes,), offset=0, nbytes=nbytes),), parts=parts)
    return Unit(_NoSession(), UnitReady(plan=plan, extents=extents), segments)


def extent(node, slot, n_parts, nbytes=None):
    return Extent(node=node, segment=0, offset_even=slot * STRIDE, offset_odd=(4 + slot) * STRIDE,
                  nbytes=n_parts * STRIDE if nbytes is None else nbytes)


def test_one_segment_is_one_run(segments):
    u = unit(segments, 3 * STRIDE, extent(1, 0, 1), extent(1, 1, 2))
    assert len(u._runs) == 1
    assert set(u.view(2)) == {1} and set(u.view(1)) == {101} and len(u.view(1)) == 3 * STRIDE
    assert not u.view(2).flags.writeable and u.view(2) is u.view(4)


def test_several_segments_are_one_array(segments):
    nbytes = 2 * STRIDE + 100
    u = unit(segments, nbytes, extent(1, 0, 1), extent(2, 0, 1), extent(1, 1, 1, 100))
    assert u.view(2).tolist() == [1] * STRIDE + [2] * STRIDE + [1] * 100
    assert u.view(3).tolist() == [101] * STRIDE + [102] * STRIDE + [101] * 100


def test_addresses(segments):
    u = unit(segments, 2 * STRIDE, extent(1, 0, 1), extent(2, 1, 1))
    assert u.result_address(2, 5) == segments["result:1", 0].address + 5
    assert u.result_address(3, STRIDE + 5) == segments["result:2", 0].address + 5 * STRIDE + 5
    with pytest.raises(ProtocolError):
        u.result_address(2, 2 * STRIDE)


def test_a_unit_without_bytes_is_complete(segments):
    u = unit(segments, 0)
    assert u.done(1) and len(u.view(1)) == 0


def test_views_outlive_the_unit(segments):
    u = unit(segments, 2 * STRIDE, extent(1, 0, 1), extent(2, 0, 1))
    view = u.view(2)
    u.forget()
    assert set(view) == {1, 2}


@pytest.mark.parametrize("extents", [(extent(3, 0, 2),), (extent(1, 0, 1),)])
def test_extents_that_do_not_fit(segments, extents):
    with pytest.raises(ProtocolError):
        unit(segments, 2 * STRIDE, *extents)
