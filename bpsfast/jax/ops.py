"""push_pull of pytrees, inside jit and outside."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base.dtypes import wire_name
from ..compression.choice import Choice, check_choice, chosen, chosen_among
from ..orchestration.codec import CodecSpec
from ..orchestration.errors import ConfigError, UnsupportedError
from ..trainer import process
from ..trainer.arguments import averages
from ..trainer.bundle import Leaf
from ..trainer.handle import push_pull_async
from . import primitive
from .primitive import PushPullCall


def names_of(tree: Any, prefix: str) -> list[str]:
    """Return a name for each leaf: *prefix* and the keys, indexes and attributes that lead to it, joined by dots."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [".".join([prefix, *map(_key, path)]) for path in paths]


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry).strip(".[]'")


def is_on_device(leaf: Any) -> bool:
    """Whether *leaf* lies elsewhere than on the CPU.

    Raises
    ------
    UnsupportedError
        If it lies on several devices.
    """
    devices = leaf.devices()
    if len(devices) != 1:
        raise UnsupportedError(f"an array of shape {leaf.shape} lies on {len(devices)} devices: bpsfast sums arrays of "
                               "one device for each rank; start one process for each device")
    (device,) = devices
    return bool(device.platform != "cpu")


def _push_pull_on_devices(site: PushPullCall, leaves: Sequence[Any]) -> list[Any]:
    """Sum *leaves*, some of which lie on GPUs, outside jit, by DLPack; the sums lie where the leaves do."""
    handles = [push_pull_async(leaf, site.average, each.name, site.priority, compression=each.codec)
               for leaf, each in zip(leaves, site.leaves)]
    sums = [handle.wait() for handle in handles]
    return [jax.dlpack.from_dlpack(total) if is_on_device(leaf) else jax.device_put(total, leaf.sharding)
            for leaf, total in zip(leaves, sums)]


def push_pull(tree: Any, average: bool = True, name: str | None = None, priority: int | None = None,
              compression: Choice | None = None, *, op: int | None = None) -> Any:
    """Return *tree* with each leaf summed over all ranks, or averaged. Differentiable in reverse mode; works in jit.

    All leaves are under way at once. Ranks must make their push_pulls of JAX arrays in one order: that in which their
    programs run outside jit, and in which Python passes through them while JAX traces inside.

    Parameters
    ----------
    tree
        Arrays of the same shapes and dtypes on all ranks. None is no leaf, and stays. Nothing is copied on the way in.
    average
        Divide by the number of ranks; integers are divided downwards (floor).
    name
        What the names of the leaves begin with, which are those of the job's tensors: ``name.layer.w`` for
        ``{"layer": {"w": ...}}``. None: names are made of the way to the leaf, and of what the whole tree is.
    priority
        Higher goes first where bytes compete. None: the earlier a name is first used, the more urgent it is.
    compression
        As of `bpsfast.push_pull`; chosen by the names of the leaves.
    op
        Average or Sum, instead of *average*.

    Returns
    -------
    New arrays. Outside jit they are ready when this returns, those of GPUs when their device has come so far.

    Raises
    ------
    UnsupportedError
        For leaves of a dtype that bpsfast does not sum (or not without jax_enable_x64), inside vmap, or inside jit for
        another platform than the CPU.
    ConfigError
        If two leaves have one name, or *op* or *compression* is not possible.
    MismatchError, BusyError, ClosedError, StallError, PeerLostError
        As `bpsfast.push_pull`. Inside jit JAX makes a `jax.errors.JaxRuntimeError` of them, with their class and text.
    """
    given, structure = jax.tree_util.tree_flatten(tree)
    if not given:
        return tree
    process.current()
    key = structure, tuple([_kind(leaf) for leaf in given]), average, name, priority, op
    site = _sites.get(key) if compression is None else None
    if site is not None:
        leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in given]
    else:
        names = names_of(tree, "jax" if name is None else name)
        leaves = [_array(leaf, each) for leaf, each in zip(given, names)]
        kinds = [(tuple(leaf.shape), _wire_name(leaf, each)) for leaf, each in zip(leaves, names)]
        site = _site(names, kinds, averages(average, op), name is not None, priority, compression)
        if compression is None:
            _sites[key] = site
    return jax.tree_util.tree_unflatten(structure, summed(site, leaves))


def summed(site: PushPullCall, leaves: Sequence[Any]) -> list[Any]:
    """Return the sums (means) of the arrays *leaves*, which are those that *site* says; inside jit and outside."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return list(primitive.differentiable(site, *leaves))
    if any(is_on_device(leaf) for leaf in leaves):
        return _push_pull_on_devices(site, leaves)
    return primitive.run(site, leaves)


#: Sites by what they come from: a training loop calls push_pull with the same trees thousands of times.
_sites: dict[Any, PushPullCall] = {}


def _kind(leaf: Any) -> tuple[Any, ...]:
    return type(leaf), getattr(leaf, "shape", None), getattr(leaf, "dtype", None)


def _array(leaf: Any, name: str) -> Any:
    """Return *leaf* as an array of JAX, of the same dtype."""
    if isinstance(leaf, jax.Array):
        return leaf
    if not isinstance(leaf, np.ndarray | np.generic | float | int) or isinstance(leaf, bool):
        raise UnsupportedError(f"leaf {name!r} is a {type(leaf).__name__}: only arrays and numbers are summed")
    array = jnp.asarray(leaf)
    if isinstance(leaf, np.ndarray | np.generic) and array.dtype != leaf.dtype:
        raise UnsupportedError(f"leaf {name!r} is {leaf.dtype}, of which JAX makes {array.dtype}: convert it, set "
                               "jax_enable_x64, or use bpsfast.push_pull")
    return array


def _wire_name(leaf: Any, name: str) -> str:
    try:
        return wire_name(leaf.dtype)
    except UnsupportedError as exc:
        raise UnsupportedError(f"leaf {name!r}: {exc}") from None


def _site(names: Sequence[str], kinds: Sequence[tuple[tuple[int, ...], str]], mean: bool, is_named: bool,
          priority: int | None, compression: Choice | None) -> PushPullCall:
    check_choice(compression)
    if len(set(names)) < len(names):
        twice = next(each for each in names if names.count(each) > 1)
        raise ConfigError(f"two leaves have the name {twice!r}: keys of a tree are joined by dots, so no key may be "
                          "made of others and dots")
    codecs: Mapping[str, CodecSpec | None] = {}
    if compression is not None:
        least = process.current().settings.min_compress_bytes
        if len(names) == 1:
            codecs = {names[0]: chosen(compression, names[0], *kinds[0], least, is_alone=True)}
        else:
            codecs = chosen_among(compression, dict(zip(names, kinds)), least)
    leaves = tuple(Leaf(name, shape, dtype, codecs.get(name)) for name, (shape, dtype) in zip(names, kinds))
    site = PushPullCall(leaves, mean, priority)
    if is_named:
        return site
    # Trees of another kind are other tensors.
    return replace(site, leaves=tuple(replace(leaf, name=f"{leaf.name} of {site.digest[:12]}") for leaf in leaves))
