"""Horovod's elastic training for PyTorch: a program goes on when workers are lost, replaced or added.

    import bpsfast.hvd as hvd
    hvd.init()
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state): ...

    train(state)

under `bpsfast run --elastic`. Jobs are formed, and states shared, as in `bpsfast.elastic`; operations, process sets and
optimizers of this API belong to one job, and begin anew in the next one. Horovod gives all ranks the state of rank 0,
which is never a new worker there; here all get that of the rank with most commits.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .. import elastic
from ..elastic.training import State, WorkersJoined, run_in_jobs
from ..torch.elastic import ElasticSampler as _ElasticSampler, TorchState
from . import basics, runtime

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]

#: What `State.commit` and `State.check_host_updates` raise when workers wait to join; `run` catches it.
HostsUpdatedInterrupt = WorkersJoined

_Result = TypeVar("_Result")


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return *func*, whose first argument is a `State`, as a function that survives lost and added workers.

    As `bpsfast.elastic.run`; joins a job if `hvd.init` has not. Process sets that `init` was not given are gone in the
    next job: add them in a reset callback (`State.register_reset_callbacks`), which also is the place to scale a
    learning rate by `hvd.size()`.
    """
    return run_in_jobs(func, basics.init, runtime.leave)


class ObjectState(elastic.ObjectState):
    """Keyword arguments as attributes: numbers, NumPy arrays and other objects that can be copied and pickled.

    *bcast_object* and *get_rank*, which Horovod takes, are not needed: the state is shared as that of
    `bpsfast.elastic.ObjectState`.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **objects: Any) -> None:
        super().__init__(**objects)


class ElasticSampler(_ElasticSampler):
    """`bpsfast.elastic.ElasticSampler` with Horovod's further methods and attributes.

    All ranks use equally many samples in a step, so what one rank records tells what all of them have used.
    """

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that all ranks have used as many samples as there are *indices*, after those that are recorded."""
        self._record(self._n_each + len(list(indices)))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return this rank's indices of batch *batch_idx*, counted from 0 since the last `reset`."""
        own = list(self)
        return own[batch_idx * batch_size:(batch_idx + 1) * batch_size]

    @property
    def processed_indices(self) -> set[int]:  # type: ignore[override]
        """The indices that were used in this epoch; computed at each call."""
        return set(super().processed_indices)

    @property
    def remaining_indices(self) -> list[int]:
        """The indices that were unused at the last `reset`, of all ranks, in their order."""
        return [*self._skipped_before, *self._shuffled()[self._n_before:]]

    @property
    def num_samples(self) -> int:
        """How many indices this rank got at the last `reset`."""
        return len(self)

    @property
    def total_size(self) -> int:
        """How many indices all ranks got at the last `reset`, including repeated ones."""
        return len(self._order)
