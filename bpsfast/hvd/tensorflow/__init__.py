"""Horovod's API for TensorFlow 2 (0.28): `bpsfast.tensorflow` by other names, and the operations that ranks negotiate.

    import bpsfast.hvd.tensorflow as hvd                        # instead of: import horovod.tensorflow as hvd

Ranks make their operations in one order. allgather, alltoall, reducescatter, process sets, Min, Max and Product are
`bpsfast.hvd.torch`'s, and need PyTorch; nothing else here does.
"""
from __future__ import annotations

from ...tensorflow.broadcast import BroadcastGlobalVariablesHook, broadcast_global_variables
from ...tensorflow.compression import Compression
from ...trainer.process import local_rank, local_size, rank, size
from .. import capabilities
from ..capabilities import *  # noqa: F403
from ..errors import HorovodInternalError
from ..reduce_op import Adasum, Average, Max, Min, Product, Sum
from ..runtime import ProcessSet, global_process_set, remove_process_set
from . import basics, collective_ops
from .basics import *  # noqa: F403
from .collective_ops import *  # noqa: F403
from .training import DistributedGradientTape, DistributedOptimizer

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "broadcast_global_variables",
    "global_process_set",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "size",
]
__all__ += basics.__all__
__all__ += capabilities.__all__
__all__ += collective_ops.__all__
