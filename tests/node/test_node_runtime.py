"""The runtime of a node: partitions that move; its end: what cannot be closed keeps nothing else open."""
from __future__ import annotations

import os
import socket

import msgspec
import pytest

from bpsfast.base.settings import Settings
from bpsfast.node.runtime import NodeRuntime
from bpsfast.node.transport.tcp import TcpLink
from bpsfast.orchestration.errors import StallError
from bpsfast.orchestration.messages import OwnerChange, Recover
from bpsfast.pyx.port import DONE
from tests.support.two_nodes import End, connect, declare, order_of


@pytest.fixture
def ends():
    made = [End(index, Settings(transport="tcp", engine_threads=1, huge_pages="off")) for index in (0, 1)]
    connect(made)
    for end in made:
        end.finish()
    yield made
    for end in made:
        end.close()


def move(ends, plan, part, to, round_):
    """Let node *to* own *part*, which the other one has summed up to *round_*, and of which nothing is under way."""
    units = tuple(msgspec.structs.replace(unit, parts=tuple(msgspec.structs.replace(each, owner=to)
                                                            for each in unit.parts))
                  for unit in plan.units if unit.parts[0].part == part)
    recover = Recover(epoch=2, generation=plan.generation + 1, units=units, owner_changes=(
        OwnerChange(part=part, owner=to, kept_round=round_, giver=1 - to),))
    for end in ends:
        end.runtime.freeze("a test")
    prepared = [end.runtime.installer.prepare_owner_change(recover) for end in ends]
    assert all(transfer.arrived for _, transfer in prepared)
    for end, (generation, transfer) in zip(ends, prepared):
        end.runtime.succeed(generation, transfer, tuple(order_of(plan)))


def test_what_was_written_of_a_partition_that_moves_is_forgotten(ends):
    plan = declare(ends, [4096, 4096], [0, 0])
    for end in ends:
        end.commit(order_of(plan))
    for end in ends:
        for part in (0, 1):
            segment, offset, _ = end.allocate(4096)
            end.port.submit(part, 1, 1, segment, offset, False)
    for end in ends:
        assert all(end.port.wait(part, 1, 1, 20.0) == DONE for part in (0, 1))
    def posted():
        return [end.runtime._dispatcher._native.posted(*end.runtime._source_of.values()) for end in ends]

    assert posted() == [{0, 1}] * 2
    move(ends, plan, part=1, to=1, round_=1)
    assert posted() == [{0}] * 2, "over a new link it may be written again"


@pytest.mark.parametrize("known", [True, False])
def test_a_newcomer_that_cannot_be_taken_in_is_excluded_as_any_other(ends, known, monkeypatch):
    """Its link is of no use, or the engine has no number left for it."""
    runtime = ends[0].runtime
    ours, theirs = socket.socketpair()
    link = TcpLink(2, {0: ours})
    if known:
        theirs.close()
        ours.close()
    else:
        monkeypatch.setattr(runtime._dispatcher, "add", raising(StallError("it does not answer")))
    with pytest.raises((OSError, ValueError, StallError)):
        runtime.add_link(link, "tcp: of no use")
    assert (2 in runtime.links) == known and ours.fileno() == -1
    theirs.close()
    runtime.freeze("a test")
    runtime.exclude(2)
    assert set(runtime.links) == {1}


def raising(error):
    def call(*_):
        raise error
    return call


def test_memory_that_somebody_holds_keeps_nothing_else_open(no_leaks):
    before = len(os.listdir("/proc/self/fd"))
    runtime = NodeRuntime(Settings(engine_threads=1, huge_pages="off"), lambda source, code: None)
    place, _ = runtime.regions.slots.allocate(5000)
    runtime.stop()
    with memoryview(runtime.regions.chunk(place.segment).segment):
        with pytest.raises(BufferError, match="live exports"):
            runtime.close()
        assert len(os.listdir("/proc/self/fd")) == before + 1  # the segment that is held
    runtime.regions.close()


def test_a_kernel_that_takes_long_is_waited_for_while_the_node_goes_on_beating():
    """For a moment at once, then by what was given for that; one that never ends is named."""
    waits, patient = [], []

    class Busy:
        """An engine with a kernel that ends when it was waited for so often."""

        def __init__(self, n_timeouts):
            self.n_timeouts = n_timeouts

        def freeze(self, timeout_s):
            waits.append(timeout_s)
            if len(waits) <= self.n_timeouts:
                raise TimeoutError("1 kernels still run")

    def run_with_heartbeats(work):
        patient.append(work)
        return work()

    for n_timeouts in (0, 1, 2):
        waits.clear()
        patient.clear()
        frozen = NodeRuntime.__new__(NodeRuntime)
        frozen._engine, frozen._run_with_heartbeats = Busy(n_timeouts), run_with_heartbeats
        if n_timeouts < 2:
            frozen.freeze("a test")
        else:
            with pytest.raises(StallError, match="a test: 1 kernels still run"):
                frozen.freeze("a test")
        assert len(waits) == min(n_timeouts + 1, 2) and waits[0] <= 0.1 and len(patient) == len(waits) - 1
