"""DistributedOptimizer: Keras's optimizers, and those of TensorFlow 1, whose gradients are averaged over all ranks."""
from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..orchestration.errors import ConfigError, UnsupportedError
from ..trainer.reduce_op import Average, averages
from .compression import BF16Compressor, Compression, CompressionLike, FP16Compressor, parted
from .exchange import reduced
from .tape import names_of


def DistributedOptimizer(optimizer: Any, name: str | None = None, use_locking: bool = False, device_dense: str = "",
                         device_sparse: str = "", compression: CompressionLike = Compression.none,
                         sparse_as_dense: bool = False, backward_passes_per_step: int = 1, op: int = Average) -> Any:
    """Return *optimizer* for gradients that are averaged (summed) over all ranks first.

    Optimizers of Keras are `bpsfast.keras.DistributedOptimizer`'s to wrap. Of those of TensorFlow 1
    (`tf.compat.v1.train`) ``compute_gradients`` returns averages. *use_locking* and devices are BytePS's.

    Raises
    ------
    ConfigError
        If *optimizer* is neither, or *op* or *compression* is not possible.
    UnsupportedError
        For more than one backward pass per step: Keras's optimizers have gradient_accumulation_steps.
    """
    mean = averages(True, op)
    parted(compression)
    if backward_passes_per_step != 1:
        raise UnsupportedError(f"backward_passes_per_step={backward_passes_per_step}: give a Keras optimizer "
                               f"gradient_accumulation_steps={backward_passes_per_step} instead")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _Summing(optimizer, name, use_locking, compression, sparse_as_dense, mean)
    from .. import keras

    own = {Compression.none: keras.Compression.none, FP16Compressor: keras.Compression.fp16,
           BF16Compressor: keras.Compression.bf16}
    chosen = own.get(compression, compression) if isinstance(compression, type) else compression
    return keras.DistributedOptimizer(optimizer, name, device_dense, device_sparse, chosen, sparse_as_dense,
                                      average=mean)


class _Summing(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of TensorFlow 1, for averages."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool, compression: CompressionLike,
                 sparse_as_dense: bool, average: bool) -> None:
        if isinstance(optimizer, _Summing):
            raise ConfigError(f"{name or optimizer.get_name()} is a DistributedOptimizer already")
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer, self._scope = optimizer, name
        self._compression, self._sparse_as_dense, self._average = compression, sparse_as_dense, average

    def compute_gradients(self, *arguments: Any, **keywords: Any) -> list[tuple[Any, Any]]:
        """Return gradients that are averaged over all ranks, with their variables."""
        pairs = self._optimizer.compute_gradients(*arguments, **keywords)
        variables = [variable for _, variable in pairs]
        sums = reduced([gradient for gradient, _ in pairs], names_of(variables, self._scope), self._average,
                       compression=self._compression, sparse_as_dense=self._sparse_as_dense)
        return list(zip(sums, variables))

    def apply_gradients(self, *arguments: Any, **keywords: Any) -> Any:
        """As the optimizer's."""
        return self._optimizer.apply_gradients(*arguments, **keywords)

    def get_slot(self, *arguments: Any, **keywords: Any) -> Any:
        """As the optimizer's."""
        return self._optimizer.get_slot(*arguments, **keywords)

    def get_slot_names(self, *arguments: Any, **keywords: Any) -> Any:
        """As the optimizer's."""
        return self._optimizer.get_slot_names(*arguments, **keywords)

    def variables(self) -> Any:
        """As the optimizer's."""
        return self._optimizer.variables()
