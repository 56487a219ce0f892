"""bpsfast for TensorFlow: BytePS's API (`byteps.tensorflow`), eagerly and inside `tf.function`.

    import bpsfast.tensorflow as bps
    bps.init()
    with bps.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = ...
    gradients = tape.gradient(loss, variables)        # averages over all ranks
    bps.broadcast_variables(variables, root_rank=0)
"""
from __future__ import annotations

from ..trainer import process
from ..trainer.arguments import Average, ReduceOp, Sum
from ..trainer.process import barrier, local_rank, local_size, rank, resume, shutdown, size
from ..trainer.stats import get_pushpull_speed
from .broadcast import (
    BroadcastGlobalVariablesHook,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from .compression import Compression, Compressor
from .cross_barrier import CrossBarrier
from .ops import push_pull
from .optimizer import DistributedGradientTape, DistributedOptimizer

__all__ = [
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "Compressor",
    "CrossBarrier",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ReduceOp",
    "Sum",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "get_pushpull_speed",
    "init",
    "local_rank",
    "local_size",
    "push_pull",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
]


def init(lazy: bool = True, **settings: object) -> None:
    """Join the job (`bpsfast.init`). BytePS connects later if *lazy*; here it is always now, so errors show now."""
    process.init(**settings)


def suspend() -> None:
    """Leave the job until `resume`, which declares the same names in the same order. Raises as `process.suspend`."""
    process.suspend(shutdown)
