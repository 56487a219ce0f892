"""push_pull of pytrees, inside and outside jit; broadcast of one rank's pytree to all ranks."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base.dtypes import wire_name
from ..compression.choice import Choice, check_choice, chosen_among
from ..orchestration.errors import ConfigError, UnsupportedError
from ..trainer import process
from ..trainer.arguments import averages
from ..trainer.bundle import Leaf
from ..trainer.handle import push_pull_async
from ..trainer.object_broadcast import broadcast_arrays
from . import primitive
from .primitive import PushPullCall


def names_of(tree: Any, prefix: str) -> list[str]:
    """Return a name for each leaf: *prefix* and the keys, indexes and attributes of its path, joined by dots."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [".".join([prefix, *map(_key, path)]) for path in paths]


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry).strip(".[]'")


def is_on_device(leaf: Any) -> bool:
    """Return whether *leaf* is on another device than the CPU; raises `UnsupportedError` if it is on several."""
    devices = leaf.devices()
    if len(devices) != 1:
        raise UnsupportedError(f"an array of shape {leaf.shape} lies on {len(devices)} devices; bpsfast sums arrays of "
                               "one device for each rank. Start one process for each device")
    (device,) = devices
    return bool(device.platform != "cpu")


def _push_pull_on_devices(call: PushPullCall, leaves: Sequence[Any]) -> list[Any]:
    """Sum *leaves*, some of which are on GPUs, outside jit, by DLPack; each sum is on the device of its leaf."""
    handles = [push_pull_async(leaf, call.average, each.name, call.priority, compression=each.codec)
               for leaf, each in zip(leaves, call.leaves)]
    sums = [handle.wait() for handle in handles]
    return [jax.dlpack.from_dlpack(total) if is_on_device(leaf) else jax.device_put(total, leaf.sharding)
            for leaf, total in zip(leaves, sums)]


def push_pull(tree: Any, average: bool = True, name: str | None = None, priority: int | None = None,
              compression: Choice | None = None, *, op: int | None = None) -> Any:
    """Return *tree* with each leaf averaged (or summed) over all ranks. Differentiable in reverse mode; works in jit.

    All leaves are sent before the first sum is awaited. All ranks must make their push_pulls of JAX arrays in the same
    order: outside jit the order of the calls, inside jit the order in which JAX traces them.

    Parameters
    ----------
    tree
        Arrays of the same shapes and dtypes on all ranks. None is not a leaf, and stays None. Inputs are not copied.
    average
        Divide by the number of ranks; integers are rounded down (floor).
    name
        The prefix of the names of the leaves in the job: ``name.layer.w`` for ``{"layer": {"w": ...}}``. None: names
        are made of the path to the leaf and a digest of the whole tree.
    priority
        Higher goes first. None: names that were used earlier go first.
    compression
        As of `bpsfast.push_pull`; chosen by the names of the leaves.
    op
        Average or Sum, instead of *average*.

    Returns
    -------
    New arrays. Outside jit they are ready when this returns; on GPUs they are ordered on the device.

    Raises
    ------
    UnsupportedError
        For an unsupported dtype (or one that needs jax_enable_x64), inside vmap, and inside jit for another platform
        than the CPU.
    ConfigError
        If two leaves have the same name, or *op* or *compression* is invalid.
    MismatchError, BusyError, ClosedError, StallError, PeerLostError
        As `bpsfast.push_pull`. Inside jit JAX raises a `jax.errors.JaxRuntimeError` with their class and text.
    """
    given, structure = jax.tree_util.tree_flatten(tree)
    if not given:
        return tree
    process.current()
    key = structure, tuple([_kind(leaf) for leaf in given]), average, name, priority, op
    call = _calls.get(key) if compression is None else None
    if call is not None:
        leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in given]
    else:
        names = names_of(tree, "jax" if name is None else name)
        leaves = [_array(leaf, each) for leaf, each in zip(given, names)]
        kinds = [(tuple(leaf.shape), _wire_name(leaf, each)) for leaf, each in zip(leaves, names)]
        call = _call_of(names, kinds, averages(average, op), name is not None, priority, compression)
        if compression is None:
            _calls[key] = call
    return jax.tree_util.tree_unflatten(structure, summed(call, leaves))


