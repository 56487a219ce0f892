"""Horovod's API for Keras (0.28), on Keras 3: `bpsfast.keras` by other names.

    import bpsfast.hvd.keras as hvd                             # instead of: import horovod.keras as hvd
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from ...keras.backend import init as _init, local_rank, local_size, rank, shutdown, size
from ...keras.compression import Compression, CompressionLike, parted
from ...keras.ops import broadcast, broadcast_global_variables, is_tensor, push_pull
from ...keras.optimizer import Reduction, distribute, loaded
from ...orchestration.errors import UnsupportedError
from ...trainer import process
from ...trainer.arguments import Average, Sum, check_passes, takes_mean
from .. import capabilities
from ..capabilities import *  # noqa: F403
from ..reduce_op import check_predivision, factor
from . import callbacks

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Sum",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
__all__ += capabilities.__all__


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job, as `bpsfast.init`; raises UnsupportedError if *comm* or *process_sets* are given."""
    if comm or process_sets:
        raise UnsupportedError("init(comm, process_sets): bpsfast.hvd.keras reduces over all ranks that the launcher "
                               "has started; process sets are bpsfast.hvd's, for PyTorch")
    _init()


def is_initialized() -> bool:
    """Return whether this process is in a job."""
    return process.session() is not None


def allreduce(value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: int | None = None,
              compression: CompressionLike = Compression.none) -> Any:
    """Return *value* averaged (summed) over all ranks: `bpsfast.keras.push_pull`, with factors and a compressor.

    Averages and products of integers are truncated towards zero.

    Raises ConfigError for other reductions than Average and Sum, if *average* and *op* are both given, *average* is not
    a bool, or a factor is not a number.
    """
    mean = takes_mean(average, op)
    factors = factor("prescale_factor", prescale_factor), factor("postscale_factor", postscale_factor)
    compressor, choice = parted(compression)
    if choice is not None:
        raise UnsupportedError("codecs are for the gradients of DistributedOptimizer: give a compressor here")
    given = keras.ops.convert_to_tensor(value)
    divides = mean and "int" in keras.backend.standardize_dtype(given.dtype)
    if factors == (1.0, 1.0) and compressor is Compression.none and not divides:
        return push_pull(value, name, mean)
    small, context = compressor.compress(_scaled(given, factors[0]))
    found = compressor.decompress(push_pull(small, name, mean and not divides), context)
    if divides:
        found = keras.ops.sign(found) * (keras.ops.abs(found) // size())
    found = _scaled(found, factors[1])
    return found if is_tensor(value) else np.asarray(keras.ops.convert_to_numpy(found))


def _scaled(tensor: Any, by: float) -> Any:
    """Return *tensor* times *by*; integers are multiplied in float64 and truncated towards zero."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if by == 1.0:
        return tensor
    return keras.ops.cast(keras.ops.cast(tensor, "float64") * by, dtype) if "int" in dtype else tensor * by


def DistributedOptimizer(optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
                         compression: CompressionLike = Compression.none, sparse_as_dense: bool = False,
                         gradient_predivide_factor: float = 1.0, op: int = Average, num_groups: int = 0,
                         groups: Any = None, backward_passes_per_step: int = 1,
                         average_aggregated_gradients: bool = False) -> Any:
    """Let *optimizer* reduce its gradients over all ranks: `bpsfast.keras.DistributedOptimizer`.

    Parameters
    ----------
    gradient_predivide_factor
        Gradients are divided by it before they are averaged, and multiplied by it afterwards.
    op
        Average or Sum.
    num_groups, groups
        Horovod's; ignored. All gradients are sent together, small ones fused.
    backward_passes_per_step, average_aggregated_gradients
        Sum (average) the gradients of so many steps first, by the optimizer's ``gradient_accumulation_steps``; it must
        not be built yet.

    Raises ConfigError as `bpsfast.keras.DistributedOptimizer`, and for invalid reductions and numbers.
    """
    mean = takes_mean(None, op)
    check_predivision(gradient_predivide_factor, mean)
    check_passes(n := backward_passes_per_step)
    reduction = Reduction(name, mean, *parted(compression), prescale=1 / gradient_predivide_factor,
                          postscale=gradient_predivide_factor * (1 if average_aggregated_gradients else n))
    return distribute(optimizer, reduction, n)


def load_model(filepath: Any, custom_optimizers: Sequence[type] | None = None,
               custom_objects: Mapping[str, Any] | None = None, compression: CompressionLike = Compression.none,
               legacy_opts: bool = False) -> Any:
    """Return the model of *filepath* with a DistributedOptimizer: `bpsfast.keras.load_model`. Keras 3 has no
    *legacy_opts*.
    """
    return loaded(filepath, custom_optimizers, custom_objects, Reduction(None, True, *parted(compression)), {})
