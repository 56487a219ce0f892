"""Everybody starts from the same state: the leaves of one rank's pytree, given to all."""
from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ..orchestration.errors import UnsupportedError
from ..trainer import process
from ..trainer.broadcaster import check_root
from ..trainer.object_broadcast import broadcast_arrays
from .ops import names_of


def broadcast(tree: Any, root_rank: int = 0, name: str = "tree") -> Any:
    """Return rank *root_rank*'s *tree* on all ranks, which call their broadcasts in one order. Not inside jit.

    Parameters
    ----------
    tree
        Arrays of any dtype, on any device, keys of `jax.random`, and numbers; of the same structure, shapes and dtypes
        on all ranks. Parameters and optax's states are such trees. Leaves stay on their devices.
    name
        Is checked to agree.

    Raises
    ------
    MismatchError
        If the ranks' trees differ; the text names the first leaf that does.
    UnsupportedError
        Inside jit, and for leaves that are neither arrays nor numbers.
    ConfigError, StallError, PeerLostError
        As `bpsfast.broadcast`.
    """
    session = process.current()
    check_root(session, root_rank)
    given, structure = jax.tree_util.tree_flatten(tree)
    names = names_of(tree, name)
    hosts = [_host_copy(leaf, each) for leaf, each in zip(given, names)]
    received = broadcast_arrays(list(zip(names, hosts)), root_rank, f"leaves of {name}")
    if session.size == 1 or session.rank == root_rank:
        return tree
    return jax.tree_util.tree_unflatten(structure, [_like(leaf, host) for leaf, host in zip(given, received)])


def _host_copy(leaf: Any, name: str) -> np.ndarray[Any, Any]:
    if isinstance(leaf, jax.core.Tracer):
        raise UnsupportedError(f"broadcast of {name!r} inside jit, grad or vmap: call it outside, before training")
    if isinstance(leaf, jax.Array) and _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    elif not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise UnsupportedError(f"leaf {name!r} is a {type(leaf).__name__}: only arrays and numbers are broadcast")
    return np.ascontiguousarray(leaf).reshape(np.shape(leaf))


def _is_key(leaf: jax.Array) -> bool:
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _like(leaf: Any, host: np.ndarray[Any, Any]) -> Any:
    """Return what *host* holds as *leaf* is: of its type, on its devices."""
    if not isinstance(leaf, jax.Array):
        return host if isinstance(leaf, np.ndarray) else host[()] if isinstance(leaf, np.generic) else host.item()
    if _is_key(leaf):
        key = jax.random.wrap_key_data(jax.numpy.asarray(host), impl=jax.random.key_impl(leaf))
        return jax.device_put(key, leaf.sharding)
    return jax.device_put(host, leaf.sharding)
