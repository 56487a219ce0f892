"""MirroredStrategy with gradients averaged over all ranks (`byteps.tensorflow.distribute`).

    strategy = MirroredStrategy(devices=["/cpu:0"])           # one process for each device, as in BytePS
    with strategy.scope():
        model = ...
"""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

from ..orchestration.errors import ConfigError, UnsupportedError
from ..trainer import process
from ..trainer.arguments import Average, averages
from .memory import wire_dtype
from .ops import reduced

__all__ = ["MirroredStrategy"]


class MirroredStrategy(tf.distribute.MirroredStrategy):  # type: ignore[misc]
    """A `tf.distribute.MirroredStrategy` of one device, which reduces over all ranks of the job.

    Optimizers and `tf.distribute.ReplicaContext.all_reduce` reduce over all ranks, in the same order on all, eagerly
    and inside `tf.function`; a call sends all its tensors together. For `tf.distribute` each rank is a job of one
    replica: ``num_replicas_in_sync`` is 1, batches are those of one rank, and `reduce` and `gather`, for reports,
    return this rank's own values. Each rank initializes its variables: use `broadcast_variables` to start from those of
    one rank.

    Parameters
    ----------
    devices
        One device. None: the only GPU that this process sees, else the CPU.
    cross_device_ops
        TensorFlow's; must be None, as bpsfast reduces.
    op
        How TensorFlow's SUM combines the ranks. Average: their mean, as in `DistributedOptimizer`, which suits the
        same learning rate. Sum: their sum, as in BytePS. MEAN is always the mean.

    Raises
    ------
    UnsupportedError
        For several devices, and for *cross_device_ops*.
    ConfigError
        If *op* is neither, or there is no such device.
    ClosedError
        Before `init`.
    """

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: Any = None, *,
                 op: int = Average) -> None:
        average = averages(True, op)
        if cross_device_ops is not None:
            raise UnsupportedError(f"cross_device_ops={cross_device_ops!r}: values are reduced over all ranks by "
                                   "bpsfast; use tf.distribute.MirroredStrategy for other operations")
        process.current()
        device = _one_of(devices)
        tf.distribute.Strategy.__init__(self, _Across(self, device, average))


def _one_of(devices: Sequence[str] | None) -> str:
    """Return the only one of *devices*; raise if there are others."""
    if devices is None:
        gpus = tf.config.list_logical_devices("GPU")
        found = [gpu.name for gpu in gpus] or ["/device:CPU:0"]
    else:
        found = [devices] if isinstance(devices, str) else list(devices)
    if len(found) != 1:
        raise UnsupportedError(
            f"{len(found)} devices {found[:4]}: each process has one device. Start as many ranks as devices, "
            "and give each its own, by tf.config.set_visible_devices(gpus[bps.local_rank()], 'GPU') for example")
    known = [each.name for each in tf.config.list_logical_devices()]
    name = tf.DeviceSpec.from_string(found[0])
    if not any((spec.device_type, spec.device_index) == (name.device_type, name.device_index or 0)
               for spec in map(tf.DeviceSpec.from_string, known)):
        raise ConfigError(f"there is no device {found[0]!r} here; there are {', '.join(known)}")
    return str(found[0])


class _Across(MirroredExtended):  # type: ignore[misc]
    """The strategy's implementation for one device, which reduces over the ranks."""

    def __init__(self, strategy: Any, device: str, average: bool) -> None:
        super().__init__(strategy, devices=[device], cross_device_ops=tf.distribute.ReductionToOneDevice())
        self._average = average

    def _use_merge_call(self) -> bool:
        """Use `_batch_reduce_to` inside XLA, too, which then reports that it does not support the operation."""
        return True

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        values = [self._local_results(value)[0] for value, _ in value_destination_pairs]
        mean = self._average or reduce_op == tf.distribute.ReduceOp.MEAN
        return reduced(values, _names_of(values, mean), mean, sparse_as_dense=False, has_shapes_behind=True)


def _names_of(values: Sequence[Any], mean: bool) -> list[str]:
    """Return names that are the same on all ranks, in every call and trace; shapes are appended later."""
    kinds = [(wire_dtype(value.dtype, "what is reduced"), isinstance(value, tf.IndexedSlices)) for value in values]
    digest = hashlib.sha256(repr((kinds, mean)).encode()).hexdigest()[:8]
    return [f"MirroredStrategy.{digest}.{place}" for place in range(len(values))]