def summed(call: PushPullCall, leaves: Sequence[Any]) -> list[Any]:
    """Return the sums (means) of the arrays *leaves* of *call*; inside and outside jit."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return list(primitive.differentiable(call, *leaves))
    if any(is_on_device(leaf) for leaf in leaves):
        return _push_pull_on_devices(call, leaves)
    return primitive.run(call, leaves)


#: Calls by tree and arguments, as a training loop makes the same ones thousands of times.
_calls: dict[Any, PushPullCall] = {}


def _kind(leaf: Any) -> tuple[Any, ...]:
    return type(leaf), getattr(leaf, "shape", None), getattr(leaf, "dtype", None)


def _array(leaf: Any, name: str) -> Any:
    """Return *leaf* as a JAX array of the same dtype."""
    if isinstance(leaf, jax.Array):
        return leaf
    if not isinstance(leaf, np.ndarray | np.generic | float | int) or isinstance(leaf, bool):
        raise UnsupportedError(f"leaf {name!r} is a {type(leaf).__name__}: only arrays and numbers are summed")
    array = jnp.asarray(leaf)
    if isinstance(leaf, np.ndarray | np.generic) and array.dtype != leaf.dtype:
        raise UnsupportedError(f"leaf {name!r} is {leaf.dtype}, which JAX converts to {array.dtype}: convert it, set "
                               "jax_enable_x64, or use bpsfast.push_pull")
    return array


def _wire_name(leaf: Any, name: str) -> str:
    try:
        return wire_name(leaf.dtype)
    except UnsupportedError as exc:
        raise UnsupportedError(f"leaf {name!r}: {exc}") from None


def _call_of(names: Sequence[str], kinds: Sequence[tuple[tuple[int, ...], str]], mean: bool, is_named: bool,
          priority: int | None, compression: Choice | None) -> PushPullCall:
    check_choice(compression)
    if len(set(names)) < len(names):
        twice = next(each for each in names if names.count(each) > 1)
        raise ConfigError(f"two leaves have the name {twice!r}: keys of a tree are joined by dots, so no key may be "
                          "made of others and dots")
    codecs = {} if compression is None else chosen_among(
        compression, dict(zip(names, kinds)), process.current().settings.min_compress_bytes, is_alone=len(names) == 1)
    leaves = tuple(Leaf(name, shape, dtype, codecs.get(name)) for name, (shape, dtype) in zip(names, kinds))
    call = PushPullCall(leaves, mean, priority)
    if is_named:
        return call
    # Other trees are other tensors.
    return replace(call, leaves=tuple(replace(leaf, name=f"{leaf.name} of {call.digest[:12]}") for leaf in leaves))


def broadcast(tree: Any, root_rank: int = 0, name: str = "tree") -> Any:
    """Return rank *root_rank*'s *tree* on all ranks. All ranks call their broadcasts in the same order. Not inside jit.

    Parameters
    ----------
    tree
        Arrays of any dtype on any device, keys of `jax.random`, and numbers, of the same structure, shapes and dtypes
        on all ranks: parameters and optax's states, for example. Leaves stay on their devices.
    name
        Must be the same on all ranks.

    Raises
    ------
    MismatchError
        If the ranks' trees differ; the error names the first leaf that does.
    UnsupportedError
        Inside jit, and for leaves that are not arrays or numbers.
    ConfigError, StallError, PeerLostError
        As `bpsfast.broadcast`.
    """
    session = process.current()
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
    """Return the value of *host* with the type of *leaf*, on its devices."""
    if not isinstance(leaf, jax.Array):
        return host if isinstance(leaf, np.ndarray) else host[()] if isinstance(leaf, np.generic) else host.item()
    if _is_key(leaf):
        key = jax.random.wrap_key_data(jax.numpy.asarray(host), impl=jax.random.key_impl(leaf))
        return jax.device_put(key, leaf.sharding)
    return jax.device_put(host, leaf.sharding)
