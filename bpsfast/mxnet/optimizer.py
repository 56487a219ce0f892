"""BytePS's DistributedOptimizer for MXNet: an optimizer whose gradients are averaged over all ranks first."""
from __future__ import annotations

from typing import Any

import mxnet

from ..orchestration.errors import ConfigError
from .ops import push_pull_all


class DistributedOptimizer(mxnet.optimizer.Optimizer):  # type: ignore[misc]
    """*optimizer*, for averages: every update averages ``gradient_<index>`` of all ranks first.

    *prefix* is put before these names; two models that are trained side by side need two.
    """

    def __init__(self, optimizer: Any, prefix: str = "") -> None:
        if not isinstance(optimizer, mxnet.optimizer.Optimizer):
            raise ConfigError(f"{optimizer!r} is no optimizer of MXNet: use mxnet.optimizer.create(...)")
        self._optimizer = optimizer
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    @property
    def wrapped(self) -> Any:
        """The optimizer that was given."""
        return self._optimizer

    def _average(self, index: Any, gradient: Any) -> None:
        several = index if isinstance(index, tuple | list) else [index]
        gradients = gradient if isinstance(index, tuple | list) else [gradient]
        push_pull_all([(f"{self._prefix}gradient_{i}", each, -i) for i, each in zip(several, gradients)])

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average *grad*, then update."""
        self._average(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average *grad*, then update."""
        self._average(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def create_state(self, index: Any, weight: Any) -> Any:
        """Return the optimizer's state."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """Return the optimizer's state."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def set_learning_rate(self, lr: float) -> None:
        """Set the optimizer's learning rate."""
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Any) -> None:
        """Set the optimizer's factors of learning rates."""
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Any) -> None:
        """Set the optimizer's factors of weight decay."""
        self._optimizer.set_wd_mult(args_wd_mult)
