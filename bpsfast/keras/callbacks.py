"""Callbacks with the names and arguments of `byteps.keras.callbacks`."""
from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np

from ..orchestration.errors import ConfigError
from ..trainer import handle as operations, process
from ..trainer.broadcaster import check_root
from .learning_rate_callbacks import (
    LearningRateScheduleCallback as LearningRateScheduleCallback,
    LearningRateWarmupCallback as LearningRateWarmupCallback,
)
from .paths import without_numbers
from .variables import broadcast_variables, is_built, state_of


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Overwrites the variables of model and optimizer on all ranks by those of rank *root_rank*, once, before the first
    batch.

    BytePS does it after the first batch, in which each rank has trained weights of its own. So does this one only where
    the variables are not there before: TensorFlow's trainer builds a model without an `Input` with the first batch.

    *device* is BytePS's. Raises in training as `variables.broadcast_variables`.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        if not isinstance(root_rank, int | np.integer) or root_rank < 0:
            raise ConfigError(f"root_rank={root_rank!r}: expected the number of a rank, from 0 on")
        self._root_rank = int(root_rank)
        self._is_done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast, if the variables are there."""
        check_root(process.current(), self._root_rank)
        model = self.model
        if is_built(model):
            if model.optimizer is not None and not model.optimizer.built:  # as TensorFlow leaves it
                model.optimizer.build(model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast, if it was not done before."""
        self._broadcast()

    def _broadcast(self) -> None:
        if not self._is_done:
            broadcast_variables(state_of(self.model), self._root_rank)
            self._is_done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the metrics at the end of each epoch by their means over all ranks, all in one push_pull.

    Place it before callbacks that use metrics. All ranks must have the same ones, validation included: those that have
    not get a `StallError` that names them. *device* is BytePS's.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average *logs* in place; what is no number stays."""
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if isinstance(value, int | float | np.number))
        if names:
            means = operations.push_pull(np.array([logs[name] for name in names], np.float64), name=_title(names))
            logs.update(zip(names, map(float, means)))


def _title(names: list[str]) -> str:
    text = ", ".join(map(without_numbers, names))
    if len(text) > 150:
        text = f"{text[:150]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
    return f"metrics of Keras: {text}"
