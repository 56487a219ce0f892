"""BytePS's DistributedOptimizer and DistributedTrainer for MXNet, which first average gradients over all ranks."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet

from ..compression import from_byteps
from ..orchestration.errors import ConfigError, UnsupportedError
from ..trainer.broadcaster import broadcast
from .ops import memory_of, push_pull_all


def _delegated(name: str) -> Any:
    """Return a method that calls method *name* of the wrapped optimizer."""
    def call(self: DistributedOptimizer, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.wrapped, name)(*arguments, **keywords)

    call.__name__ = name
    return call


class DistributedOptimizer(mxnet.optimizer.Optimizer):  # type: ignore[misc]
    """Averages ``gradient_<index>`` over all ranks before each update of *optimizer*.

    *prefix* is put before these names. Two models that are trained at the same time need different ones.
    """

    def __init__(self, optimizer: Any, prefix: str = "") -> None:
        if not isinstance(optimizer, mxnet.optimizer.Optimizer):
            raise ConfigError(f"{optimizer!r} is not an optimizer of MXNet: use mxnet.optimizer.create(...)")
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

    create_state = _delegated("create_state")
    create_state_multi_precision = _delegated("create_state_multi_precision")
    set_learning_rate = _delegated("set_learning_rate")
    set_lr_mult = _delegated("set_lr_mult")
    set_wd_mult = _delegated("set_wd_mult")


class DistributedTrainer(mxnet.gluon.Trainer):  # type: ignore[misc]
    """Gluon's Trainer that averages gradients over all ranks, and starts with the parameters of rank *root_rank*.

    Parameters
    ----------
    params, optimizer, optimizer_params
        As Gluon's. For a `DistributedOptimizer` its inner optimizer is used.
    compression_params
        BytePS's keywords of compression (`bpsfast.compression.from_byteps`). With ``momentum`` the compressor applies
        the momentum, which is removed from *optimizer_params*.
    prefix
        Put before the names ``gradient_<i>``. Two models that are trained at the same time need different ones.
    """

    def __init__(self, params: Any, optimizer: Any, optimizer_params: Mapping[str, Any] | None = None,
                 root_rank: int = 0, compression_params: Mapping[str, Any] | None = None, prefix: str = "") -> None:
        keywords, chosen = dict(compression_params or {}), dict(optimizer_params or {})
        if keywords.get("momentum") and "momentum_mu" not in keywords:
            keywords["momentum_mu"] = chosen.pop("momentum", 0.9)
        self._codec = from_byteps(keywords)
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = optimizer.wrapped
        super().__init__(params, optimizer, chosen or None, kvstore=None)
        self._root_rank, self._prefix = root_rank, prefix

    def _allreduce_grads(self) -> None:
        """Average the gradients over all ranks. Gluon calls this before updates."""
        tensors = []
        for i, param in enumerate(self._params):
            if param.grad_req == "null":
                continue
            gradients = param.list_grad()
            if len(gradients) != 1:
                raise UnsupportedError(f"parameter {param.name!r} is on {len(gradients)} devices: start one rank for "
                                       "each device")
            tensors.append((f"{self._prefix}gradient_{i}", gradients[0], -i))
        push_pull_all(tensors, compression=self._codec and {"*": self._codec}, learning_rate=self.learning_rate)

    def _init_params(self) -> None:
        """Broadcast the parameters that are initialized. Gluon calls this before each step until all are."""
        waiting: list[Any] = []
        for param in self._params_to_init:
            if param._deferred_init:
                waiting.append(param)
            else:
                place = self._param2idx[param.name]
                broadcast(memory_of(param.data()).array(), self._root_rank, f"{self._prefix}parameter_{place}")
        self._params_to_init: list[Any] = waiting
