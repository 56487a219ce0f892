"""Units of several tensors on a device: sent when they are whole, found again by whoever waits."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import bpsfast
from bpsfast.gpu.host import HostArray, HostDevice, host_device
from bpsfast.orchestration.errors import UnsupportedError
from bpsfast.trainer import process
from bpsfast.trainer.gpu.device_path import DevicePath
from bpsfast.trainer.gradients import Gradients
from bpsfast.trainer.tensor_input import from_array, tensor_input
from tests.support.device_memory import LIMIT_S, deadline, held

SHAPES = {"a": ((5,), "f4"), "b": ((2, 3), "f4"), "c": ((7,), "f4")}


@pytest.fixture
def job(shared_job):
    return shared_job(ranks=(2,), timeout_s=20)


def arrays(value=0.0, stream=None):
    made = {}
    for name, (shape, dtype) in SHAPES.items():
        made[name] = np.full(shape, value + bpsfast.rank(), dtype).view(HostArray)
        made[name].stream = stream
    return made


def unit_of(prefix):
    """A fused unit of three tensors, and where each begins in it."""
    g = Gradients(SHAPES, prefix=prefix, average=False)
    for name in g:
        g.region(name)
    unit = g._gradients["a"].unit
    assert {id(gradient.unit) for gradient in g._gradients.values()} == {id(unit)}
    return g, unit, {name: gradient.offset for name, gradient in g._gradients.items()}


def fused():
    """All there, and back to where they came from, or to elsewhere, or to both."""
    _, unit, offsets = unit_of("fused ")
    gathering = DevicePath(process.current())
    sources, elsewhere = arrays(), arrays(-5)
    for name, x in sources.items():
        memory = tensor_input(x)
        gathering.add(unit, offsets[name], memory, memory if name != "b" else None)
    is_sent = gathering.send(unit)
    for name in reversed(SHAPES):
        gathering.deliver(unit, unit.round, offsets[name], tensor_input(sources[name]), deadline())
        gathering.deliver(unit, unit.round, offsets[name], tensor_input(elsewhere[name]), deadline())
    return is_sent, [float(x.sum()) / x.size for x in [*sources.values(), *elsewhere.values()]]


def test_tensors_of_one_unit(job):
    assert job.run(fused) == [(True, [1.0] * 6)] * 2


def none_of_it():
    _, unit, _ = unit_of("none ")
    return DevicePath(process.current()).send(unit), unit.has_begun


def test_what_is_not_on_a_device_is_not_sent(job):
    assert job.run(none_of_it) == [(False, False)] * 2


def partly_on_the_host():
    """Members in shared memory, in private memory, and on a device, in each order, every round in another."""
    g, _, _ = unit_of("partly ")
    seen = []
    for round in range(6):
        order = list(SHAPES)[round % 3 :] + list(SHAPES)[: round % 3]
        on_device = arrays(round)
        private = np.full(SHAPES["b"][0], round + bpsfast.rank(), "f4")
        for name in order if round < 3 else reversed(order):
            if name == "a":
                g["a"][...] = round + bpsfast.rank()
                g.ready("a")
            elif name == "b":
                g.fill("b", private.ctypes.data, private.nbytes)
            else:
                memory = tensor_input(on_device["c"])
                g.fill_from("c", memory, memory if round % 2 else None)
        g.deliver("b", private.ctypes.data, private.nbytes)
        g.deliver_to("c", tensor_input(on_device["c"]))
        seen.append([float(x.sum()) / x.size - 2 * round for x in (g.wait("a"), private, on_device["c"])])
        g.step()
    return seen


def test_units_that_are_partly_on_the_host(job):
    assert job.run(partly_on_the_host) == [[[1.0] * 3] * 6] * 2


def refused():
    """One device, for sources and targets; what was refused was not noted."""
    _, unit, offsets = unit_of("refused ")
    gathering = DevicePath(process.current())
    other = HostDevice()
    other.name = "elsewhere"
    x = arrays()
    here, there = tensor_input(x["a"]), from_array(np.zeros(5, "f4"))
    on_device = replace(tensor_input(x["b"]), location=other.location())
    texts = []
    for arguments in (("a", here, there), ("a", here, on_device)):
        try:
            gathering.add(unit, offsets[arguments[0]], *arguments[1:])
        except UnsupportedError as exc:
            texts.append(str(exc))
    nothing = gathering.send(unit)
    gathering.add(unit, offsets["a"], here, here)
    try:
        gathering.add(unit, offsets["b"], on_device, None)
    except UnsupportedError as exc:
        texts.append(str(exc))
    return texts, nothing


def test_a_rank_has_one_device(job):
    for texts, sent in job.run(refused):
        assert [text.partition(" and on ")[2] for text in texts] == [
            f"{where}. A rank has one device" for where in ("the CPU", "elsewhere", "elsewhere")]
        assert not sent


def same_names():
    """Rounds of another unit of the same name are not this one's."""
    session = process.current()
    x = np.ones(4, "f4").view(HostArray)
    gathering = DevicePath(session)
    means = []
    for _ in range(2):
        bpsfast.declare("again", (4,), average=False)
        unit = session.tensors.unit("again", LIMIT_S)
        if means:
            means.append(gathering._of(unit, unit.first_round) is None)
        memory = tensor_input(x)
        gathering.add(unit, 0, memory, memory)
        gathering.send(unit)
        gathering.deliver(unit, unit.round, 0, memory, deadline())
        means.append(float(x.sum()))
        session.retire([unit])
        bpsfast.barrier()
    return means


def test_a_name_that_comes_again(job):
    assert job.run(same_names) == [[8.0, True, 16.0]] * 2


def departed():
    """`wait_departed` waits for the way there only."""
    _, unit, offsets = unit_of("departed ")
    gathering = DevicePath(process.current())
    with held(host_device()) as gate:
        x = arrays(stream=gate.stream)
        for name in SHAPES:
            gathering.add(unit, offsets[name], tensor_input(x[name]), None)
        gathering.send(unit)
        gate.go()
        gathering.wait_departed(unit, unit.round, deadline())
        staged = unit.staging.array[: unit.nbytes].view("f4")
        is_there = float(staged[offsets["a"] // 4]) == bpsfast.rank()
        gathering.wait(unit, unit.round, deadline())
        gathering.wait_departed(unit, unit.round - 2, 0.0)  # came from the host, as far as is known
        return is_there


def test_waiting_for_the_way_there(job):
    assert job.run(departed) == [True] * 2
