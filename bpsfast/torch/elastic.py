"""Elastic training with PyTorch (`bpsfast.elastic`): the state of a model and its optimizer, and a sampler.

    state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @elastic.run
    def train(state): ...
"""
from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from ..elastic.running import WorkersJoined, run
from ..elastic.training import ObjectState, State
from ..trainer import process
from ..trainer.object_broadcast import broadcast_object
from .broadcast import broadcast_optimizer_state, broadcast_parameters
from .cross_barrier import settle_all_updates
from .elastic_sampler import ElasticSampler
from .optimizer import abandon, rejoin
from .optimizer_extras import load_user_state_dict, user_state_dict
from .parallel import DistributedDataParallel

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "WorkersJoined", "run"]


class TorchState(State):
    """Keyword arguments as attributes: modules, optimizers, whatever has a ``state_dict``, and plain objects.

    In each further job optimizers that `DistributedOptimizer` has made, and modules that `DistributedDataParallel` has,
    are joined to it (`rejoin`), samplers shard anew. Not kept: what compressed gradients had left unsent; random number
    generators (seed them by rank and step where a training shall be repeatable).

        state = TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)
    """

    def __init__(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None,
                 **others: Any) -> None:
        super().__init__()
        given = {"model": model, "optimizer": optimizer}
        parts = {**{name: value for name, value in given.items() if value is not None}, **others}
        self._names = tuple(parts)
        for name, value in parts.items():
            setattr(self, name, value)
        self._saved: dict[str, Any] = {}
        self.keep()

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def check(self) -> None:
        """See `State`. Updates that are due (cross_barrier) are made before: the next job would not have their sums."""
        settle_all_updates()
        super().check()

    def keep(self) -> None:
        """See `State`."""
        self._saved = {name: copy.deepcopy(_state_of(value)) for name, value in self._parts()}

    def restore(self) -> None:
        """See `State`. Gradients are forgotten: those of the lost job will never be averages."""
        for _, value in self._parts():
            if isinstance(value, torch.optim.Optimizer):
                abandon(value)
        for name, value in self._parts():
            self._load(name, value, copy.deepcopy(self._saved[name]))

    def reset(self) -> None:
        """Join optimizers and modules to the job, let samplers shard anew: models first, in the order of arguments."""
        for _, value in self._parts():
            if isinstance(value, torch.nn.Module):
                for module in value.modules():
                    if isinstance(module, DistributedDataParallel):
                        _rejoin_with_own_values(module)
        for _, value in self._parts():
            if isinstance(value, torch.optim.Optimizer) and hasattr(value, "_exchange"):
                rejoin(value)
            elif isinstance(value, ElasticSampler):
                value.reset()

    def give(self, root: int) -> None:
        """See `State`. Tensors of modules and optimizers travel as they are, everything else is pickled."""
        is_root = process.rank() == root
        rest = {}
        for name, value in self._parts():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root, f"elastic {name}.")
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root, f"elastic {name}.")
            else:
                rest[name] = _state_of(value)
        given = broadcast_object(rest if is_root else None, root, "elastic state")
        if not is_root:
            for name, found in given.items():
                self._load(name, getattr(self, name), found)
        for _, value in self._parts():
            if isinstance(value, ElasticSampler):
                value.reset()  # the root's, too, which may have been made before there was a job

    def _parts(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self._names]

    def _load(self, name: str, value: Any, found: Any) -> None:
        if isinstance(value, torch.optim.Optimizer):
            load_user_state_dict(value, found)
        elif _is_stateful(value):
            value.load_state_dict(found)
        else:
            setattr(self, name, found)


def _rejoin_with_own_values(module: DistributedDataParallel) -> None:
    """Join *module* to the job. It is given rank 0's values there, as at its making; but rank 0 may be a newcomer."""
    own = copy.deepcopy(module.state_dict())
    module.rejoin()
    module.load_state_dict(own)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        return user_state_dict(value)
    return value.state_dict() if _is_stateful(value) else value
