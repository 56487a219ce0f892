"""Horovod's Keras callbacks: those of `bpsfast.keras` with the names and arguments of `horovod.keras.callbacks`."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...keras import callbacks
from ...keras.callbacks import MetricAverageCallback as MetricAverageCallback
from ...orchestration.errors import UnsupportedError


class BroadcastGlobalVariablesCallback(callbacks.BroadcastGlobalVariablesCallback):
    """As that of `bpsfast.keras`; *local_variables*, which would differ by rank, are refused."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        if local_variables:
            raise UnsupportedError("local_variables: all weights of the model are broadcast")
        super().__init__(root_rank, device)


class LearningRateScheduleCallback(callbacks.LearningRateScheduleCallback):
    """As that of `bpsfast.keras`."""

    def __init__(self, initial_lr: float, multiplier: float | Callable[[float], float], start_epoch: int = 0,
                 end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None) -> None:
        super().__init__(multiplier, start_epoch, end_epoch, staircase, momentum_correction, steps_per_epoch,
                         initial_lr)


class LearningRateWarmupCallback(callbacks.LearningRateWarmupCallback):
    """As that of `bpsfast.keras`."""

    def __init__(self, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None, verbose: int = 0) -> None:
        super().__init__(warmup_epochs, momentum_correction, steps_per_epoch, verbose, initial_lr)
