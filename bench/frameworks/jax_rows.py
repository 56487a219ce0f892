"""The JAX rows of `bench frameworks`: push_pull of a list of arrays, outside jit and inside."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bpsfast.jax import push_pull


def eager(arrays: Sequence[np.ndarray[Any, Any]]) -> Callable[[], list[Any]]:
    """Return a function that sums *arrays* outside jit."""
    tree = [jnp.asarray(array) for array in arrays]
    return lambda: push_pull(tree, name=f"jax eager {len(tree)}")


def jitted(arrays: Sequence[np.ndarray[Any, Any]]) -> Callable[[], list[Any]]:
    """Return a jitted function that only sums *arrays*."""
    tree = [jnp.asarray(array) for array in arrays]
    program = jax.jit(lambda tree: push_pull(tree, name=f"jax jit {len(tree)}"))
    return lambda: jax.block_until_ready(program(tree))


ROWS = {"jax eager": eager, "jax jit": jitted}
