"""Names of the leaves of a pytree, from the way to them: the same on all ranks, and in every run."""
from __future__ import annotations

from typing import Any

import jax


def names_of(tree: Any, prefix: str) -> list[str]:
    """Return a name for each leaf: *prefix* and the keys, indexes and attributes that lead to it, joined by dots."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [".".join([prefix, *map(_key, path)]) for path in paths]


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry).strip(".[]'")
