"""A sampler that knows which part of an epoch has been used, and shares out the rest among any number of ranks."""
from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from ..trainer import process


class ElasticSampler(Sampler[int]):
    """Indices of *dataset* for this rank, of those that no rank has used in this epoch.

    All ranks take batches of one size in step. So what all have used after this rank's batch follows from its number:
    it is always the beginning of the epoch's one order, whatever the number of ranks was. Its length is the sampler's
    state, which is the same on all ranks, loses and repeats nothing when ranks come and go, but for batches since the
    last commit, which are used again, and costs nothing to keep. As in torch's DistributedSampler, indices are repeated
    where the rest cannot be shared out evenly.

        for batch_index, (x, y) in enumerate(DataLoader(dataset, batch_size, sampler=sampler)):
            ...
            sampler.record_batch(batch_index, batch_size)
            state.commit()
        sampler.set_epoch(epoch + 1)

    Attributes
    ----------
    epoch, n_processed
        The state: how many of the epoch's indices were used; `reset` follows a change.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.n_processed = 0
        self.rank, self.num_replicas = 0, 1
        self._n_before = 0  # of `n_processed`, at the last reset
        self._order: list[int] = []  # of all ranks together: rank r has every num_replicas-th one, from the r-th on
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin *epoch*, of which nothing has been used. At its end, not at its begin: then a loss repeats nothing."""
        self.epoch, self.n_processed = epoch, 0
        self.reset()

    def record_batch(self, batch_index: int, batch_size: int) -> None:
        """Note that all ranks have used their batches up to *batch_index* (from 0 on since the loader was begun)."""
        n_used = (batch_index + 1) * batch_size * self.num_replicas
        self.n_processed = min(self._n_before + n_used, len(self.dataset))

    @property
    def processed_indices(self) -> list[int]:
        """The indices that were used in this epoch, in ascending order; made of the whole order at each call."""
        return sorted(self._shuffled()[: self.n_processed])

    def reset(self) -> None:
        """Share out what is left among the ranks of the present job (one, outside of jobs)."""
        session = process.session()
        self.rank, self.num_replicas = (session.rank, session.size) if session is not None else (0, 1)
        self._n_before = self.n_processed
        left = self._shuffled()[self._n_before :]
        n_more = -len(left) % self.num_replicas
        self._order = left + (left * n_more)[:n_more]

    def _shuffled(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.dataset), generator=generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how many of its indices were used."""
        return {"epoch": self.epoch, "n_processed": self.n_processed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, on whichever rank."""
        self.epoch, self.n_processed = state["epoch"], state["n_processed"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        """Give this rank's indices of what was left at the last `reset`."""
        return iter(self._order[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        """Return how many these are."""
        return len(self._order) // self.num_replicas
