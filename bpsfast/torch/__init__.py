"""bpsfast for PyTorch: BytePS's API (`byteps.torch`) on CPU tensors.

    import bpsfast.torch as bps
    bps.init()
    optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
"""
from __future__ import annotations

from ..trainer import current as _current
from ..trainer.current import barrier, local_rank, local_size, rank, size
from ..trainer.stats import get_pushpull_speed
from .broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .compression import Compression
from .cross_barrier import settle_everything as _settle_everything
from .ops import (
    declare,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
    synchronize,
)
from .optimizer import CrossBarrier, DistributedOptimizer
from .scheduling import schedule

#: BytePS's second name for it.
byteps_push_pull = push_pull_async_inplace

__all__ = [
    "Compression",
    "CrossBarrier",
    "DistributedOptimizer",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "declare",
    "get_pushpull_speed",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "schedule",
    "shutdown",
    "size",
    "synchronize",
]


def init(lazy: bool = True) -> None:
    """Join the job (`bpsfast.init`). BytePS connects later if *lazy*; here it is always now, so errors show now."""
    _current.init()


def shutdown() -> None:
    """Make the updates that are due (`cross_barrier`), then leave the job (`bpsfast.shutdown`)."""
    try:
        _settle_everything()
    finally:
        _current.shutdown()
