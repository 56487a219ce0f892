"""Elastic training with PyTorch (`bpsfast.elastic`): the state of models and optimizers, and a sampler.

    state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @elastic.run
    def train(state): ...
"""
from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from ..elastic.training import AttributeState, ObjectState, State, WorkersJoined, run
from ..trainer import process
from ..trainer.object_broadcast import broadcast_object
from .broadcast import broadcast_optimizer_state, broadcast_parameters
from .cross_barrier import settle_all_updates
from .optimizer import abandon, rejoin
from .optimizer_extras import load_user_state_dict, user_state_dict
from .parallel import DistributedDataParallel

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "WorkersJoined", "run"]


class TorchState(AttributeState):
    """Keyword arguments as attributes: modules, optimizers, other objects with a ``state_dict``, and plain objects.

    After a change of workers it lets optimizers of `DistributedOptimizer` and modules of `DistributedDataParallel` join
    the new job (`rejoin`), and samplers shard anew. It keeps neither the residuals of compressed gradients nor random
    number generators: seed them by rank and step if the training must be repeatable.

        state = TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)
    """

    def __init__(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None,
                 **others: Any) -> None:
        given = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in given.items() if value is not None}, **others)

    def check(self) -> None:
        """See `State`. Makes due updates (cross_barrier) first, because the next job does not have their sums."""
        settle_all_updates()
        super().check()

    def keep(self) -> None:
        """See `State`."""
        self._keep()

    def restore(self) -> None:
        """See `State`. Discards the gradients of the lost job, which will not be averaged any more."""
        for _, value in self._parts():
            if isinstance(value, torch.optim.Optimizer):
                abandon(value)
        for name, value in self._parts():
            self._load(name, value, copy.deepcopy(self._saved[name]))

    def reset(self) -> None:
        """See `State`. Lets models, then optimizers join the job, in the order of arguments; samplers shard anew."""
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
        """See `State`. Tensors of modules and optimizers are sent as they are, everything else is pickled."""
        is_root = process.rank() == root
        rest = {}
        for name, value in self._parts():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root, f"elastic {name}.")
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root, f"elastic {name}.")
            else:
                rest[name] = self._state_of(value)
        given = broadcast_object(rest if is_root else None, root, "elastic state")
        if not is_root:
            for name, found in given.items():
                self._load(name, getattr(self, name), found)
        for _, value in self._parts():
            if isinstance(value, ElasticSampler):
                value.reset()  # the root's, too, which may have been made before there was a job

    def _parts(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self._names]

    def _state_of(self, value: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            return user_state_dict(value)
        return value.state_dict() if _is_stateful(value) else value

    def _as_array(self, value: Any) -> np.ndarray[Any, Any] | None:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return None
        return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()

    def _load(self, name: str, value: Any, found: Any) -> None:
        if isinstance(value, torch.optim.Optimizer):
            load_user_state_dict(value, found)
        elif _is_stateful(value):
            value.load_state_dict(found)
        else:
            setattr(self, name, found)


def _rejoin_with_own_values(module: DistributedDataParallel) -> None:
    """Let *module* join the job and keep its values: joining gives it those of rank 0, which may be a new worker."""
    own = copy.deepcopy(module.state_dict())
    module.rejoin()
    module.load_state_dict(own)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class ElasticSampler(Sampler[int]):
    """Gives this rank its share of the indices of *dataset* that no rank has used in this epoch.

    All ranks take batches of the same size in step, so together they have used a prefix of the epoch's order, whatever
    the number of ranks was. Its length is the sampler's state, which is the same on all ranks. When ranks come and go,
    no index is lost, and only those of batches since the last commit are repeated. As in torch's DistributedSampler,
    indices are repeated where the rest cannot be divided evenly.

    In a job that goes on without lost ranks (on_worker_loss = continue) the indices that a lost rank had yet to use are
    divided among all at the next `reset`, when a worker joins. If none joins in the epoch, it ends without them.

        for batch_index, (x, y) in enumerate(DataLoader(dataset, batch_size, sampler=sampler)):
            ...
            sampler.record_batch(batch_index, batch_size)
            state.commit()
        sampler.set_epoch(epoch + 1)

    Attributes
    ----------
    epoch, n_processed, skipped
        The state: the epoch, how many of its indices were used, in its order, and which of these were not, because the
        rank that had them was lost. Call `reset` after changing them.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.n_processed = 0
        self.skipped = array("q")
        self.rank, self.num_replicas = 0, 1
        self._n_before = 0  # `n_processed` at the last reset
        self._skipped_before = array("q")  # `skipped` at the last reset
        self._newly = array("q")  # what has been skipped since then
        self._n_each = 0  # indices that each rank has used since then
        self._order: list[int] = []  # of all ranks together: rank r has every num_replicas-th one, from the r-th on
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin *epoch*. Call it at the end of the epoch before, so that nothing is repeated if a worker is lost."""
        self.epoch, self.n_processed, self.skipped = epoch, 0, array("q")
        self.reset()

    def record_batch(self, batch_index: int, batch_size: int) -> None:
        """Record that all ranks have used their batches up to *batch_index* (counted from 0 since the loader began)."""
        self._record((batch_index + 1) * batch_size)

    def _record(self, n_each: int) -> None:
        """Record that each rank that is not lost has used the first *n_each* of its indices since the last `reset`."""
        session = process.session()
        if session is not None and len(session.membership.members) < self.num_replicas:
            n_left = len(self._skipped_before) + len(self.dataset) - self._n_before  # what follows is repeated
            end = min(n_each * self.num_replicas, n_left)
            for rank in sorted(set(range(self.num_replicas)).difference(session.membership.members)):
                self._newly.extend(self._order[rank + self._n_each * self.num_replicas:end:self.num_replicas])
        self._n_each, n_used = n_each, n_each * self.num_replicas
        self.skipped = self._skipped_before[n_used:] + self._newly
        self.n_processed = min(self._n_before + max(0, n_used - len(self._skipped_before)), len(self.dataset))

    @property
    def processed_indices(self) -> list[int]:
        """The indices that were used in this epoch, in ascending order; computed at each call."""
        return sorted(set(self._shuffled()[: self.n_processed]).difference(self.skipped))

    def reset(self) -> None:
        """Divide the unused indices among the ranks of the present job (one, outside of jobs)."""
        session = process.session()
        self.rank, self.num_replicas = (session.rank, session.size) if session is not None else (0, 1)
        self._n_before, self._skipped_before = self.n_processed, self.skipped[:]
        self._newly, self._n_each = array("q"), 0
        left = [*self._skipped_before, *self._shuffled()[self._n_before :]]
        n_more = -len(left) % self.num_replicas
        self._order = left + (left * n_more)[:n_more]

    def _shuffled(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.dataset), generator=generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and which of its indices were used."""
        return {"epoch": self.epoch, "n_processed": self.n_processed, "skipped": self.skipped[:]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned on any rank."""
        self.epoch, self.n_processed = state["epoch"], state["n_processed"]
        self.skipped = array("q", state.get("skipped", ()))
        self.reset()

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over this rank's share of the indices that were unused at the last `reset`."""
        return iter(self._order[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return len(self._order) // self.num_replicas
