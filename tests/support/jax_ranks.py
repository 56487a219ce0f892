"""Helpers of tests of bpsfast.jax; importing it without JAX skips the tests.

Ranks are started, not forked, because JAX has threads after its first array.
"""
from __future__ import annotations

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="jax is not installed: pip install bpsfast[jax]")
optax = pytest.importorskip("optax", reason="optax is not installed: pip install bpsfast[jax]")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import bpsfast.jax as bps  # noqa: E402

FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "uint8")


def given(rank, dtype, shape):
    """Return the array of *rank*: small integers, so that float sums are exact."""
    n = int(np.prod(shape))
    return jnp.asarray(((np.arange(n).reshape(shape) % 5) * (rank + 1) + rank), dtype)


def defined(dtype, shape, average=True):
    """Return the sum of all ranks' arrays, or their mean, by definition."""
    wide = np.int64 if dtype in INTEGERS else np.float64
    total = sum(np.asarray(given(rank, dtype, shape)).astype(wide) for rank in range(bps.size()))
    if average:
        total = total // bps.size() if dtype in INTEGERS else total / bps.size()
    return jnp.asarray(total.astype(jnp.dtype(dtype)))


def same(found, wanted):
    """Return whether two trees are equal bit for bit."""
    kinds = jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(wanted)
    pairs = zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(wanted))
    return kinds and all((a.dtype, a.shape) == (b.dtype, b.shape) and np.asarray(a).tobytes() == np.asarray(b).tobytes()
                         for a, b in pairs)


def raised(function, *arguments, **keywords):
    """Return the class name and the message of the exception of *function*."""
    try:
        jax.block_until_ready(function(*arguments, **keywords))
    except Exception as exc:
        return type(exc).__name__, str(exc)
    return "", ""
