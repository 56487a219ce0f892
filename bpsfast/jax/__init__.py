"""bpsfast for JAX: gradients summed inside and outside jit, with optax or in your own training loop.

    import bpsfast.jax as bps
    bps.init()
    params = bps.broadcast(params, root_rank=0)
    optimizer = bps.DistributedOptimizer(optax.adam(1e-3))

Inside jit, on the CPU, XLA calls a handler of bpsfast's with its buffers, in the order of the program (`primitive`).
"""
from __future__ import annotations

import atexit

from ..trainer import process
from ..trainer.arguments import Average, ReduceOp, Sum
from ..trainer.process import local_rank, local_size, rank, size
from ..trainer.stats import get_pushpull_speed
from .ops import broadcast, push_pull
from .optimizer import DistributedOptimizer, distributed_gradients, grad, value_and_grad
from .primitive import wait_for_programs

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


def init(**settings: object) -> None:
    """Join the job (`bpsfast.init`)."""
    process.init(**settings)
    # JAX runs programs asynchronously; they must end before the process leaves the job at exit.
    atexit.unregister(wait_for_programs)
    atexit.register(wait_for_programs)


def shutdown() -> None:
    """Wait for the programs that JAX has started, then leave the job (`bpsfast.shutdown`)."""
    wait_for_programs()
    process.shutdown()


def barrier(timeout_s: float | None = None) -> None:
    """Wait for the programs that JAX has started, then until all ranks have called this (`bpsfast.barrier`).

    After such a program has failed, jitted functions with push_pull fail, too, until this is called.
    """
    wait_for_programs()
    process.barrier(timeout_s)
