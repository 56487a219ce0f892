"""Elastic training: the program goes on when workers are lost, replaced or added.

    import bpsfast, bpsfast.elastic as elastic
    bpsfast.init()
    state = elastic.ObjectState(weights=np.zeros(10), step=0)

    @elastic.run
    def train(state):
        while state.step < 1000:
            ...                              # push_pull and the like
            state.step += 1
            state.commit()

    train(state)

under `bpsfast run --elastic --lost-worker shrink|wait`. The members of a job are fixed. When one is lost, the others go
back to the last commit and join the next job (`orchestration.elastic` chooses its ranks). All get the state of the rank
with most commits, and call ``train(state)`` again. Workers that are added join after a commit. `TorchState` and
`ElasticSampler`, for PyTorch, are in `bpsfast.torch.elastic`.

    member      a worker's end of the coordinator: how it gets into the next job
    running     `run`
    state       what is committed, restored and given to all: `State`, `ObjectState`
"""
from __future__ import annotations

from importlib import import_module

from .coordinator_client import TrainingOver
from .training import ObjectState, State, WorkersJoined, run

#: Horovod's name for it.
HostsUpdatedInterrupt = WorkersJoined

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "TrainingOver",
           "WorkersJoined", "run"]


def __getattr__(name: str) -> object:
    if name in ("TorchState", "ElasticSampler"):  # which need torch
        return getattr(import_module("..torch.elastic", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
