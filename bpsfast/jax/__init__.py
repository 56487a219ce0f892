"""bpsfast for JAX: gradients summed inside jit and outside, for optax and for loops of one's own.

    import bpsfast.jax as bps
    bps.init()
    params = bps.broadcast(params, root_rank=0)
    optimizer = bps.DistributedOptimizer(optax.adam(1e-3))

Inside jit, on the CPU: XLA calls our handler with its buffers (`handler`), in the order of the program (`primitive`).
"""
from __future__ import annotations

from ..trainer.arguments import Average, ReduceOp, Sum
from ..trainer.stats import get_pushpull_speed
from .basics import barrier, init, local_rank, local_size, rank, shutdown, size
from .broadcast import broadcast
from .ops import push_pull
from .optimizer import DistributedOptimizer, distributed_gradients, grad, value_and_grad

__all__ = [
    "Average",
    "DistributedOptimizer",
    "ReduceOp",
    "Sum",
    "barrier",
    "broadcast",
    "distributed_gradients",
    "get_pushpull_speed",
    "grad",
    "init",
    "local_rank",
    "local_size",
    "push_pull",
    "rank",
    "shutdown",
    "size",
    "value_and_grad",
]
