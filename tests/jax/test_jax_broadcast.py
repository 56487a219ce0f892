"""broadcast of pytrees: every dtype, random keys, numbers, optax's states; errors for trees that differ."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.jax_ranks import bps, jax, jnp, optax, raised, same


@pytest.fixture
def three_started(shared_job):
    return shared_job(ranks=(2, 1), transport="tcp")


def tree_of(rank):
    dtypes = ("float32", "bfloat16", "float16", "int32", "uint32", "bool", "complex64", "uint8")
    arrays = {dtype: jnp.asarray(np.arange(6).reshape(2, 3) * (rank + 1), dtype) for dtype in dtypes}
    state = optax.adam(1e-3).init({"w": jnp.ones(3)})
    return {"arrays": arrays, "empty": jnp.zeros((0, 2)), "none": None, "number": 1.5 * rank, "flag": rank == 1,
            "count": rank, "numpy": np.full(3, rank), "scalar": np.float64(rank), "key": jax.random.key(rank),
            "state": jax.tree_util.tree_map(lambda x: x + rank, state),
            "turned": jnp.arange(6.0).reshape(2, 3).T * rank}


def everywhere():
    for root in range(bps.size()):
        found, wanted = bps.broadcast(tree_of(bps.rank()), root_rank=root), tree_of(root)
        assert same(jax.random.key_data(found.pop("key")), jax.random.key_data(wanted.pop("key")))
        for key in ("number", "flag", "count", "scalar"):
            assert type(found[key]) is type(wanted[key]) and found.pop(key) == wanted.pop(key)
        assert isinstance(found["numpy"], np.ndarray) and same(found, wanted)
    large = bps.broadcast(jnp.full(2_000_000, float(bps.rank())), root_rank=1)
    return float(large[0]) == float(large[-1]) == 1


def test_every_kind_of_leaf(three_started):
    assert all(three_started.run(everywhere))


def differing():
    rank = bps.rank()
    return [
        raised(bps.broadcast, {"w": jnp.ones(3 + (rank == 1))}, 0), raised(bps.broadcast, {"w" * (rank + 1): 1.0}, 0),
        raised(bps.broadcast, [1.0] * (rank + 1), 0), raised(bps.broadcast, 1.0, 7),
        raised(bps.broadcast, {"a": "text"}, 0), raised(jax.jit(lambda x: bps.broadcast(x, 0)), jnp.ones(3)),
        bps.broadcast(rank + 5, 2)]


def test_what_does_not_fit(three_started):
    for rank, (shape, name, number, root, text, inside, after) in enumerate(three_started.run(differing)):
        assert [each[0] for each in (shape, name, number)] == [
            "MismatchError" if differs else "" for differs in ((rank == 1), rank > 0, rank > 0)]
        assert root[0] == "ConfigError" and text[0] == inside[0] == "UnsupportedError" and after == 7
        if rank == 1:
            assert "tree.w" in shape[1] and "tree.ww" in name[1] and "2 on rank 1" in number[1]
