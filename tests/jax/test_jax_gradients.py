"""Gradients of push_pull; grad, value_and_grad and optax with gradients averaged over all ranks."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.jax_ranks import bps, jax, jnp, optax, raised, same


@pytest.fixture
def three_started(shared_job):
    return shared_job(ranks=(2, 1), transport="tcp")


def through():
    rank, size = bps.rank(), bps.size()
    x = jnp.arange(1.0, 5.0) * (rank + 1)
    total = sum(jnp.arange(1.0, 5.0) * (r + 1) for r in range(size))

    def loss(tree, average):
        found = bps.push_pull(tree, average, name=f"through {average}")
        return (found["x"] ** 2).sum() * (rank + 1) + found["n"].sum()

    for average in (True, False):
        tree = {"x": x, "n": jnp.arange(3)}
        scale = 1 / size if average else 1
        # d/dx of rank r's loss is 2 (r + 1) y; summed over ranks, and divided by their number again
        wanted = 2 * (total * scale) * sum(r + 1 for r in range(size)) * scale
        for gradient in (jax.grad(loss, allow_int=True), jax.jit(jax.grad(loss, allow_int=True), static_argnums=1)):
            found = gradient(tree, average)
            assert np.allclose(found["x"], wanted, rtol=1e-6) and found["n"].dtype == jax.dtypes.float0, found
    def scanned(x):
        return jax.lax.scan(lambda c, _: (bps.push_pull(c, name="steps") * 2, None), x, None, length=3)[0].sum()

    assert same(jax.jit(jax.grad(scanned))(x), jnp.full(4, 8.0))
    # Of reverse mode twice: the gradient of what a gradient is made of.
    inner = jax.grad(lambda x: (bps.push_pull(x, name="twice") ** 3).sum())
    assert np.allclose(jax.grad(lambda x: inner(x).sum())(x), 6 * total / size, rtol=1e-5)
    assert "partial-eval" in raised(jax.grad(jax.checkpoint(lambda x: (bps.push_pull(x, name="r") ** 2).sum())), x)[1]
    return True


def test_through_push_pull(three_started):
    assert all(three_started.run(through))


def quadratic(params, data):
    return ((params["w"] * data["x"] + params["b"] - data["y"]) ** 2).mean()


def data_of(rank):
    x = np.linspace(-1, 1, 8, dtype=np.float32) + rank
    return {"x": x, "y": 3 * x - 1}


def helpers():
    params = {"w": jnp.float32(0.5), "b": jnp.float32(0.0)}
    mine = [jax.value_and_grad(quadratic)(params, data_of(rank)) for rank in range(bps.size())]
    mean = {key: sum(float(g[key]) for _, g in mine) / bps.size() for key in params}
    value, gradients = bps.value_and_grad(quadratic)(params, data_of(bps.rank()))
    assert float(value) == float(mine[bps.rank()][0])
    assert all(np.isclose(gradients[key], mean[key], rtol=1e-6) for key in params)
    assert same(jax.jit(bps.grad(quadratic, name="inside"))(params, data_of(bps.rank())), gradients)
    found, aux = bps.grad(lambda p, d: (quadratic(p, d), d["x"]), has_aux=True)(params, data_of(bps.rank()))
    assert same(found, gradients) and np.array_equal(aux, data_of(bps.rank())["x"])
    (first, second) = bps.value_and_grad(quadratic, argnums=(0, 1), name="both", op=bps.Sum)(
        params, jax.tree_util.tree_map(jnp.asarray, data_of(bps.rank())))[1]
    assert np.isclose(first["w"], mean["w"] * bps.size(), rtol=1e-5) and second["x"].shape == (8,)
    return True


def test_grad_and_value_and_grad(three_started):
    assert all(three_started.run(helpers))


def trained(n_passes, inside):
    optimizer = bps.DistributedOptimizer(optax.adam(0.1), f"trained {n_passes} {inside}",
                                         backward_passes_per_step=n_passes)
    params = bps.broadcast({"w": jnp.float32(bps.rank()), "b": jnp.float32(1.0)}, root_rank=0)
    state = optimizer.init(params)

    def step(params, state):
        updates, state = optimizer.update(jax.grad(quadratic)(params, data_of(bps.rank())), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if inside else step
    history = []
    for _ in range(4):
        params, state = step(params, state)
        history.append([float(params["w"]), float(params["b"])])
    return history


def alone(n_passes):
    """Train as all ranks do, in one process."""
    size = bps.size()
    optimizer = optax.adam(0.1)
    params = {"w": jnp.float32(0), "b": jnp.float32(1.0)}
    state, history = optimizer.init(params), []
    for step in range(4):
        if (step + 1) % n_passes == 0:
            each = [jax.grad(quadratic)(params, data_of(rank)) for rank in range(size)]
            mean = jax.tree_util.tree_map(lambda *g: sum(g) * n_passes / size, *each)
            updates, state = optimizer.update(mean, state, params)
            params = optax.apply_updates(params, updates)
        history.append([float(params["w"]), float(params["b"])])
    return history


def test_optimizer(three_started):
    for n_passes in (1, 2):
        expected = three_started.run(alone, n_passes)[0]
        for inside in (False, True):
            found = three_started.run(trained, n_passes, inside)
            assert found[0] == found[1] == found[2]
            assert np.allclose(found[0], expected, atol=1e-5)


def refused():
    from bpsfast import compression

    return [raised(bps.DistributedOptimizer, optax.sgd(1), backward_passes_per_step=0),
            raised(bps.DistributedOptimizer, "sgd"), raised(bps.distributed_gradients, compression=compression.onebit),
            raised(bps.distributed_gradients, op=5), raised(bps.value_and_grad, quadratic, compression="topk")]


def test_bad_arguments(three_started):
    for found in three_started.run(refused):
        assert {kind for kind, _ in found} == {"ConfigError"}, found
