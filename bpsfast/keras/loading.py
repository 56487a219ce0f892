"""Saved models, loaded to be trained by all ranks."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from ..orchestration.errors import ConfigError
from .compression import Compression, CompressionLike, parted
from .optimizer import distribute
from .reduction import Reduction


def load_model(filepath: Any, custom_optimizers: Sequence[type] | None = None,
               custom_objects: Mapping[str, Any] | None = None, compression: CompressionLike = Compression.none,
               **options: Any) -> Any:
    """Return the model of *filepath*, as `keras.models.load_model`, whose optimizer is a DistributedOptimizer, with its
    state.

    Each rank reads the file. It may have been saved with a DistributedOptimizer or without.

    Parameters
    ----------
    custom_optimizers
        Classes of optimizers that are not Keras's, and not registered with it.
    custom_objects
        As of Keras.
    compression
        As of `DistributedOptimizer`.
    options
        Others of `keras.models.load_model`.

    Raises
    ------
    ConfigError
        If *custom_optimizers* are no classes of optimizers, or *compression* is not possible; nothing is read then.
    """
    reduction = Reduction(None, True, *parted(compression))
    return loaded(filepath, custom_optimizers, custom_objects, reduction, options)


def loaded(filepath: Any, custom_optimizers: Sequence[type] | None, custom_objects: Mapping[str, Any] | None,
           reduction: Reduction, options: Mapping[str, Any]) -> Any:
    """As `load_model`, with any *reduction*."""
    objects: dict[str, Any] = {}
    for kind in custom_optimizers or ():
        if not (isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)):
            raise ConfigError(f"custom_optimizers has {kind!r}, which is no class of optimizers of Keras")
        objects[kind.__name__] = kind
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})}, **options)
    if getattr(model, "optimizer", None) is not None:
        distribute(model.optimizer, reduction)
    return model
