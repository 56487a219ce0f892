"""Stores in a real engine: the rules, who is answered when under 10,000 random schedules, and what comes and goes."""
from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.base.dtypes import TABLE
from bpsfast.kernels import store_ir, stores
from bpsfast.orchestration.errors import UnsupportedError
from bpsfast.pyx.engine import Engine
from bpsfast.pyx.port import TIMED_OUT
from tests.support.engine_node import N
from tests.support.store_owner import MOST, Owner


@pytest.fixture
def owner():
    made = Owner()
    yield made
    made.engine_node.close()


def test_the_first_round_sets_and_nobody_is_answered_before(owner):
    owner.open(3)
    owner.push(0)
    owner.push(2)
    assert owner.engine_node.ports[0].wait(0, 1, 1, 0.1) == TIMED_OUT
    assert owner.engine_node.engine.behind(0) == [1] and owner.engine_node.engine.missing(0)[1] == []
    assert (owner.push_pull(1, 5.0) == 5.0).all()
    assert (owner.answer(0) == 5.0).all() and (owner.answer(2) == 5.0).all()
    assert (owner.push_pull(0, 2.0) == 7.0).all()
    assert (owner.push_pull(1) == 7.0).all()


def test_outer_steps(owner):
    owner.open(1, momentum=True, learning_rate=0.7, mu=0.9)
    rng = np.random.default_rng(0)
    weights, momentum = rng.standard_normal((2, N)).astype(np.float32)
    rate, mu = np.float32(0.7), np.float32(0.9)
    assert (owner.push_pull(0, weights) == weights).all()
    assert (owner.push_pull(0, momentum) == weights).all()
    for _ in range(5):
        gradient = rng.standard_normal(N).astype(np.float32)
        momentum = mu * momentum + gradient
        weights = weights - rate * (gradient + mu * momentum)
        assert (owner.push_pull(0, gradient) == weights).all()
        assert (owner.push_pull(0) == momentum).all()


def test_momentum_that_nobody_sets_is_zero_even_in_memory_that_was_used(owner):
    np.frombuffer(owner.memory, np.float32)[:] = 9.0
    owner.open(1, momentum=True, learning_rate=1.0, mu=0.5)
    owner.push_pull(0, 1.0)
    owner.push_pull(0)
    assert (owner.push_pull(0) == 0.0).all()
    assert (owner.push_pull(0, 1.0) == -0.5).all()  # 1 - (1 + 0.5 * 1)


def test_who_has_left_holds_nobody_back(owner):
    owner.open(3, staleness=1)
    for worker in (1, 2):
        owner.push(worker)
    owner.push_pull(0, 1.0)
    for worker in (1, 2):
        owner.answer(worker)
    owner.push_pull(0, 1.0)
    owner.push(0, 1.0)  # round 3: the others are at round 1
    assert owner.engine_node.ports[0].wait(0, 1, 3, 0.1) == TIMED_OUT
    assert sorted(owner.engine_node.engine.behind(0)) == [1, 2]
    owner.retire([1])
    assert owner.engine_node.engine.behind(0) == [2] and not owner.answered(0)
    owner.retire([2])
    assert (owner.answer(0) == 3.0).all()


def test_a_commit_leaves_what_is_held_back_as_it_is(owner):
    owner.open(2, staleness=0)
    owner.push(0, 1.0)
    assert owner.engine_node.ports[0].wait(0, 1, 1, 0.1) == TIMED_OUT
    owner.engine_node.own(2, local=[owner.engine_node.ranks[2]])
    owner.engine_node.commit()
    assert owner.engine_node.ports[0].wait(0, 1, 1, 0.1) == TIMED_OUT
    owner.push(1)
    assert (owner.answer(0) == 1.0).all() and (owner.answer(1) == 1.0).all()


def test_a_refused_generation_takes_its_store_along(owner):
    store = Engine.make_store(2, kernel=stores.address("float32"), weights=owner.memory.address)
    for part in range(2):
        owner.engine_node.own(part, local=[owner.engine_node.ranks[part]], store=store)
    for part in range(2):
        owner.engine_node.engine.remove(part)
    owner.open(2)
    assert (owner.push_pull(0, 3.0) == 3.0).all()
    Engine.drop_store(Engine.make_store(2, kernel=stores.address("float32"), weights=owner.memory.address))


