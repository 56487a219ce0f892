"""bpsfast for MXNet 1.9: BytePS's API (`byteps.mxnet`) on CPU tensors. MXNet itself is retired by its project.

    import bpsfast.mxnet as bps
    bps.init()
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
"""
from __future__ import annotations

from ..trainer.process import barrier, init, local_rank, local_size, rank, shutdown, size
from ..trainer.stats import get_pushpull_speed
from .ops import broadcast_parameters, byteps_declare_tensor, byteps_push_pull
from .optimizer import DistributedOptimizer, DistributedTrainer

__all__ = [
    "DistributedOptimizer",
    "DistributedTrainer",
    "barrier",
    "broadcast_parameters",
    "byteps_declare_tensor",
    "byteps_push_pull",
    "get_pushpull_speed",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
