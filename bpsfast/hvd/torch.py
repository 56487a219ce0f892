"""Horovod's API for PyTorch (0.28), on CPU tensors and NumPy arrays.

    import bpsfast.hvd.torch as hvd                             # instead of: import horovod.torch as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

Operations are matched by name, in whatever order each rank begins its own.
"""
from __future__ import annotations

from ..torch.compression import Compression
from . import basics, capabilities, collective_ops, elastic
from .basics import *  # noqa: F403
from .capabilities import *  # noqa: F403
from .collective_ops import *  # noqa: F403
from .errors import HorovodInternalError
from .handle import poll, synchronize
from .objects import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .optimizer import DistributedOptimizer
from .reduce_op import Adasum, Average, Max, Min, Product, Sum
from .runtime import ProcessSet, add_process_set, global_process_set, remove_process_set
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "global_process_set",
    "poll",
    "remove_process_set",
    "synchronize",
]
__all__ += basics.__all__
__all__ += capabilities.__all__
__all__ += collective_ops.__all__
