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

under `bpsfast run --elastic --lost-worker shrink|wait`. A job's members are fixed. When one is lost, whoever is left
goes back to the last commit and forms the next job (`orchestration.muster` says of whom); all get the state of the rank
whose commit is the most advanced, and call ``train(state)`` again. Workers that are added join after a commit.
With PyTorch: `TorchState` and `ElasticSampler`, which are `bpsfast.torch.elastic`'s.

    member      a worker's end of the muster: how it gets into the next job
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
