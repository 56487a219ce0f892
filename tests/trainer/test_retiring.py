"""Units are retired, and what they used is the next ones'; credit changes while a job runs."""
from __future__ import annotations

import resource

import numpy as np
import pytest

import bpsfast
from bpsfast.orchestration.errors import ClosedError
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.trainer import process
from bpsfast.trainer.gradient_layout import GradientLayout, LayoutSizes
from tests.support.changing_units import editions


@pytest.fixture
def pair(shared_job):
    return shared_job(ranks=(2, 1), transport="tcp")


def not_mapped_by_one():
    """Rank 0 has no room at first for what others can map; all give it up; return the nodes' segments after each try.
    """
    session, found = process.current(), []
    for number in range(3):
        limits = resource.getrlimit(resource.RLIMIT_AS)
        is_short = bpsfast.rank() == 0 and number == 0
        if is_short:
            in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (in_use + (32 << 20), limits[1]))
        layout = GradientLayout(session, {name: TensorSpec(name=name, dtype="uint8", shape=(nbytes,), edition_of="it")
                                    for name, nbytes in (("small", 1000), ("big", 64 << 20))}, number, LayoutSizes())
        try:
            for name in layout.wires.values():
                session.tensors.unit(name)
        except bpsfast.CapacityError as exc:
            assert is_short and "cannot map a segment" in str(exc)
            resource.setrlimit(resource.RLIMIT_AS, limits)
            layout.abandon()
        else:
            assert not is_short
            layout.retire(30, keeps_input=False)
        bpsfast.barrier()
        found.append((bpsfast.counters()["memory_segments"], len(session.tensors.units())))
    return found


def test_what_one_rank_cannot_map_is_no_loss_to_the_nodes_nor_to_it_later(job):
    for found in job(ranks=(2, 1), transport="tcp").run(not_mapped_by_one):
        assert len(set(found)) == 1 and found[0][1] == 0, found


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("helpers", [0, 1])
def test_what_is_retired_makes_room_for_the_next(job, transport, helpers):
    found = job(ranks=(2, 1), transport=transport, helpers=helpers).run(editions, 20, True)
    for wrong, counts in found:
        assert not wrong
        assert len(set(counts[5:])) == 1, counts


def test_what_is_not_retired_stays(job):
    for wrong, counts in job(ranks=(2, 1), transport="tcp").run(editions, 6, False):
        assert not wrong and [units for *_, units in counts] == sorted({units for *_, units in counts})


def retired_too_early():
    session = process.current()
    session.tensors.declare([TensorSpec(name="early", dtype="float32", shape=(10,))])
    unit = session.tensors.unit("early")
    unit.push()
    try:
        session.retire([unit])
    except bpsfast.BusyError:
        unit.wait(1, 30)
        return unit.view(1).tolist()


def test_a_round_under_way_is_not_retired(pair):
    assert pair.run(retired_too_early) == [[0] * 40] * 3


def credit(nbytes):
    if bpsfast.rank() == 0:
        process.current().set_credit(nbytes)
    bpsfast.barrier()  # through the same connections, behind it
    bpsfast.push_pull(np.ones(1000), False, "credit")
    return bpsfast.counters()["dispatch_credit_nbytes"]


def test_credit_changes_on_every_node(pair):
    assert pair.run(credit, 12345) == [12345] * 3
    assert pair.run(credit, 0) == [16_777_216] * 3


def pushed_after_retiring():
    session = process.current()
    session.tensors.declare([TensorSpec(name="gone", dtype="float32", shape=(10,))])
    unit = session.tensors.unit("gone")
    unit.push()
    unit.wait(1, 30)
    session.retire([unit])
    try:
        unit.push()
    except ClosedError as exc:
        return str(exc)


def test_a_retired_unit_refuses_to_be_pushed(pair):
    assert all("'gone' was retired" in words for words in pair.run(pushed_after_retiring))


def pushed_by_name(n):
    session, found = process.current(), []
    for number in range(n):  # a plain push_pull of the same name in between keeps nothing of the old unit
        mean = bpsfast.push_pull(np.full(10, number + 1.0, np.float32), True, "by name")
        found.append(float(mean[0]))
        bpsfast.barrier()
        session.retire([session.tensors.unit("by name")])
        bpsfast.barrier()
    return found


def test_a_name_begins_anew_after_it_was_retired(pair):
    assert pair.run(pushed_by_name, 4) == [[1.0, 2.0, 3.0, 4.0]] * 3
