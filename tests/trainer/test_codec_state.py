"""State of compressed tensors: saved on each node, loaded into another job, which then has the same bits."""
from __future__ import annotations

import numpy as np
import pytest

from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.errors import BusyError, MismatchError, UnsupportedError
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.trainer import process

CODEC = CodecSpec(kind="randomk", k=0.02, error_feedback=True, momentum=0.9, seed=7)
N = 3000


def unit_of(name, codec=CODEC):
    session = process.current()
    session.tensors.declare([TensorSpec(name=name, dtype="float32", shape=(N,), partition_nbytes=4096, codec=codec)])
    return session.tensors.unit(name, 20)


def go_on(name, steps, codec=CODEC):
    """Push the gradients of *steps*; return the last result."""
    unit = unit_of(name, codec)
    result = b""
    for step in steps:
        x = np.random.default_rng([process.current().rank, step]).standard_normal(N, np.float32)
        unit.learning_rate = 0.1 / (1 + step)
        unit.push(x.ctypes.data, x.nbytes)
        unit.wait(unit.round, 20)
        result = unit.view(unit.round).tobytes()
    return result


def save(name):
    return process.current().states.save(unit_of(name)).tobytes()


def load(name, states, codec=CODEC):
    session = process.current()
    session.states.load(unit_of(name, codec), np.frombuffer(states[session.rank], np.uint8))


@pytest.mark.parametrize("shape", [{"ranks": (2, 1), "transport": "tcp"}, {"ranks": (1, 1)}], ids=["tcp", "shm"])
def test_another_job_goes_on_with_the_same_bits(job, shape):
    first = job(**shape)
    first.run(go_on, "w", range(4))
    states = first.run(save, "w")
    expected = first.run(go_on, "w", range(4, 8))
    second = job(**shape)
    second.run(go_on, "w", range(20, 23))  # what it had before is replaced
    second.run(load, "w", states)
    assert second.run(go_on, "w", range(4, 8)) == expected
    assert second.run(go_on, "fresh", range(4, 8)) != expected, "the state makes the difference"


def refusals():
    session = process.current()
    plain = unit_of("plain", None)
    with pytest.raises(UnsupportedError, match="'plain' is not compressed"):
        session.states.save(plain)
    unit = unit_of("coded")
    x = np.ones(N, np.float32)
    unit.push(x.ctypes.data, x.nbytes)
    with pytest.raises(BusyError, match="its round 1 is under way"):
        session.states.save(unit)
    unit.wait(1, 20)
    state = session.states.save(unit)
    before = state.tobytes()
    for wrong, words in ((state[:-1], "bytes, but [0-9]+ on node"), (np.empty(0, np.uint8), "the state has 0 bytes"),
                         (np.concatenate([state[1:], state[:1]]), "not one of node")):
        with pytest.raises(MismatchError, match=words):
            session.states.load(unit, wrong)
    session.barrier()
    assert session.states.save(unit).tobytes() == before, "nothing has changed"
    return before


def test_what_is_no_state_of_this_unit_and_node_is_refused(three):
    states = three.run(refusals)
    assert states[0] == states[1] and states[0] != states[2]
    outcomes = three.attempt(load, "coded", [states[2]] * 3)
    assert [outcome.error for outcome in outcomes] == ["MismatchError", "MismatchError", ""]
    outcomes = three.attempt(load, "other codec", states, CodecSpec(kind="randomk", k=0.02, error_feedback=True,
                                                                     momentum=0.8, seed=7))
    assert {outcome.error for outcome in outcomes} == {"MismatchError"}


def alone():
    unit = unit_of("alone")
    state = process.current().states.save(unit)
    process.current().states.load(unit, state)
    with pytest.raises(MismatchError, match="one node"):
        process.current().states.load(unit, np.zeros(10, np.uint8))
    return len(state)


def test_one_machine_has_no_state(two):
    assert two.run(alone) == [0, 0]
