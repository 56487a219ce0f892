"""bpsfast for PyTorch: BytePS's API (`byteps.torch`) for CPU tensors, and for GPU tensors as docs/gpus.md lists.

    import bpsfast.torch as bps
    bps.init()
    optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
"""
from __future__ import annotations

from ..trainer.object_broadcast import broadcast_object
from ..trainer.stats import get_pushpull_speed
from .async_optimizer import AsyncOptimizer
from .broadcast import broadcast_optimizer_state, broadcast_parameters
from .compression import Compression, Compressor
from .ops import (
    barrier,
    byteps_torch_set_num_grads,
    declare,
    init,
    local_rank,
    local_size,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_group_sync_inplace,
    push_pull_inplace,
    rank,
    resume,
    shutdown,
    size,
    suspend,
    synchronize,
)
from .optimizer import CrossBarrier, DistributedOptimizer
from .outer_optimizer import OuterOptimizer
from .parallel import DistributedDataParallel
from .scheduling import schedule

#: BytePS's second name for it.
byteps_push_pull = push_pull_async_inplace

__all__ = [
    "AsyncOptimizer", "Compression", "Compressor", "CrossBarrier", "DistributedDataParallel", "DistributedOptimizer",
    "OuterOptimizer", "barrier", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    "byteps_push_pull", "byteps_torch_set_num_grads", "declare", "get_pushpull_speed", "init", "local_rank",
    "local_size", "poll", "push_pull", "push_pull_async", "push_pull_async_inplace", "push_pull_group_sync_inplace",
    "push_pull_inplace", "rank", "resume", "schedule", "shutdown", "size", "suspend", "synchronize",
]
