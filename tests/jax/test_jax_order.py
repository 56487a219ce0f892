"""push_pulls of JAX run in the order of the program on every rank, so that they cannot deadlock; their errors."""
from __future__ import annotations

import pytest

from bpsfast.orchestration.errors import ProtocolError
from tests.support.jax_ranks import bps, defined, given, jax, jnp, np, raised, same


@pytest.fixture
def pair(shared_job):
    return shared_job(ranks=(1, 1), transport="tcp", timeout_s=30)


def sine(x, n):
    for _ in range(n):
        x = jnp.cumsum(jnp.sin(x)) / 1000
    return x


def independent(x):
    """Make sums that do not depend on each other; their inputs are ready at different times on different ranks."""
    slow, fast = (12, 0) if bps.rank() == 0 else (0, 12)
    first = bps.push_pull(sine(x, slow) * 0 + 1, name="first")
    second = bps.push_pull(sine(x, fast) * 0 + 2, name="second")
    third = bps.push_pull(x * 0 + 3, name="third")
    return third, first, second


def in_one_program():
    x = jnp.arange(200_000, dtype=jnp.float32)
    found = [jax.jit(independent)(x) for _ in range(5)]  # all are under way at once
    return all(float(a[0]) == 3 and float(b[0]) == 1 and float(c[0]) == 2 for a, b, c in found)


def test_independent_sums_of_one_program_do_not_deadlock(pair):
    assert pair.run(in_one_program) == [True, True]


def in_many_programs():
    """Run one program many times without waiting; each result must be that of its own inputs."""
    step = jax.jit(lambda x: bps.push_pull(x, name="batches"))
    inputs = [jnp.full(50_000, batch * (bps.rank() + 1), jnp.float32) for batch in range(20)]
    results = [step(x) for x in inputs]
    eager = bps.push_pull(jnp.float32(7), name="after them")
    return [float(r[0]) for r in results] == [1.5 * batch for batch in range(20)] and float(eager) == 7


def test_programs_under_way_at_once_do_not_mix(pair):
    assert pair.run(in_many_programs) == [True, True]


def in_loops():
    x = given(bps.rank(), "float32", (64,))

    @jax.jit
    def scanned(x):
        def body(carry, _):
            carry = bps.push_pull(carry, name="in scan") + 1
            return carry, carry.sum()
        return jax.lax.scan(body, x, None, length=4)

    @jax.jit
    def chosen(x, n):
        return jax.lax.cond(n > 2, lambda x: bps.push_pull(x, name="one"), lambda x: bps.push_pull(x, name="other"), x)

    mean = defined("float32", (64,))
    return (same(scanned(x)[0], mean + 4) and same(chosen(x, 3), mean) and same(chosen(x, 1), mean)
            and same(jax.lax.fori_loop(0, 3, lambda i, x: bps.push_pull(x, name="loop"), x), mean))


def test_inside_scan_cond_and_loops(pair):
    assert pair.run(in_loops) == [True, True]


# -- what goes wrong -----------------------------------------------------------------------------------------------


def mismatched():
    n = 3 + bps.rank()
    eager = raised(bps.push_pull, jnp.ones(n), name="other shapes")
    inside = raised(jax.jit(lambda x: bps.push_pull(x, name="others, too")), jnp.ones(n))
    under_way = raised(jax.jit(lambda x: sine(bps.push_pull(x, name="and late"), 3)), jnp.ones(300_000 + n))
    bps.barrier()
    again = jax.jit(lambda x: bps.push_pull(x, name="goes on"))(jnp.ones(3))
    return eager, inside, under_way, float(again[0])


def test_ranks_that_differ(job):
    for eager, inside, under_way, again in job(ranks=(2,)).run(mismatched):
        assert eager[0] == "MismatchError" and "other shapes" in eager[1]
        assert inside[0] == under_way[0] == "JaxRuntimeError" and again == 1
        assert "bpsfast MismatchError" in inside[1] and "others, too" in inside[1]
        assert "bpsfast MismatchError" in under_way[1] and "and late" in under_way[1]


def left_alone(inside):
    if bps.rank() == 1:
        return raised(bps.barrier, timeout_s=0.1)
    push = jax.jit(lambda x: bps.push_pull(x, name="alone"))
    return raised(push, jnp.ones(3)) if inside else raised(bps.push_pull, jnp.ones(3), name="alone")


@pytest.mark.parametrize("inside", [False, True])
def test_a_rank_that_does_not_come(job, inside):
    broken = job(ranks=(2,), timeout_s=1)
    (kind, text), _ = (outcome.value for outcome in broken.attempt(left_alone, inside))
    assert kind == ("JaxRuntimeError" if inside else "StallError") and "StallError" * inside in text
    assert "alone" in text and "rank 1" in text
    broken.kill()


def lost():
    step = jax.jit(lambda x: bps.push_pull(x, name="lost") + 1)
    if bps.rank() == 0:
        return [raised(step, jnp.ones(3)), raised(bps.push_pull, jnp.ones(3), name="lost")]
    import os

    os._exit(3)


def test_a_rank_that_dies(job):
    broken = job(ranks=(2,))
    broken.begin(lost)
    (outcome,) = broken.outcomes(only=(0,))
    (inside, text), (eager, _) = outcome.value
    assert inside == "JaxRuntimeError" and "PeerLostError" in text and eager == "PeerLostError"
    broken.kill()


def unknown_digest():
    from bpsfast.jax import primitive

    step = jax.jit(lambda x: bps.push_pull(x, name="moved")).lower(jnp.ones(3)).compile()
    primitive._calls.clear()
    return raised(step, jnp.ones(3))


def test_a_program_of_another_process(job):
    (kind, text), = job(ranks=(1,)).run(unknown_digest)
    assert kind == "JaxRuntimeError" and ProtocolError.__name__ in text and "never traced" in text


def forgotten():
    """Leave a program under way: shutdown waits for it."""
    forgotten.result = jax.jit(lambda x: bps.push_pull(sine(x, 20), name="forgotten"))(jnp.arange(200_000.0))
    bps.shutdown()
    return bool(np.isfinite(np.asarray(forgotten.result)).all()), raised(bps.push_pull, jnp.ones(3))[0]


def test_shutdown_waits_for_programs(job):
    ended = job(ranks=(2,))
    assert ended.run(forgotten) == [(True, "ClosedError")] * 2
    ended.kill()
