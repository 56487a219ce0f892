"""push_pull of JAX's arrays inside and outside jit, on 1 to 4 ranks: every dtype, trees of all kinds."""
from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.jax_ranks import FLOATS, INTEGERS, bps, defined, given, jax, jnp, raised, same

SHAPES = [(1,), (2,), (2, 1), (2, 2)]


class Model(NamedTuple):
    """A tree with attributes."""

    weights: dict
    bias: object


def sums():
    rank = bps.rank()
    kinds = [*itertools.product((*FLOATS, *INTEGERS), [(2, 3)]), *itertools.product(["float32"], [(), (0, 2), (3000,)])]
    for average in (True, False):
        mine = {f"{dtype} {shape}": given(rank, dtype, shape) for dtype, shape in kinds}
        wanted = {f"{dtype} {shape}": defined(dtype, shape, average) for dtype, shape in kinds}
        def summed(tree, name, average=average):
            return bps.push_pull(tree, average, name=name)

        before = jax.tree_util.tree_map(np.array, mine)
        for _ in range(3):
            assert same(summed(mine, f"eager {average}"), wanted)
            assert same(summed(mine, None), wanted)
            assert same(jax.jit(summed, static_argnums=1)(mine, f"jit {average}"), wanted)
        assert same(jax.tree_util.tree_map(jnp.asarray, before), mine), "inputs are left alone"
    return True


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", SHAPES, ids=str)
def test_sums_of_all_dtypes_by_definition(job, ranks):
    assert all(job(ranks=ranks, transport="tcp" if len(ranks) > 1 else "auto").run(sums))


def trees():
    rank, size = bps.rank(), bps.size()
    mean = sum(range(size)) / size
    tree = Model({"a": [given(rank, "float32", (4,)), None], "b": ()}, jnp.float32(rank))
    wanted = Model({"a": [defined("float32", (4,)), None], "b": ()}, jnp.float32(mean))
    assert same(bps.push_pull(tree, name="tree"), wanted)
    assert same(jax.jit(lambda t: bps.push_pull(t, name="tree"))(tree), wanted)
    assert bps.push_pull({"a": None}) == {"a": None} and bps.push_pull([]) == []
    assert same(bps.push_pull([np.full(3, rank, "f4"), float(rank), rank], op=bps.Sum),
                [jnp.full(3, sum(range(size)), "f4"), jnp.float32(sum(range(size))), jnp.int32(sum(range(size)))])
    # Unnamed trees of several kinds keep apart.
    for n in (1, 2, 3):
        assert same(bps.push_pull([jnp.float32(rank)] * n), [jnp.float32(mean)] * n)
    alias = given(rank, "float32", (5,))
    assert same(bps.push_pull([alias, alias], name="twice the same"), [defined("float32", (5,))] * 2)
    noncontiguous = given(rank, "float32", (4, 6)).T[::2]
    assert same(bps.push_pull(noncontiguous, name="strides"), defined("float32", (4, 6)).T[::2])
    large = given(rank, "float32", (3_000_000,))  # not fused, huge pages
    for _ in range(3):
        found = bps.push_pull({"large": large, "small": jnp.ones(3)}, name="mixed")
        assert same(found, {"large": defined("float32", (3_000_000,)), "small": jnp.ones(3)})
    return True


def donated():
    rank = bps.rank()
    step = jax.jit(lambda x: bps.push_pull(x, name="donated") * 2, donate_argnums=0)
    for _ in range(3):
        x = given(rank, "float32", (1000,)) + 0
        assert same(step(x), defined("float32", (1000,)) * 2)
        assert x.is_deleted()
    x = given(rank, "float32", (1000,)) + 0
    found = bps.push_pull(x, name="result is new")
    again = np.array(found)
    for _ in range(4):
        bps.push_pull(x * 3, name="result is new")
    assert np.array_equal(found, again), "later rounds do not write into an earlier result"
    return True


def compressed():
    from bpsfast import compression

    x = jnp.linspace(-1, 1, 100_000, dtype=jnp.float32) * (bps.rank() + 1)
    tree = {"w": x, "b": jnp.ones(4) * bps.rank(), "n": jnp.int32(bps.rank())}
    found = [bps.push_pull(tree, name="half", compression=compression.float16()),
             jax.jit(lambda t: bps.push_pull(t, name="half", compression={"*.w": compression.float16()}))(tree)]
    exact = np.asarray(bps.push_pull(x, name="exact"))
    assert all(0 < np.abs(np.asarray(each["w"]) - exact).max() < 2e-3 for each in found)
    assert all(same({k: each[k] for k in "bn"}, bps.push_pull({k: tree[k] for k in "bn"})) for each in found)
    assert same(*found)
    return bytes(np.asarray(found[0]["w"]))


@pytest.fixture
def three_started(shared_job):
    return shared_job(ranks=(2, 1), transport="tcp")


def test_trees_of_all_kinds(three_started):
    assert all(three_started.run(trees))


def test_donated_buffers_and_results(three_started):
    assert all(three_started.run(donated))


def test_compression_by_names(three_started):
    assert len(set(three_started.run(compressed))) == 1


def refused():
    x = jnp.ones(3)
    push = bps.push_pull
    yes = lambda *names: raised(push, *names)  # noqa: E731
    return {
        "bool": yes(jnp.ones(3, bool)), "complex": yes(jnp.ones(3, jnp.complex64)),
        "uint32": yes(jnp.ones(3, jnp.uint32)),
        "inside": raised(jax.jit(push), {"a": jnp.ones(3, bool)}), "text": yes({"a": "words"}),
        "float64": yes({"a": np.ones(3)}), "names": yes({"a.b": x, "a": {"b": x}}),
        "op": raised(push, x, op=7), "both": raised(push, x, False, op=bps.Average),
        "compression": raised(push, x, compression="onebit"),
        "vmap": raised(jax.vmap(lambda x: push(x, name="mapped")), jnp.ones((2, 3))),
        "jit vmap": raised(jax.jit(jax.vmap(lambda x: push(x, name="mapped"))), jnp.ones((2, 3))),
        "compressed": raised(push, jnp.ones(3, jnp.int32), compression=__import__("bpsfast").compression.onebit()),
        "jvp": raised(lambda: jax.jvp(lambda x: push(x, name="jvp"), (x,), (x,))),
    }


def test_bad_input_is_refused_before_anything_is_sent(three_started):
    for found in three_started.run(refused):
        unsupported = {key: found.pop(key) for key in ("bool", "complex", "uint32", "inside", "text", "float64", "vmap",
                                                       "jit vmap", "compressed")}
        assert {kind for kind, _ in unsupported.values()} == {"UnsupportedError"}, unsupported
        assert "leaf 'jax.a'" in unsupported["inside"][1] and "jax_enable_x64" in unsupported["float64"][1]
        assert "'mapped'" in unsupported["vmap"][1] and "outside vmap" in unsupported["vmap"][1]
        kind, text = found.pop("jvp")
        assert kind == "TypeError" and "forward-mode" in text
        assert {kind for kind, _ in found.values()} == {"ConfigError"}, found
        assert "'jax.a.b'" in found["names"][1]


def without_init():
    return raised(bps.push_pull, jnp.ones(3))


def test_before_init(job):
    alone = job(ranks=(1,), attach=False)
    (kind, text), = alone.run(without_init)
    assert kind == "ClosedError" and "init" in text
    alone.kill()