# -- who is answered when ---------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def owners():
    made = {n_threads: Owner(n_threads) for n_threads in (1, 3)}
    yield made
    for each in made.values():
        each.engine_node.close()


def may_be_answered(rounds, worker, staleness):
    """Say whether the other workers are near enough; all weights are set."""
    others = [rounds[other] for other in range(len(rounds)) if other != worker]
    return staleness < 0 or all(rounds[worker] - round_ <= staleness for round_ in others)


@settings(max_examples=10_000, deadline=None)
@given(n=st.integers(1, MOST), staleness=st.integers(-1, 3), n_threads=st.sampled_from([1, 3]),
       order=st.lists(st.integers(0, MOST - 1), max_size=24))
def test_no_schedule_of_pushes_makes_an_answer_too_stale_or_none_at_all(owners, n, staleness, n_threads, order):
    owner = owners[n_threads]
    try:
        keep_to(owner, n, staleness, order)
    except BaseException:  # the next one begins anew
        owner.engine_node.close()
        owners[n_threads] = Owner(n_threads)
        raise


def keep_to(owner, n, staleness, order):
    """Let workers push in *order*. Each counts its pushes in an element of its own: an answer tells whose it has."""
    owner.open(n, staleness=staleness)
    pending = set(range(n))  # pushed, and the answer was not taken
    for worker in range(1, n):
        owner.push(worker)
    owner.push(0, 0.0)

    def take():
        """Take every answer that there must be by now."""
        for worker in sorted(pending):
            if not may_be_answered(owner.rounds, worker, staleness):
                continue
            answer, round_ = owner.answer(worker), owner.rounds[worker]
            pending.discard(worker)
            counted = [int(answer[other]) for other in range(n)]
            assert counted[worker] == round_ - 1
            for other in range(n):
                assert counted[other] <= owner.rounds[other] - 1
                assert staleness < 0 or counted[other] >= round_ - 1 - staleness, (worker, round_, counted)

    take()
    for worker in order:
        worker %= n
        if worker in pending:
            assert not owner.answered(worker), "too early"
            continue
        change = np.zeros(N, np.float32)
        change[worker] = 1.0
        owner.push(worker, change)
        pending.add(worker)
        take()
    while pending:  # the slowest go on until all are answered
        slowest = min((worker for worker in range(n) if worker not in pending), key=lambda i: owner.rounds[i])
        owner.push(slowest)
        pending.add(slowest)
        owner_rounds = list(owner.rounds)
        for worker in sorted(pending):
            if may_be_answered(owner_rounds, worker, staleness):
                owner.answer(worker)
                pending.discard(worker)
    owner.retire(list(range(n)))


# -- the kernels ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("n", [0, 1, 7, 64, 1001])
def test_kernels(name, n):
    wire, wide = TABLE[name].numpy, TABLE[name].accumulator
    step = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2, *[ctypes.c_double] * 2)(
        stores.address(name))
    rng = np.random.default_rng(n)
    weights, momentum = np.zeros((2, n), wide)
    wanted, moved = np.zeros((2, n), wide)
    rate, mu = wide.type(0.7), wide.type(0.9)
    for what in itertools.chain(*[(store_ir.SET, store_ir.ADD, store_ir.NESTEROV,
                                    store_ir.SHARE)] * 3):
        values = rng.standard_normal(n).astype(wire)
        given_, x = values.copy(), values.astype(wide)
        if what == store_ir.NESTEROV:
            moved = mu * moved + x
            wanted = wanted - rate * (x + mu * moved)
        elif what == store_ir.SHARE:
            wanted = wanted + x / rate
        else:
            wanted = x if what == store_ir.SET else wanted + x
        step(values.ctypes.data, weights.ctypes.data, momentum.ctypes.data, n, what, 0.7, 0.9)
        assert (weights == wanted).all() and (momentum == moved).all() and (values == given_).all()
        step(values.ctypes.data, weights.ctypes.data, None, n, store_ir.READ, 0.0, 0.0)
        assert (values == wanted.astype(wire)).all()


def test_there_is_no_store_of_integers():
    with pytest.raises(UnsupportedError, match="int32"):
        stores.address("int32")
