"""Horovod's API for TensorFlow 2 (0.28): `bpsfast.tensorflow` by other names, and the operations that ranks negotiate.

    import bpsfast.hvd.tensorflow as hvd                        # instead of: import horovod.tensorflow as hvd

Ranks make their operations in one order. allgather, alltoall, reducescatter, process sets, Min, Max and Product are
`bpsfast.hvd.torch`'s, and need PyTorch; nothing else here does.
"""
from __future__ import annotations

from ...tensorflow.broadcast import BroadcastGlobalVariablesHook, broadcast_global_variables
from ...tensorflow.compression import Compression
from ...trainer.process import local_rank, local_size, rank, size
from ..basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from ..errors import HorovodInternalError
from ..reduce_op import Adasum, Average, Max, Min, Product, Sum
from ..runtime import ProcessSet, global_process_set, remove_process_set
from .basics import (
    add_process_set,
    barrier,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    join,
    shutdown,
)
from .collective_ops import (
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
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
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
]
