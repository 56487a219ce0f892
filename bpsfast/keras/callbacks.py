"""Keras callbacks that broadcast variables, average metrics and change the learning rate (`byteps.keras.callbacks`)."""
from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from ..orchestration.errors import ConfigError
from ..trainer import handle as operations, process
from ..trainer.broadcaster import check_root
from ..trainer.process import size
from .variables import broadcast_variables, is_built, state_of, without_numbers


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts the variables of model and optimizer of rank *root_rank* to all ranks, once, before the first batch.

    BytePS broadcasts after the first batch, in which each rank trains other weights. This callback does so only if the
    variables do not exist before: TensorFlow's trainer builds a model without an `Input` in the first batch.

    *device* is BytePS's. Raises in training as `variables.broadcast_variables`.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        if not isinstance(root_rank, int | np.integer) or root_rank < 0:
            raise ConfigError(f"root_rank={root_rank!r}: expected the number of a rank, from 0 on")
        self._root_rank = int(root_rank)
        self._is_done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast the variables if they exist."""
        check_root(process.current(), self._root_rank)
        model = self.model
        if is_built(model):
            if model.optimizer is not None and not model.optimizer.built:  # as TensorFlow leaves it
                model.optimizer.build(model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast the variables unless `on_train_begin` did."""
        self._broadcast()

    def _broadcast(self) -> None:
        if not self._is_done:
            broadcast_variables(state_of(self.model), self._root_rank)
            self._is_done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the metrics at the end of each epoch by their means over all ranks, all in one push_pull.

    Place it before callbacks that use metrics. All ranks must have the same metrics, validation included, else they get
    a `StallError` that names them. *device* is BytePS's.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the numbers of *logs* in place."""
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


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` from *start_epoch* on, before *end_epoch*.

    Parameters
    ----------
    multiplier
        A number, or a function of the epoch.
    staircase
        Change the rate at the start of each epoch; else before each batch, with ``multiplier(epoch + batch /
        steps_per_epoch)``. If *multiplier* is a number, the rate changes at the start of each epoch.
    momentum_correction
        Scale the momentum of SGD and RMSprop by new rate / old rate, as the paper says. BytePS scales the coefficient
        for one batch instead, with the same result, but not in compiled programs.
    steps_per_epoch
        None: the number that Keras finds.
    initial_lr
        None: the optimizer's rate when training begins.

    Raises ConfigError if an argument is invalid; when training begins, if the optimizer's rate cannot be set, or the
    number of steps is unknown.
    """

    def __init__(self, multiplier: float | Callable[[float], float], start_epoch: int = 0, end_epoch: int | None = None,
                 staircase: bool = True, momentum_correction: bool = True, steps_per_epoch: int | None = None,
                 initial_lr: float | None = None) -> None:
        super().__init__()
        if not callable(multiplier):
            _require(multiplier, "multiplier", lambda value: value >= 0, "a number that is not negative, or a function")
        _require(start_epoch, "start_epoch", lambda value: value >= 0, "a number from 0 on")
        if end_epoch is not None:
            _require(end_epoch, "end_epoch", lambda value: value >= start_epoch, f"a number from {start_epoch} on")
        if steps_per_epoch is not None:
            _require(steps_per_epoch, "steps_per_epoch", lambda value: value > 0, "a number of steps")
        if initial_lr is not None:
            _require(initial_lr, "initial_lr", lambda value: value > 0, "a positive number")
        self._multiplier = multiplier
        self._start_epoch, self._end_epoch = start_epoch, end_epoch
        self._staircase = staircase or not callable(multiplier)
        self._corrects = momentum_correction
        self._steps_per_epoch = steps_per_epoch
        self._initial_lr = initial_lr
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Note the optimizer's learning rate and the number of steps, unless they were given."""
        rate = _rate(self.model.optimizer)
        if self._initial_lr is None:
            self._initial_lr = rate
        if not self._staircase and self._steps_per_epoch is None:
            self._steps_per_epoch = (self.params or {}).get("steps")
            if not self._steps_per_epoch:
                raise ConfigError(f"{type(self).__name__} changes the learning rate with each batch, and Keras does "
                                  "not know how many an epoch has: give steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the learning rate if it changes before this batch."""
        if self._epoch < self._start_epoch or (self._end_epoch is not None and self._epoch >= self._end_epoch):
            return
        if not self._staircase:
            assert self._steps_per_epoch, "found when training began"
            self._adjust(self._epoch + batch / self._steps_per_epoch)
        elif batch == 0:
            self._adjust(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate as "lr"."""
        if logs is not None:
            logs["lr"] = _rate(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        factor = self._multiplier(epoch) if callable(self._multiplier) else self._multiplier
        _require(factor, f"multiplier({epoch:g})", lambda value: value >= 0, "a number that is not negative")
        assert self._initial_lr is not None, "found when training began"
        old, new = _rate(optimizer), self._initial_lr * float(factor)
        optimizer.learning_rate = new
        if self._corrects and old > 0 and new != old:
            for momentum in _momenta(optimizer):
                momentum.assign(momentum * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr`` in the first *warmup_epochs*.

    It changes with each batch: ``initial_lr / size * (e * (size - 1) / warmup_epochs + 1)``, with
    e = epoch + (batch + 1) / steps_per_epoch. *verbose* 1 prints a line at the end. The other parameters are those of
    `LearningRateScheduleCallback`.
    """

    def __init__(self, warmup_epochs: int = 5, momentum_correction: bool = True, steps_per_epoch: int | None = None,
                 verbose: int = 0, initial_lr: float | None = None) -> None:
        _require(warmup_epochs, "warmup_epochs", lambda value: value >= 0, "a number of epochs")

        def multiplier(epoch: float) -> float:
            assert self._steps_per_epoch, "found when training began"
            # With the step after this one: round numbers at the end of each epoch look better in plots.
            epoch += 1 / self._steps_per_epoch
            return 1 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch, initial_lr)
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate; say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        assert self._end_epoch is not None, "the warm-up has an end"
        if self._verbose > 0 and epoch == self._end_epoch - 1:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {_rate(self.model.optimizer):g}.")


def _rate(optimizer: Any) -> float:
    rate = getattr(optimizer, "learning_rate", None)  # several optimizers have none in common
    if not isinstance(rate, keras.Variable):
        raise ConfigError(f"the learning rate of optimizer {getattr(optimizer, 'name', optimizer)!r} cannot be set: it "
                          "is a schedule's or a function's, or those of several optimizers; make it with a number")
    return float(keras.ops.convert_to_numpy(rate))


def _momenta(optimizer: Any) -> list[Any]:
    """Return the variables of *optimizer* that accumulate steps multiplied by the learning rate (unlike Adam's)."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not inner.built or not isinstance(inner, keras.optimizers.SGD | keras.optimizers.RMSprop) or not inner.momentum:
        return []
    found = inner.momentums if isinstance(inner, keras.optimizers.SGD) else inner._momentums
    return [each for each in found if each is not None]


def _require(value: Any, name: str, is_possible: Callable[[float], bool], expected: str) -> None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or not is_possible(number):
        raise ConfigError(f"{name}={value!r}: expected {expected}")
